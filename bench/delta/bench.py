"""Patches: bytes per changed weight, and speed, of both levels and of other encodings of changes.

The weights are bf16, normal(0, 0.02), before and after one step of Adam's size from fp32 master weights. The learning
rate is chosen to change the share of the case. Every result is decoded and compared bit by bit before it is timed, and
all coders of a case are timed in turns, with a copy among them. GB/s count one dense bf16 tensor, 2 bytes per element,
whatever the work reads: encoding reads two. The share of the copy rate counts everything that encoding reads and
writes. Times on a GPU are between events and include waiting for the host during the work (both levels read
a sample first), but not before the first kernel; "wall ms" is from an idle device to an idle device.

Case "dense" changes 60 % of the weights. Case "mask" changes a tenth of the positions of a random mask of 2.5 %. It is
encoded like in a delta log, over the elements of the mask, and in the ordinary form.

Coders of other packages run on the host (except nvCOMP), on fewer weights, and their times include the copies from and
to the GPU. Packages that are not installed are listed as missing: pip install 'sparse-opt[peers]'.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparse_opt import backends
from sparse_opt.cli.parser import CommandParser

from ..common.harness import Benchmark, Report, comma_separated, out_of_range
from ..common.peers import why_failed
from ..common.report import Columns, machine_line, render
from ..common.shapes import LLAMA_3_2_3B, scaled, total_numel
from ..common.timing import Prepared, Timing, measure
from .data import KINDS, Kind, Step, code_sizes, make_step, n_different
from .peers import Coder, LevelCoder, MaskedCoder, PairsCoder, TorchSaveCoder, peers
from .targets import FEW, LEVELS, MORE, judge

CPU_NUMEL, CPU_PEER_NUMEL, CPU_ROUNDS = 2**25, 2**24, 7
GPU_NUMEL, GPU_PEER_NUMEL, GPU_ROUNDS = 2**30, 2**26, 20
PEER_ROUNDS = 3
LEAST_NUMEL = 2**12  # so that some elements change in every case: 1 in 400 at the least
RATE_COUNTING = "2 bytes an element, of one dense bf16 tensor, in both directions"
NAMES = [kind.name for kind in KINDS]


def options(parser: CommandParser) -> None:
    parser.add_argument("--numel", type=int, help=f"elements of the one tensor (2^30; on a CPU {CPU_NUMEL})")
    parser.add_argument("--peer_numel", type=int, help=f"for other packages (2^26; on a CPU {CPU_PEER_NUMEL})")
    parser.add_argument("--model_numel", type=int, help="elements of the 3B model's matrices (3.21 B)")
    parser.add_argument("--no_model", action="store_true", help="leave the model's matrices out (always so on a CPU)")
    parser.add_argument(
        "--cases", type=comma_separated, default=NAMES, help=f"of {', '.join(NAMES)} (all)".replace("%", "%%")
    )
    parser.add_argument("--n_rounds", type=int, help=f"timed calls ({GPU_ROUNDS}; on a CPU {CPU_ROUNDS})")
    parser.add_argument("--no_peers", action="store_true", help="leave out the coders of other packages")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    for name in args.cases:
        if name not in NAMES:
            return f"case is {name!r}, expected some of {', '.join(NAMES)}"
    # Without the extension patches are encoded with numpy, which must not be measured.
    device = torch.device(args.device)
    cause = backends.why_unavailable(device.type, device)
    return out_of_range(args, "numel", "peer_numel", "model_numel", at_least=LEAST_NUMEL, below=2**40) or (
        f"patches cannot be coded natively on {device}: {cause}" if cause else ""
    )


def run(args: Namespace, report: Report) -> None:
    """Time all cases; what was measured before an error is in the report."""
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    bench = DeltaBench(
        device,
        args.threads,
        numel=args.numel or (CPU_NUMEL if cpu else GPU_NUMEL),
        peer_numel=args.peer_numel or (CPU_PEER_NUMEL if cpu else GPU_PEER_NUMEL),
        model_numel=0 if cpu or args.no_model else args.model_numel or total_numel(LLAMA_3_2_3B),
        n_rounds=args.n_rounds or (CPU_ROUNDS if cpu else GPU_ROUNDS),
        seed=args.seed,
    )
    report |= {"device": device.type, "threads": args.threads, "rate_counting": RATE_COUNTING} | bench.results
    try:
        bench.run([kind for kind in KINDS if kind.name in args.cases], with_peers=not args.no_peers)
    finally:
        report["targets"] = [verdict.as_dict() for verdict in judge(report)]


@dataclass
class DeltaBench:
    """Fills the table, case by case.

    Args:
        device: device of the weights.
        threads: CPU threads of torch and of other packages.
        numel: elements of the tensor of each step.
        peer_numel: elements of the tensor encoded by other packages.
        model_numel: elements of the matrices of a 3B model; 0 skips them.
        n_rounds: timed calls.
    """

    device: torch.device
    threads: int
    numel: int
    peer_numel: int
    model_numel: int
    n_rounds: int
    seed: int
    cases: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # rows that were not timed -> reason
    peer_versions: dict[str, str] = field(default_factory=dict)
    lost_device: str = ""  # the peer whose error made the device unusable

    @property
    def results(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cases", "left_out", "peer_versions", "failures")}

    def run(self, kinds: Sequence[Kind], *, with_peers: bool) -> None:
        """Time all cases. Failed checks are recorded in `failures`; other errors propagate, except those of peers."""
        one = {"weight": (self.numel,)}
        work: list[tuple[str, Kind, Mapping[str, Sequence[int]]]] = [("one tensor", kind, one) for kind in kinds]
        if self.model_numel:
            model = scaled(LLAMA_3_2_3B, self.model_numel)
            work += [(f"{len(model)} matrices", kind, model) for kind in kinds if kind.name in (FEW, MORE)]
        n_peers = len(kinds) if with_peers else 0
        with tqdm(total=len(work) + n_peers, desc="bench delta", unit="case", disable=None, leave=False) as bar:
            for layout, kind, shapes in work:
                bar.set_postfix_str(f"{kind.name}, {layout}")
                self.cases.append(self._case(layout, make_step(kind, shapes, self.device, self.seed)))
                bar.update()
            # Peers run last, so that an error on the device does not affect our rows.
            for kind, case in zip(kinds[:n_peers], self.cases, strict=False):
                bar.set_postfix_str(f"{kind.name}, peers")
                if not self.lost_device:
                    small = make_step(kind, {"weight": (self.peer_numel,)}, self.device, self.seed)
                    self._peers(small, case["rows"])
                bar.update()

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
                self.left_out[peer.name] = why_failed(error)
                self.lost_device = peer.name if _is_lost(self.device) else ""

    def _rows(self, coders: Sequence[Coder], step: Step, n_rounds: int) -> tuple[list[dict[str, Any]], float]:
        """Check these coders and time them in turns with a copy: their rows, and the milliseconds of the copy."""
        buffers = [tensor.clone() for tensor in step.old]
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
                self.failures.append(f"{coder.name}, {step.name}: {n_wrong} of {step.numel} elements are wrong")
                continue
            checked.append((coder, coder.nbytes(coded), n_wrong))
            variants[f"encode {coder.name}"] = functools.partial(coder.encode, start, step.new)
            variants[f"decode {coder.name}"] = Prepared(decode.before, decode.call)
        times = measure(variants, device=self.device, n_warmup=1, n_rounds=n_rounds)
        copy_ms = times["copy"].ms * step.numel / buffers[largest].numel()
        rows = [
            _row(coder, step, nbytes, n_wrong, times[f"encode {coder.name}"], times[f"decode {coder.name}"], copy_ms)
            for coder, nbytes, n_wrong in checked
        ]
        return rows, copy_ms


def _row(
    coder: Coder, step: Step, nbytes: int, n_wrong: int, encode: Timing, decode: Timing, copy_ms: float
) -> dict[str, Any]:
    """The measurements of one coder on one case; ``copy_ms`` is the time of a copy of as many elements."""
    raw, changed = 2 * step.numel, step.changed
    encode_ms, decode_ms = (t.ms if coder.on_device else t.wall_ms for t in (encode, decode))
    return {
        "coder": coder.name,
        "is_level": coder.name.partition(",")[0] in LEVELS,
        "clock": "device" if coder.on_device else "wall",
        "numel": step.numel,
        "changed": changed,
        "bytes": nbytes,
        "bytes_per_change": nbytes / changed,
        "share_of_raw": nbytes / raw,
        "n_wrong": n_wrong,  # elements whose decoded bits differ from the new ones; 0 for exact coders
        "encode": encode.as_dict(),
        "decode": decode.as_dict(),
        "encode_gb_per_s": raw / encode_ms / 1e6,
        "decode_gb_per_s": raw / decode_ms / 1e6,
        # Encoding reads two tensors and writes the patch; a copy reads one tensor and writes one.
        "encode_share_of_copy": (2 * raw + nbytes) / encode_ms / (2 * raw / copy_ms),
    }


def _is_lost(device: torch.device) -> bool:
    """Whether a kernel error has made the device unusable for the rest of the process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


