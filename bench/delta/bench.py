"""Patches: bytes for each changed weight, and speed, of the three levels and of other ways to keep what changed.

The weights are bf16, normal(0, 0.02), before and after one step of Adam's size from fp32 master weights; the learning
rate is the one that changes the wanted share. Every result is decoded and compared bit for bit before it is timed, and
all coders of a case are timed in turns, with a copy among them. GB/s are of one dense bf16 tensor, 2 bytes an element,
whatever the work reads: encoding reads two. The share of the copy rate counts all that encoding reads and writes. A
GPU's times are between events, with what it waits for the host in the middle (`packed` and `tight` look at a sample
first), but not before the first kernel; "wall ms" is from an idle device to an idle device.

Case "dense" changes 60 % of the weights. Case "mask" changes a tenth of the positions of a random mask of 2.5 %; it is
coded as a delta log does it, over the mask's elements, and in the ordinary form beside that.

Other packages' coders run on the host (but nvCOMP), on fewer weights, their copies from and to the GPU included. What
is not installed is listed as that: pip install 'sparse-opt[peers]'.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparse_opt import backends

from ..common.environment import environment
from ..common.report import table, why_unwritable, write_json
from ..common.shapes import LLAMA_3_2_3B, scaled, total_numel
from ..common.timing import Prepared, Timing, measure
from .data import KINDS, Kind, Step, code_sizes, make_step, n_different
from .peers import Coder, LevelCoder, MaskedCoder, PairsCoder, TorchSaveCoder, peers
from .targets import FEW, LEVELS, MORE, judge

CPU_NUMEL, CPU_PEER_NUMEL, CPU_ROUNDS = 2**25, 2**24, 7
GPU_NUMEL, GPU_PEER_NUMEL, GPU_ROUNDS = 2**30, 2**26, 20
PEER_ROUNDS = 3
RATE_COUNTING = "2 bytes an element, of one dense bf16 tensor, in both directions"

_CASES = ", ".join(kind.name for kind in KINDS)
HEADERS = (
    "case",
    "coder",
    "bytes a change",
    "of raw",
    "encode ms",
    "p20 - p80",
    "wall ms",
    "GB/s",
    "of copy",
    "decode ms",
    "p20 - p80",
    "GB/s",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if every result was correct and every target met, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    output = args.output or Path(f"bench/results/delta_{'cpu' if cpu else 'gpu'}.json")
    names = [kind.name for kind in KINDS]
    chosen = names if args.cases is None else args.cases.split(",")
    if problem := _problem(args, chosen, names, device) or why_unwritable(output):
        parser.error(problem)

    bench = DeltaBench(
        device,
        args.threads,
        [kind for kind in KINDS if kind.name in chosen],
        numel=args.numel or (CPU_NUMEL if cpu else GPU_NUMEL),
        peer_numel=args.peer_numel or (CPU_PEER_NUMEL if cpu else GPU_PEER_NUMEL),
        model_numel=0 if cpu or args.no_model else args.model_numel or total_numel(LLAMA_3_2_3B),
        n_rounds=args.n_rounds or (CPU_ROUNDS if cpu else GPU_ROUNDS),
        with_peers=not args.no_peers,
        seed=args.seed,
    )
    report: dict[str, Any] = {"benchmark": "delta", "environment": environment(device), "completed": False}
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        bench.run()
        report["completed"] = True
    finally:  # keep the results obtained before an error
        torch.set_num_threads(threads)
        report |= bench.as_dict()
        report["targets"] = [verdict.as_dict() for verdict in judge(report)]
        write_json(output, report)
    print(text(report))
    print(f"results: {output}")
    for failure in bench.failures:
        print(f"WRONG RESULT, not timed: {failure}", file=sys.stderr)
    missed = [verdict for verdict in judge(report) if not verdict.met]
    for verdict in missed:
        print(f"MISSED: {verdict.text}", file=sys.stderr)
    return 1 if bench.failures or missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparse-opt bench delta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (%(default)s)")
    parser.add_argument("--numel", type=int, help=f"elements of the one tensor (2^30; on a CPU {CPU_NUMEL})")
    parser.add_argument("--peer_numel", type=int, help=f"for other packages (2^26; on a CPU {CPU_PEER_NUMEL})")
    parser.add_argument("--model_numel", type=int, help="elements of the 3B model's matrices (3.21 B)")
    parser.add_argument("--no_model", action="store_true", help="leave the model's matrices out (always so on a CPU)")
    parser.add_argument("--cases", help=f"of {_CASES} (all)".replace("%", "%%"))
    parser.add_argument("--n_rounds", type=int, help=f"timed calls ({GPU_ROUNDS}; on a CPU {CPU_ROUNDS})")
    parser.add_argument("--no_peers", action="store_true", help="leave out the coders of other packages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON (bench/results/delta_cpu.json, delta_gpu.json)"
    )
    return parser


def _problem(args: argparse.Namespace, chosen: Sequence[str], names: Sequence[str], device: torch.device) -> str:
    """The error in the arguments, checked before any work; empty if they are valid."""
    if device.type not in ("cpu", "cuda"):
        return f"device is {device}, wanted cpu or cuda"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"device {device}: torch {torch.__version__} finds no CUDA device here"
    for name in chosen:
        if name not in names:
            return f"case is {name!r}, wanted some of {', '.join(names)}"
    for option in ("numel", "peer_numel", "model_numel", "n_rounds", "threads"):
        value = getattr(args, option)
        if value is not None and value < 1:
            return f"--{option} is {value}, wanted 1 or more"
    # Without the extension patches are encoded with numpy, which must not be measured.
    cause = backends.why_unavailable(device.type, device)
    return f"patches cannot be coded natively on {device}: {cause}" if cause else ""


@dataclass(frozen=True)
class CoderRow:
    """The measurements of one coder on one case."""

    coder: str
    is_level: bool
    numel: int
    changed: int
    nbytes: int
    n_wrong: int  # elements whose decoded bits differ from the new ones; 0 for exact coders
    on_device: bool
    encode: Timing
    decode: Timing
    copy_ms: float  # of one tensor of these elements

    def as_dict(self) -> dict[str, Any]:
        raw = 2 * self.numel
        encode_ms, decode_ms = (t.ms if self.on_device else t.wall_ms for t in (self.encode, self.decode))
        return {
            "coder": self.coder,
            "is_level": self.is_level,
            "clock": "device" if self.on_device else "wall",
            "numel": self.numel,
            "changed": self.changed,
            "bytes": self.nbytes,
            "bytes_per_change": self.nbytes / self.changed,
            "share_of_raw": self.nbytes / raw,
            "n_wrong": self.n_wrong,
            "encode": self.encode.as_dict(),
            "decode": self.decode.as_dict(),
            "encode_gb_per_s": raw / encode_ms / 1e6,
            "decode_gb_per_s": raw / decode_ms / 1e6,
            # Encoding reads two tensors and writes the patch; a copy reads one tensor and writes one.
            "encode_share_of_copy": (2 * raw + self.nbytes) / encode_ms / (2 * raw / self.copy_ms),
        }


@dataclass
class DeltaBench:
    """Fills the table, case by case.

    Args:
        device: device of the weights.
        threads: CPU threads of torch and of other packages.
        kinds: kinds of steps.
        numel: elements of the tensor of each step.
        peer_numel: elements of the tensor encoded by other packages.
        model_numel: elements of the matrices of a 3B model; 0 skips them.
        n_rounds: timed calls.
        with_peers: also time the coders of other packages.
    """

    device: torch.device
    threads: int
    kinds: Sequence[Kind]
    numel: int
    peer_numel: int
    model_numel: int
    n_rounds: int
    with_peers: bool = True
    seed: int = 0
    cases: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # rows that were not timed -> reason
    peer_versions: dict[str, str] = field(default_factory=dict)
    lost_device: str = ""  # the peer whose error made the device unusable

    def run(self) -> None:
        """Time all cases. Failed checks are recorded in `failures`; other errors propagate, except those of peers."""
        one = {"weight": (self.numel,)}
        work: list[tuple[str, Kind, Mapping[str, Sequence[int]]]] = [("one tensor", kind, one) for kind in self.kinds]
        if self.model_numel:
            model = scaled(LLAMA_3_2_3B, self.model_numel)
            work += [(f"{len(model)} matrices", kind, model) for kind in self.kinds if kind.name in (FEW, MORE)]
        n_peers = len(self.kinds) if self.with_peers else 0
        with tqdm(total=len(work) + n_peers, desc="bench delta", unit="case", disable=None, leave=False) as bar:
            for layout, kind, shapes in work:
                bar.set_postfix_str(f"{kind.name}, {layout}")
                self.cases.append(self._case(layout, make_step(kind, shapes, self.device, self.seed)))
                bar.update()
            # Peers run last, so that an error on the device does not affect our rows.
            for kind, case in zip(self.kinds[:n_peers], self.cases, strict=False):
                bar.set_postfix_str(f"{kind.name}, peers")
                if not self.lost_device:
                    small = make_step(kind, {"weight": (self.peer_numel,)}, self.device, self.seed)
                    self._peers(small, case["rows"])
                bar.update()

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.type,
            "threads": self.threads,
            "rate_counting": RATE_COUNTING,
            "cases": self.cases,
            "left_out": self.left_out,
            "peer_versions": self.peer_versions,
            "failures": self.failures,
        }

    def _case(self, layout: str, step: Step) -> dict[str, Any]:
        coders: list[Coder] = [LevelCoder(level) for level in LEVELS]
        sized = step.old, step.new
        if step.mask is not None:
            masked = [MaskedCoder(level, step) for level in LEVELS]
            coders += masked
            sized = masked[0].compact(step.old), masked[0].compact(step.new)
        coders.append(PairsCoder())
        sizes, changed = code_sizes(*sized), step.changed
        found: dict[str, Any] = {
            "case": step.name,
            "layout": layout,
            "n_tensors": len(step.old),
            "numel": step.numel,
            "changed": changed,
            "share": changed / step.numel,
            "lr": step.lr,
            # Over the mask's elements if there is a mask.
            "entropy_bytes_per_change": sizes.entropy / changed,
            "computed_rice_bytes_per_change": sizes.rice / changed,
        }
        rows, copy_ms = self._rows(coders, step, self.n_rounds)
        found["copy_gb_per_s"] = 4 * step.numel / copy_ms / 1e6
        return {**found, "rows": rows}

    def _peers(self, step: Step, rows: list[dict[str, Any]]) -> None:
        """Add the rows of the installed peers."""
        rows += self._rows([TorchSaveCoder()], step, PEER_ROUNDS)[0]
        for peer in peers(self.device, self.threads):
            if why := peer.why_absent(self.device):
                self.left_out[peer.name] = why
                continue
            if self.lost_device:
                self.left_out.setdefault(peer.name, f"not run: the device was lost to {self.lost_device}")
                continue
            self.peer_versions[peer.name] = peer.version()
            try:
                rows += self._rows([peer.make()], step, PEER_ROUNDS)[0]
            except Exception as error:  # another package's error, of any type: reported, and the run continues
                first_line = str(error).strip().partition("\n")[0]
                self.left_out[peer.name] = f"FAILED: {type(error).__name__}: {first_line}"
                self.lost_device = peer.name if _is_lost(self.device) else ""

    def _rows(self, coders: Sequence[Coder], step: Step, n_rounds: int) -> tuple[list[dict[str, Any]], float]:
        """Check these coders and time them in turns with a copy: their rows, and the milliseconds of the copy."""
        buffers = [tensor.clone() for tensor in step.old]
        numel, changed = step.numel, step.changed
        largest = max(range(len(buffers)), key=lambda i: buffers[i].numel())
        checked: list[tuple[Coder, int, int]] = []
        variants: dict[str, Callable[[], object]] = {
            # Copy only the largest tensor: a launch for each of many tensors takes longer than the copy.
            "copy": functools.partial(buffers[largest].copy_, step.old[largest])
        }
        for coder in coders:
            start = coder.start(step.old)
            coded = coder.encode(start, step.new)
            decode = _Decode(coder, coded, step.old, buffers)
            decode.before()
            decoded = decode.call()
            n_wrong = n_different([tensor.to(self.device) for tensor in decoded], step.new)
            if n_wrong and coder.exact:
                self.failures.append(f"{coder.name}, {step.name}: {n_wrong} of {numel} elements are wrong")
                continue
            checked.append((coder, coder.nbytes(coded), n_wrong))
            variants[f"encode {coder.name}"] = functools.partial(coder.encode, start, step.new)
            variants[f"decode {coder.name}"] = Prepared(decode.before, decode.call)
        times = measure(variants, device=self.device, n_warmup=1, n_rounds=n_rounds)
        copy_ms = times["copy"].ms * numel / buffers[largest].numel()
        rows = [
            CoderRow(
                coder.name,
                coder.name.partition(",")[0] in LEVELS,
                numel,
                changed,
                nbytes,
                n_wrong,
                coder.on_device,
                times[f"encode {coder.name}"],
                times[f"decode {coder.name}"],
                copy_ms,
            ).as_dict()
            for coder, nbytes, n_wrong in checked
        ]
        return rows, copy_ms


def _is_lost(device: torch.device) -> bool:
    """Whether a kernel error has made the device unusable for the rest of the process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(to, source, strict=True):
        a.copy_(b)


