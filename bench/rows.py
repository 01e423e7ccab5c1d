"""A row is one measured value of one case. A run is a list of rows with one environment, and is kept as JSON.

    {suite, case: {...}, metric, unit, value, p20, p80, n, peers: {...}, environment: {...}}

`case` identifies what was measured, by name and value; nothing is ever read back from a name. `peers` are what the
value is compared with: a number in the row's unit (`bound`, a calculated minimum), or the changes that lead from this
case to another one of the run (`{"mode": "dense"}`; None removes a key), whose row has the same metric. `environment`
has what differs from the run's: a row that was added by a later call has another date and commit.

A file holds what all rows have in common once, and a row a line.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparse_opt import __version__
from sparse_opt.cli.doctor import installed_version
from sparse_opt.errors import ConfigError
from sparse_opt.files import written_aside

Case = dict[str, Any]  # name -> a string, number or bool
Environment = dict[str, Any]

# Notes that begin with this name what is missing.
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value.

    Args:
        suite: the benchmark.
        case: what was measured. Values of None and False are left out.
        metric: "time", "peak memory".
        unit: ms, s, bytes, GB/s, share (shown in percent), x (a ratio), or "" (a count).
        value: the median, if it was measured several times.
        p20, p80: percentiles of a value that varies; None of one that does not, such as bytes.
        n: how often it was measured.
        peers: name -> a number, or changes of the case (see above).
        environment: what differs from the run's environment.
    """

    suite: str
    case: Case
    metric: str
    unit: str
    value: float
    p20: float | None = None
    p80: float | None = None
    n: int = 1
    peers: dict[str, float | Case] = field(default_factory=dict)
    environment: Environment = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "case", clean(self.case))

    @classmethod
    def of_samples(cls, samples: Sequence[float], **others: Any) -> Row:
        """The row of values that were measured one after the other."""
        p20, median, p80 = percentiles(samples)
        return cls(value=median, p20=p20, p80=p80, n=len(samples), **others)

    @classmethod
    def of_timing(cls, timing: Mapping[str, Any], **others: Any) -> Row:
        """The row of a time in ms; `timing` has the values of a `timing.Timing`, perhaps among others."""
        spread = {"p20": timing["p20_ms"], "p80": timing["p80_ms"], "n": timing["n_rounds"]}
        return cls(metric="time", unit="ms", value=timing["ms"], **spread, **others)

    @property
    def key(self) -> tuple[Any, ...]:
        """What no other row of a run has."""
        return (self.suite, self.metric, *sorted(self.case.items()))


@dataclass
class Run:
    """Rows, and what else a run has to say.

    Args:
        notes: what was left out, and why; what was checked.
        wrong: results that were wrong, which are not timed.
        completed: whether nothing is missing.
    """

    environment: Environment
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    completed: bool = True
    output: Path | None = None  # of `save`
    peers: Sequence[Row] = ()  # rows that are not shown, and that those of the run are compared with

    def save(self) -> None:
        """Write what is there, for a run that may be killed; nothing without an output file, or without rows."""
        if self.output is not None and self.rows:
            write(self.output, replace(self, completed=False))

    def add(self, *rows: Row) -> None:
        """Add rows, in place of those of the same case and metric."""
        keys = {row.key for row in rows}
        self.rows = [other for other in self.rows if other.key not in keys] + [*rows]

    def miss(self, what: str) -> None:
        """Note that something could not be measured; the run is then not complete."""
        self.note(f"{NOT_MEASURED}: {what}")
        self.completed = False

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def matching(self, **case: Any) -> list[Row]:
        """The rows whose cases have these values; None stands for a key that they do not have."""
        return [row for row in self.rows if all(row.case.get(name) == value for name, value in case.items())]

    def peer(self, row: Row, name: str) -> Row | float | None:
        """The row that a peer of a row refers to, or its number; None if it was not measured."""
        peer = row.peers.get(name)
        if not isinstance(peer, dict):
            return peer
        key = (row.suite, row.metric, clean(row.case | peer))
        rows = (*self.rows, *self.peers)
        return next((other for other in rows if (other.suite, other.metric, other.case) == key), None)

    def environment_of(self, row: Row) -> Environment:
        return self.environment | row.environment


def clean(case: Mapping[str, Any]) -> Case:
    """The case without keys that say nothing; lists are words."""
    values = {name: " ".join(map(str, v)) if isinstance(v, list | tuple) else v for name, v in case.items()}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ""}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th percentile, the median and the 80th percentile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    return p20, statistics.median(values), p80


# Values and cases in words


def number(value: float, digits: int = 4) -> str:
    """With so many significant digits, but at most three decimals and all digits before the point."""
    whole = len(str(int(abs(value))))
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    decimals = max(0, digits - whole) if abs(value) >= 1 else 3
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.{min(decimals, 3)}f}"


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """(divisor, name) of the unit in which values up to `largest` are shown."""
    if unit == "bytes":
        units = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
        return next(((2.0**k, name) for k, name in units if largest >= 2.0**k), (1.0, "bytes"))
    return (0.01, "%") if unit == "share" else (1.0, unit)


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """A value with its unit, for a sentence: 78.5 ms, 10.7 GiB, 2.5 %."""
    divisor, name = scale_of(unit, value)
    return f"{number(value / divisor, digits)} {name}".strip()