@dataclass
class _Decode:
    """Decoding, which starts from the old weights in each call."""

    coder: Coder
    coded: Any
    old: list[Tensor]
    buffers: list[Tensor]
    start: Any = None

    def before(self) -> None:
        for buffer, old in zip(self.buffers, self.old, strict=True):
            buffer.copy_(old)
        self.start = self.coder.start(self.buffers)

    def call(self) -> list[Tensor]:
        return self.coder.decode(self.start, self.coded)


def of_clock(key: str) -> Callable[[Mapping[str, Any]], str]:
    """The cell of the milliseconds of encoding or decoding: wall time if the host works too."""
    return lambda row: f"{row[key]['ms' if row['clock'] == 'device' else 'wall_ms']:.3f}"


def _percentiles(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[key]['p20_ms']:.3f} - {row[key]['p80_ms']:.3f}" if row["clock"] == "device" else ""


COLUMNS: Columns = {
    "case": "{case}, {layout}",
    "coder": "{coder}",
    "bytes a change": "{bytes_per_change:.3f}",
    "of raw": "{share_of_raw:.2%}",
    "encode ms": of_clock("encode"),
    "encode p20 - p80": _percentiles("encode"),
    "wall ms": "{encode[wall_ms]:.3f}",
    "encode GB/s": "{encode_gb_per_s:.2f}",
    "of copy": "{encode_share_of_copy:.1%}",
    "decode ms": of_clock("decode"),
    "decode p20 - p80": _percentiles("decode"),
    "decode GB/s": "{decode_gb_per_s:.2f}",
}