@dataclass
class _Decode:
    """Decoding, which starts from the old weights in each call."""

    coder: Coder
    coded: Any
    old: list[Tensor]
    buffers: list[Tensor]
    start: Any = None

    def before(self) -> None:
        _copy(self.buffers, self.old)
        self.start = self.coder.start(self.buffers)

    def call(self) -> list[Tensor]:
        return self.coder.decode(self.start, self.coded)


def text(report: Mapping[str, Any]) -> str:
    """The table, the skipped rows, and the missed targets."""
    machine = report["environment"]["machine"]
    verdicts = judge(report)
    lines = [
        f"{machine.get('gpu', {}).get('name', machine['cpu'])}, {report['threads']} CPU thread(s), "
        f"torch {report['environment']['versions']['torch']}, commit {report['environment']['commit']}",
        f"GB/s: {report['rate_counting']}",
    ]
    for case in report["cases"]:
        lines.append(
            f"{case['case']}, {case['layout']}: {case['numel']} elements, {case['share']:.2%} changed (lr "
            f"{case['lr']:.2e}), entropy {case['entropy_bytes_per_change']:.3f} bytes a change, Rice codes by exponent "
            f"(computed) {case['computed_rice_bytes_per_change']:.3f}, copy {case['copy_gb_per_s']:.0f} GB/s"
        )
    lines.append(table(HEADERS, [cells(case, row) for case in report["cases"] for row in case["rows"]], n_words=2))
    lines += [f"not timed: {name}: {why}" for name, why in report["left_out"].items()]
    lines += [
        f"{row['coder']}, {case['case']}: {row['n_wrong']} decoded elements are not the new ones"
        for case in report["cases"]
        for row in case["rows"]
        if row["n_wrong"]
    ]
    n_met = sum(verdict.met for verdict in verdicts)
    lines.append(f"{len(verdicts)} targets: {n_met} met, {len(verdicts) - n_met} missed")
    return "\n".join(lines)


def cells(case: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """One line of the table, in the order of HEADERS. Times are wall times if the host takes part in the work."""
    encode, decode = row["encode"], row["decode"]
    device = row["clock"] == "device"
    return [
        f"{case['case']}, {case['layout']}",
        row["coder"],
        f"{row['bytes_per_change']:.3f}",
        f"{row['share_of_raw']:.2%}",
        f"{encode['ms' if device else 'wall_ms']:.3f}",
        f"{encode['p20_ms']:.3f} - {encode['p80_ms']:.3f}" if device else "",
        f"{encode['wall_ms']:.3f}",
        f"{row['encode_gb_per_s']:.2f}",
        f"{row['encode_share_of_copy']:.1%}",
        f"{decode['ms' if device else 'wall_ms']:.3f}",
        f"{decode['p20_ms']:.3f} - {decode['p80_ms']:.3f}" if device else "",
        f"{row['decode_gb_per_s']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