def worded(name: str, value: Any) -> str:
    """A value of a case, as a cell of a table; shares are in percent."""
    if value is True or isinstance(value, str):
        return "yes" if value is True else value
    if name == "density":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def described(name: str, value: Any) -> str:
    """A part of a case in words."""
    words = name.replace("_", " ")
    if value is True:
        return words
    if isinstance(value, str):
        return value if " " in value else f"{value} {words}"
    return f"{words} {worded(name, value)}"


def label(case: Mapping[str, Any], leave_out: Iterable[str] = ()) -> str:
    """A case in one line: words stand for themselves, numbers behind their names."""
    parts = {name: value for name, value in case.items() if name not in set(leave_out)}
    return ", ".join(value if isinstance(value, str) else described(name, value) for name, value in parts.items())


# Files


def in_common(cases: Sequence[Case]) -> Case:
    """What all cases have in common; nothing of a single case."""
    if len(cases) < 2:
        return {}
    return {k: v for k, v in cases[0].items() if all(case.get(k) == v for case in cases)}


def write(path: Path, run: Run) -> None:
    """Write a run atomically. NaN is an error, because no valid result has one."""
    common = in_common([row.case for row in run.rows])
    head = {
        "environment": run.environment,
        "completed": run.completed,
        "notes": run.notes,
        "wrong": run.wrong,
        "case": common,
    }
    lines = []
    for row in run.rows:
        values = asdict(row) | {"case": {k: v for k, v in row.case.items() if k not in common}}
        lines.append(json.dumps({k: v for k, v in values.items() if v not in (None, {})}, allow_nan=False))
    start = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    with written_aside(path) as aside:
        aside.write_text(f'{start},\n "rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def read(path: Path) -> Run:
    """Read a run, also of pytest-benchmark.

    Raises:
        ConfigError: the file cannot be read, or holds no run.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "benchmarks" in data:
            return _of_pytest(data)
        rows = [Row(**row | {"case": row.get("case", {}) | data["case"]}) for row in data["rows"]]
        return Run(data["environment"], rows, data["notes"], data["wrong"], data["completed"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the results: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected the JSON of `sparse-opt bench`: {error!r}") from error


def _of_pytest(data: Mapping[str, Any]) -> Run:
    """The run of a file of `pytest bench`: times with quartiles in place of p20 and p80."""
    rows = []
    for bench in data["benchmarks"]:
        stats, info, params = bench["stats"], bench["extra_info"], dict(bench["params"])
        work = params.pop("op", bench["name"].partition("[")[0].removeprefix("test_"))
        case = {"work": work, **params, "numel": info["numel"], "threads": info["threads"]}
        peers = {"bound": 1e3 * info["bytes"] / (1e9 * info["copy_gb_per_s"])}
        times = {f"{name}_ms": 1e3 * stats[key] for name, key in (("p20", "q1"), ("p80", "q3"))}
        times |= {"ms": 1e3 * stats["median"], "n_rounds": stats["rounds"]}
        rows.append(Row.of_timing(times, suite="ops", case=case, peers=peers))
    return Run(data["machine_info"]["sparse_opt"], rows)


# The environment of a measurement: machine, versions and commit

COMMIT_VARIABLE = "SPARSE_OPT_COMMIT"
_PACKAGES = ("triton", "transformers", "safetensors", "trl", "pytest")


def environment(device: torch.device | str) -> Environment:
    """Everything needed to reproduce a measurement made now on `device`, as plain data for JSON."""
    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": _cpu_model(),
            "logical_cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
            **({"gpu": _gpu(device)} if device.type == "cuda" else {}),
        },
        "versions": {
            "sparse_opt": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{package: installed_version(package) for package in _PACKAGES},
        },
    }


def machine_name(environment: Environment) -> str:
    """The name of the GPU, or of the CPU if it was measured on a CPU."""
    machine = environment["machine"]
    name: str = machine["gpu"]["name"] if "gpu" in machine else machine["cpu"]
    return name


def machine_line(environment: Environment) -> str:
    """Machine, versions, date and commit in one line."""
    machine, versions = environment["machine"], environment["versions"]
    gpu = machine.get("gpu")
    name = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"{machine['cpu']}, {machine['logical_cpus']} cores"
    triton = f", triton {versions['triton']}" if gpu else ""
    commit, dirty, _ = (environment["commit"] or "unknown").partition("-dirty")
    return f"{name}, torch {versions['torch']}{triton}, {environment['date'][:10]}, commit {commit[:9]}{dirty}"


def commit() -> str | None:
    """SPARSE_OPT_COMMIT if it is set, else the commit of the checkout, with "-dirty" appended if files differ from it.

    Files of results may differ, because a run that overwrites them does not change the measured code.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    head = _output(*git, "rev-parse", "HEAD")
    if not head:
        return None
    code = ("--untracked-files=no", "--", ":(top)", ":(top,exclude)bench/results")
    return head + ("-dirty" if _output(*git, "status", "--porcelain", *code) else "")


def _output(*command: str) -> str:
    """The output of a command; empty if there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.*)", cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else "", re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = drivers.partition("\n")[0].strip() or None
    return {"name": properties.name, "memory_bytes": properties.total_memory, "driver": driver}