def text(report: Mapping[str, Any]) -> str:
    """The table, the skipped rows, and the missed targets."""
    verdicts = judge(report)
    lines = [f"{machine_line(report)}; {report['threads']} CPU thread(s)", f"GB/s: {report['rate_counting']}"]
    for case in report["cases"]:
        lines.append(
            f"{case['case']}, {case['layout']}: {case['numel']} elements, {case['share']:.2%} changed (lr "
            f"{case['lr']:.2e}), entropy {case['entropy_bytes_per_change']:.3f} bytes a change, Rice codes by exponent "
            f"(computed) {case['computed_rice_bytes_per_change']:.3f}, copy {case['copy_gb_per_s']:.0f} GB/s"
        )
    rows = [{**case, **row} for case in report["cases"] for row in case["rows"]]
    lines.append(render(COLUMNS, rows, n_words=2))
    lines += [f"not timed: {name}: {why}" for name, why in report["left_out"].items()]
    lines += [
        f"{row['coder']}, {row['case']}: {row['n_wrong']} decoded elements are not the new ones"
        for row in rows
        if row["n_wrong"]
    ]
    n_met = sum(verdict.met for verdict in verdicts)
    return "\n".join([*lines, f"{len(verdicts)} targets: {n_met} met, {len(verdicts) - n_met} missed"])


def failures(report: Report, args: Namespace) -> list[str]:
    missed = [f"MISSED: {verdict.text}" for verdict in judge(report) if not verdict.met]
    return [f"WRONG RESULT, not timed: {failure}" for failure in report["failures"]] + missed


main = Benchmark(
    name="delta",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=run,
    text=text,
    failures=failures,
    output="bench/results/delta_{device}.json",
    device="auto",
    threads=1,
).main

if __name__ == "__main__":
    sys.exit(main())
