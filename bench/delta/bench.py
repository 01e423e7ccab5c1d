"""Patches: bytes per changed weight, and speed, of both levels and of other encodings of changes.

The weights are bf16, normal(0, 0.02), before and after one step of Adam's size from fp32 master weights. The learning
rate is chosen to change the share of the case. Every result is decoded and compared bit by bit before it is timed, and
all coders of a case are timed in turns, with a copy among them. Rates count one dense bf16 tensor, 2 bytes per element,
whatever the work reads: encoding reads two. The share of the copy rate counts everything that encoding reads and
writes. Times on a GPU are between events and include waiting for the host during the work (both levels read
a sample first), but not before the first kernel.

Case "dense" changes 60 % of the weights. Case "mask" changes a tenth of the positions of a random mask of 2.5 %. It is
encoded like in a delta log, over the elements of the mask, and in the ordinary form.

Coders of other packages run on the host, on fewer weights, and their times include the copies from and
to the GPU. Packages that are not installed are listed as missing: pip install 'sparse-opt[peers]'.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparse_opt import backends
from sparse_opt.cli.parser import CommandParser

from ..harness import Benchmark, comma_separated, not_between
from ..rows import Case, Row, Run
from ..shapes import LLAMA_3_2_3B, scaled, total_numel
from ..timing import Prepared, Timing, measure
from .data import KINDS, Kind, Step, code_sizes, make_step, n_different
from .peers import LEVELS, Coder, LevelCoder, MaskedCoder, PairsCoder, PulseCoder, TorchSaveCoder, peers

CPU_NUMEL, CPU_PEER_NUMEL, CPU_ROUNDS = 2**25, 2**24, 7
GPU_NUMEL, GPU_PEER_NUMEL, GPU_ROUNDS = 2**30, 2**26, 20
PEER_ROUNDS = 3
LEAST_NUMEL = 2**12  # so that some elements change in every case: 1 in 400 at the least
ONE_TENSOR = "one tensor"
OF_MODEL = ("1.2%", "2.6%")  # the cases that are also timed on the matrices of a model
NAMES = [kind.name for kind in KINDS]


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument("--numel", type=int, help=f"elements of the one tensor (2^30; on a CPU {CPU_NUMEL})")
    what.add_argument("--peer_numel", type=int, help=f"for other packages (2^26; on a CPU {CPU_PEER_NUMEL})")
    what.add_argument("--model_numel", type=int, help="elements of the 3B model's matrices (3.21 B)")
    what.add_argument("--no_model", action="store_true", help="leave the model's matrices out (always so on a CPU)")
    what.add_argument(
        "--cases", type=comma_separated, default=NAMES, help=f"of {', '.join(NAMES)} (all)".replace("%", "%%")
    )
    what.add_argument("--n_rounds", type=int, help=f"timed calls ({GPU_ROUNDS}; on a CPU {CPU_ROUNDS})")
    what.add_argument("--no_peers", action="store_true", help="leave out the coders of other packages")
    what.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    for name in args.cases:
        if name not in NAMES:
            return f"case is {name!r}, expected some of {', '.join(NAMES)}"
    # Without the extension patches are encoded with numpy, which must not be measured.
    device = torch.device(args.device)
    cause = backends.why_unavailable(device.type, device)
    return not_between(args, "numel", "peer_numel", "model_numel", at_least=LEAST_NUMEL, below=2**40) or (
        f"patches cannot be coded natively on {device}: {cause}" if cause else ""
    )


def measure_all(args: Namespace, run: Run) -> None:
    """Time all cases."""
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    bench = DeltaBench(
        run,
        device,
        args.threads,
        numel=args.numel or (CPU_NUMEL if cpu else GPU_NUMEL),
        peer_numel=args.peer_numel or (CPU_PEER_NUMEL if cpu else GPU_PEER_NUMEL),
        model_numel=0 if cpu or args.no_model else args.model_numel or total_numel(LLAMA_3_2_3B),
        n_rounds=args.n_rounds or (CPU_ROUNDS if cpu else GPU_ROUNDS),
        seed=args.seed,
    )
    bench.time([kind for kind in KINDS if kind.name in args.cases], with_peers=not args.no_peers)


@dataclass
class DeltaBench:
    """Adds the rows of all coders, case by case.

    Args:
        device: device of the weights.
        threads: CPU threads of torch and of other packages.
        numel: elements of the tensor of each step.
        peer_numel: elements of the tensor encoded by other packages.
        model_numel: elements of the matrices of a 3B model; 0 skips them.
        n_rounds: timed calls.
    """

    run: Run
    device: torch.device
    threads: int
    numel: int
    peer_numel: int
    model_numel: int
    n_rounds: int
    seed: int

    def time(self, kinds: Sequence[Kind], *, with_peers: bool) -> None:
        """Time all cases. Failed checks are recorded; other errors propagate, except those of peers."""
        one = {"weight": (self.numel,)}
        work: list[tuple[str, Kind, Mapping[str, Sequence[int]]]] = [(ONE_TENSOR, kind, one) for kind in kinds]
        if self.model_numel:
            model = scaled(LLAMA_3_2_3B, self.model_numel)
            work += [(f"{len(model)} matrices", kind, model) for kind in kinds if kind.name in OF_MODEL]
        n_peers = len(kinds) if with_peers else 0
        with tqdm(total=len(work) + n_peers, desc="bench delta", unit="case", disable=None, leave=False) as bar:
            for layout, kind, shapes in work:
                bar.set_postfix_str(f"{kind.name}, {layout}")
                self._levels(layout, make_step(kind, shapes, self.device, self.seed))
                bar.update()
            # Peers run last, so that an error on the device does not affect our rows.
            for kind in kinds[:n_peers]:
                bar.set_postfix_str(f"{kind.name}, peers")
                self._peers(make_step(kind, {"weight": (self.peer_numel,)}, self.device, self.seed))
                bar.update()

    def _levels(self, layout: str, step: Step) -> None:
        """The rows of this package's coders, next to what codes of the step would take."""
        coders: list[Coder] = [LevelCoder(level) for level in LEVELS]
        sized = step.old, step.new
        if step.mask is not None:
            masked = [MaskedCoder(level, step) for level in LEVELS]
            coders += masked
            sized = masked[0].compact(step.old), masked[0].compact(step.new)
        coders.append(PairsCoder())
        sizes, changed = code_sizes(*sized), step.changed
        # Over the mask's elements if there is a mask.
        codes = {"entropy": sizes.entropy / changed, "Rice codes": sizes.rice / changed}
        self._rows(coders, layout, step, self.n_rounds, codes)

    def _peers(self, step: Step) -> None:
        """Add the rows of the installed peers."""
        self._rows([TorchSaveCoder()], ONE_TENSOR, step, PEER_ROUNDS, {})
        for peer in peers(self.threads):
            if why := peer.why_absent():
                self.run.note(f"not timed: {peer.name}: {why}")
                continue
            try:
                self._rows([peer.make()], ONE_TENSOR, step, PEER_ROUNDS, {})
                self.run.note(f"{peer.name}: {peer.version()}")
            except Exception as error:  # another package's error, of any type: reported, and the run continues
                first_line = str(error).strip().partition("\n")[0]
                self.run.note(f"not timed: {peer.name}: FAILED: {type(error).__name__}: {first_line}")

    def _rows(
        self, coders: Sequence[Coder], layout: str, step: Step, n_rounds: int, codes: Mapping[str, float]
    ) -> None:
        """Check these coders, time them in turns with a copy, and add their rows.

        Args:
            codes: computed bytes a change of codes that sizes are compared with.
        """
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
                self.run.wrong.append(f"{coder.name}, {step.name}: {n_wrong} of {step.numel} elements are wrong")
                continue
            if n_wrong:
                self.run.note(f"{coder.name}, {step.name}: {n_wrong} decoded elements are not the new ones")
            checked.append((coder, coder.nbytes(coded), n_wrong))
            variants[f"encode {coder.name}"] = functools.partial(coder.encode, start, step.new)
            variants[f"decode {coder.name}"] = Prepared(decode.before, decode.call)
        times = measure(variants, device=self.device, n_warmup=1, n_rounds=n_rounds)
        copy_ms = times["copy"].ms * step.numel / buffers[largest].numel()
        for coder, nbytes, _ in checked:
            timings = {way: times[f"{way} {coder.name}"] for way in ("encode", "decode")}
            for row in self._of_coder(coder, layout, step, nbytes, timings, copy_ms, codes):
                self.run.add(row)

    def _of_coder(
        self,
        coder: Coder,
        layout: str,
        step: Step,
        nbytes: int,
        timings: Mapping[str, Timing],
        copy_ms: float,
        codes: Mapping[str, float],
    ) -> Iterator[Row]:
        """The rows of one coder on one step; ``copy_ms`` is the time of a copy of as many elements."""
        raw, changed = 2 * step.numel, step.changed
        case = {"coder": coder.name, "change": step.name, "layout": layout, "numel": step.numel}
        shared: dict[str, Any] = {
            "suite": "delta",
            "case": case | {"threads": self.threads, "device": self.device.type},
        }
        compared: dict[str, float | Case] = dict(codes)
        if codes:
            compared["PULSEPT1"] = {"coder": PulseCoder.name, "layout": ONE_TENSOR, "numel": self.peer_numel}
        if isinstance(coder, MaskedCoder):
            compared["whole"] = {"coder": coder.level}
        yield Row(**shared, metric="size", unit="bytes/change", value=nbytes / changed, peers=compared)
        yield Row(**shared, metric="of raw", unit="share", value=nbytes / raw)
        yield Row(**shared, metric="changed", unit="share", value=changed / step.numel)
        for way, timing in timings.items():
            ms, spread = timing.wall_ms, dict[str, Any]()  # wall time if the host works too
            if coder.on_device:
                ms, spread = timing.ms, {"p20": timing.p20_ms, "p80": timing.p80_ms}
            yield Row(**shared, metric=way, unit="ms", value=ms, n=timing.n_rounds, **spread)
            yield Row(**shared, metric=f"{way} rate", unit="GB/s", value=raw / ms / 1e6)
            if way == "encode":
                # Encoding reads two tensors and writes the patch; a copy reads one tensor and writes one.
                share = (2 * raw + nbytes) / ms / (2 * raw / copy_ms)
                yield Row(**shared, metric="encode, of the copy rate", unit="share", value=share)


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


main = Benchmark(
    name="delta",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure_all,
    output="bench/results/delta_{device}.json",
    threads=1,
).main

if __name__ == "__main__":
    sys.exit(main())
