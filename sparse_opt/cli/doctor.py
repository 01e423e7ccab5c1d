"""`sparse-opt doctor`: report the installed packages, the available backends, and why the others are unavailable."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..options import CommandParser
from ..tables import format_bytes, table
from .common import add_json_flag, print_json

# Environment variables that affect which code runs.
ENVIRONMENT = ("SPARSE_OPT_BACKEND", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "SPARSE_OPT_DEBUG")
OPTIONAL_PACKAGES = ("transformers", "datasets", "trl", "peft")
_EPILOG = """A backend is an implementation of the ops: reference (plain torch), cpu and cuda (the extension), triton.
On each device 'auto' selects the first backend of its order that can run; SPARSE_OPT_BACKEND=name, or an argument
backend=name, selects that backend, or fails.

examples:
  sparse-opt doctor
  sparse-opt doctor --json | python -c "import json, sys; print(json.load(sys.stdin)['backends'])"
"""


def run(argv: Sequence[str]) -> int:
    """Print the report. The exit code is 0 even if backends are unavailable, because the report itself succeeded.

    Raises:
        BackendUnavailable: after the report, if SPARSE_OPT_BACKEND is not the name of a backend, so that no op could
            run.
    """
    args = _parser().parse_words(argv)
    report = examine()
    if args.json:
        print_json(report)
    else:
        print(_text(report))
    named = report["environment"]["SPARSE_OPT_BACKEND"]
    if "torch" in report and named not in (None, "auto", *report["backends"]["cpu"]):
        from .. import backends

        backends.choose("cpu")  # raises
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt doctor",
        description="Show what is installed, which backends can run, and why the others cannot.",
        epilog=_EPILOG,
    )
    add_json_flag(parser)
    return parser


def examine() -> dict[str, Any]:
    """The report as plain data. Keys that need torch are absent if torch is not installed."""
    report: dict[str, Any] = {
        "sparse_opt": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "packages": {name: installed_version(name) for name in ("torch", "triton", *OPTIONAL_PACKAGES)},
    }
    if importlib.util.find_spec("torch") is None:
        return report

    import torch

    from .. import backends

    present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    module, cause = backends.native_module()
    autograd, why_no_autograd = backends.autograd_module()
    report |= {
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()},
        "extension": {
            "built": module is not None,
            "cause": cause,
            "build_info": module.build_info() if module else None,
        },
        "autograd": {
            "built": autograd is not None,
            "path": autograd.__file__ if autograd else None,
            "cause": why_no_autograd,
        },
        "devices": _devices(torch),
        "backends": {
            device: {name: _availability(backends, torch, name, device) for name in backends.BACKENDS}
            for device in (present if len(present) > 1 else ("cpu", "cuda"))
        },
        "auto": {device: _auto(backends, device) for device in present},
    }
    return report


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"name": "cpu", "type": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "type": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _availability(backends: Any, torch: Any, backend: str, device: str) -> dict[str, Any]:
    cause = backends.why_unavailable(backend, device)
    if not cause and device == "cuda":
        cause = "torch finds no CUDA device" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
    return {"available": not cause, "cause": cause}


def _auto(backends: Any, device: str) -> dict[str, Any]:
    """The backend that `auto` selects on a device, and the order in which it tries them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report contains what the warning says
        return {"backend": backends.choose(device, "auto"), "order": backends.AUTO_ORDER[device.partition(":")[0]]}


def _text(report: dict[str, Any]) -> str:
    packages, python = report["packages"], report["python"]
    facts = [
        ("sparse-opt", f"{report['sparse_opt']['version']}  ({report['sparse_opt']['path']})"),
        ("python", f"{python['version']}  ({python['executable']}, {python['platform']})"),
    ]
    if "torch" not in report:
        facts.append(("torch", "MISSING: sparse-opt needs torch >= 2.10; install it with `pip install torch`"))
        return _aligned(facts)
    torch, extension = report["torch"], report["extension"]
    facts.append(("torch", f"{torch['version']}  (CUDA {torch['cuda'] or 'none'}, {torch['threads']} threads)"))
    facts.append(("triton", packages["triton"] or "not installed"))
    facts.append(("extension", _one_line(extension["build_info"]) if extension["built"] else extension["cause"]))
    if extension["built"]:
        from .. import backends

        autograd = report["autograd"]
        native = f"native  ({autograd['path']})"
        facts.append(("autograd", native if autograd["built"] else f"{autograd['cause']}: {backends.WITHOUT_AUTOGRAD}"))
    facts += [("device", _one_line(device)) for device in report["devices"]]
    facts += [(name, packages[name] or "not installed") for name in OPTIONAL_PACKAGES]
    facts += [("environment", f"{name}={value}") for name, value in report["environment"].items() if value is not None]
    alike = _alike(report)
    rows = [
        (f"{', '.join(devices)} tensors", name, "yes" if found["available"] else "no", found["cause"])
        for devices in alike
        for name, found in report["backends"][devices[0]].items()
    ]
    choices = [line for devices in alike if devices[0] in report["auto"] for line in _choice(report, devices)]
    backend_table = table(("on", "backend", "runs", "because"), rows, n_words=4)
    return "\n".join([_aligned(facts), "", backend_table, "", *choices])


def _alike(report: dict[str, Any]) -> list[list[str]]:
    """The devices, grouped by equal entries in the report."""
    groups: dict[str, list[str]] = {}
    for device in report["backends"]:
        of_device = [report[part].get(device) for part in ("backends", "auto")]
        groups.setdefault(repr(of_device), []).append(device)
    return list(groups.values())


def _choice(report: dict[str, Any], devices: Sequence[str]) -> list[str]:
    """Lines on the backends that are chosen on a group of devices."""
    device, on = devices[0], f"on {', '.join(devices)} tensors"
    auto, named = report["auto"][device], report["environment"]["SPARSE_OPT_BACKEND"]
    lines = [f"auto {on}: {auto['backend']}, the first that runs of {', '.join(auto['order'])}"]
    if named in report["backends"][device]:
        cause = report["backends"][device][named]["cause"]
        lines.append(f"SPARSE_OPT_BACKEND={named} {on}: {cause or 'in force'}")
    return lines


def _aligned(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<13}{text}" for label, text in facts)


def _one_line(info: dict[str, Any]) -> str:
    words = [f"{k} {format_bytes(v) if k == 'memory_bytes' else v}" for k, v in info.items() if v not in ("", None)]
    return ", ".join(words)
