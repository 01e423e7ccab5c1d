"""Patches: bytes per changed weight, and speed, and those of other packages' encodings of changes.

The weights are bf16, normal(0, 0.02), before and after one step of Adam's size from fp32 master weights. The learning
rate is chosen to change the share of the case. Every result is decoded and compared bit by bit before it is timed, and
all coders of a case are timed in turns, with a copy among them. Rates count one dense bf16 tensor, 2 bytes per element,
whatever the work reads: encoding reads two. The share of the copy rate counts everything that encoding reads and
writes. Times on a GPU are between events and include waiting for the host during the work (encoding reads a sample
first), but not before the first kernel.

Case "dense" changes 60 % of the weights. Case "mask" changes a tenth of the positions of a random mask of 2.5 %. It is
encoded like in a delta log, over the elements of the mask, and in the ordinary form. On a GPU the first two cases are
timed on the matrices of a 3B model too.

Coders of other packages run on the host, on fewer weights, and their times include the copies from and
to the GPU. Packages that are not installed are listed as missing: pip install 'sparse-opt[peers]'.

With --activate, the rows are those of `DeltaSet.activate` instead: the time until a model has the weights of a delta,
from its base's and from another delta's. The deltas change random elements, or random tiles of 64 x 64; results are
compared with their digests.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt import DeltaSet, SparseDelta, backends
from sparse_opt.cli.doctor import installed_version
from sparse_opt.delta.state import TensorSpec, read_state
from sparse_opt.options import CommandParser
from sparse_opt.tensors import as_bits

from ..harness import Benchmark, Work, comma_separated, not_between, one_of_each, time_works
from ..rows import Case, Row, Run
from ..shapes import LLAMA_3_2_3B, scaled, total_numel
from ..timing import Prepared, measure
from .data import KINDS, Step, entropy_bytes, make_step, n_different
from .peers import PEERS, Coder, MaskedCoder, PatchCoder, PulseCoder

# Elements of the one tensor, elements for other packages, timed calls.
DEFAULTS = {"cpu": (2**25, 2**24, 7), "cuda": (2**30, 2**26, 20)}
PEER_ROUNDS = 3
LEAST_NUMEL = 2**12  # so that some elements change in every case: 1 in 400 at the least
ONE_TENSOR = "one tensor"
OF_MODEL = ("1.2%", "2.6%")  # the cases that are also timed on the matrices of a model
ACTIVATED = 0.025  # share of the elements that a delta of --activate changes
NAMES = [kind.name for kind in KINDS]


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument("--activate", action="store_true", help="time `DeltaSet.activate`, on a model of --numel")
    what.add_argument("--numel", type=int, help="of the one tensor (2^30; on a CPU 2^25), or of the model (3.21 B)")
    what.add_argument("--peer_numel", type=int, help="for other packages (2^26; on a CPU 2^24)")
    what.add_argument(
        "--cases", type=comma_separated, default=NAMES, help=f"of {', '.join(NAMES)} (all)".replace("%", "%%")
    )
    what.add_argument("--n_rounds", type=int, help="timed calls (20; on a CPU 7)")
    what.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the device."""
    device = torch.device(args.device)
    if args.activate:
        args.numel = args.numel or total_numel(LLAMA_3_2_3B)
        where = "cpu" if device.type == "cpu" else "gpu"
        args.output = args.output or Path(f"bench/results/delta_activate_{where}.json")
    for name, default in zip(("numel", "peer_numel", "n_rounds"), DEFAULTS[device.type], strict=True):
        setattr(args, name, getattr(args, name) or default)
    # Without the extension patches are encoded with numpy, which must not be measured.
    cause = backends.why_unavailable(device.type, device)
    return (
        one_of_each("cases", args.cases, NAMES)
        or not_between(args, "numel", "peer_numel", at_least=LEAST_NUMEL, below=2**40)
        or (f"patches cannot be coded natively on {device}: {cause}" if cause else "")
    )


def measure_all(args: Namespace, run: Run) -> None:
    """Add the rows of all coders, case by case. Errors propagate, except those of other packages."""
    device = torch.device(args.device)
    if args.activate:
        _activate(run, args, device)
        return
    kinds = [kind for kind in KINDS if kind.name in args.cases]
    work: list[tuple[str, Any, Any]] = [(ONE_TENSOR, kind, {"weight": (args.numel,)}) for kind in kinds]
    if device.type == "cuda":
        layout = f"{len(LLAMA_3_2_3B)} matrices"
        work += [(layout, kind, LLAMA_3_2_3B) for kind in kinds if kind.name in OF_MODEL]
    for layout, kind, shapes in work:
        print(f"{kind.name}, {layout}", flush=True)
        _patches(run, args, layout, make_step(kind, shapes, device, args.seed))
    # Peers run last, so that an error on the device does not affect our rows.
    for kind in kinds:
        print(f"{kind.name}, peers", flush=True)
        _peers(run, args, make_step(kind, {"weight": (args.peer_numel,)}, device, args.seed))


def _patches(run: Run, args: Namespace, layout: str, step: Step) -> None:
    """The rows of this package's coders, next to the entropy of the step, over the elements of its mask if any."""
    coders: list[Coder] = [PatchCoder()]
    old, new = step.old, step.new
    if step.mask is not None:
        masked = MaskedCoder(step)
        coders.append(masked)
        old, new = masked.compact(old), masked.compact(new)
    compared: dict[str, float | Case] = {"entropy": entropy_bytes(old, new) / step.changed}
    compared["PULSEPT1"] = {"coder": PulseCoder.name, "layout": ONE_TENSOR, "numel": args.peer_numel}
    _add_rows(run, args, coders, layout, step, args.n_rounds, compared)


def _peers(run: Run, args: Namespace, step: Step) -> None:
    """The rows of the installed peers."""
    for peer in PEERS:
        if why := peer.why_absent():
            run.note(f"not timed: {peer.name}: {why}")
            continue
        try:
            _add_rows(run, args, [peer(args.threads)], ONE_TENSOR, step, PEER_ROUNDS, {})
        except Exception as error:  # another package's error, of any type: reported, and the run continues
            first_line = str(error).strip().partition("\n")[0]
            run.note(f"not timed: {peer.name}: FAILED: {type(error).__name__}: {first_line}")
        else:
            run.note(f"{peer.name}: {peer.package} {installed_version(peer.package)}")


def _add_rows(
    run: Run,
    args: Namespace,
    coders: Sequence[Coder],
    layout: str,
    step: Step,
    n_rounds: int,
    compared: dict[str, float | Case],
) -> None:
    """Check these coders, time them in turns with a copy, and add their rows.

    Args:
        compared: peers of the sizes.
    """
    buffers = [tensor.clone() for tensor in step.old]
    largest = max(range(len(buffers)), key=lambda i: buffers[i].numel())
    right: list[tuple[Coder, int]] = []
    variants: dict[str, Callable[[], object]] = {
        # Copy only the largest tensor: a launch for each of many tensors takes longer than the copy.
        "copy": functools.partial(buffers[largest].copy_, step.old[largest])
    }
    for coder in coders:
        start = coder.start(step.old)
        coded = coder.encode(start, step.new)
        decode = _decoding(coder, coded, step.old, buffers)
        decode.before()
        decoded: Any = decode()
        if n_wrong := n_different([tensor.to(buffers[0].device) for tensor in decoded], step.new):
            run.wrong.append(f"{coder.name}, {step.name}: {n_wrong} of {step.numel} elements are wrong")
            continue
        right.append((coder, coder.nbytes(coded)))
        variants[f"encode {coder.name}"] = functools.partial(coder.encode, start, step.new)
        variants[f"decode {coder.name}"] = decode
    times = measure(variants, device=buffers[0].device, n_warmup=1, n_rounds=n_rounds)
    copy_ms = times["copy"].ms * step.numel / buffers[largest].numel()
    raw, changed = 2 * step.numel, step.changed
    for coder, nbytes in right:
        case: Case = {"coder": coder.name, "change": step.name, "layout": layout, "numel": step.numel}
        case |= {"threads": args.threads, "device": buffers[0].device.type}
        whole: dict[str, float | Case] = {"whole": {"coder": PatchCoder.name}} if isinstance(coder, MaskedCoder) else {}

        def add(metric: str, unit: str, value: float, case: Case = case, **others: Any) -> None:
            run.add(Row(suite="delta", case=case, metric=metric, unit=unit, value=value, **others))

        add("size", "bytes/change", nbytes / changed, peers=compared | whole)
        add("of raw", "share", nbytes / raw)
        add("changed", "share", changed / step.numel)
        for way in ("encode", "decode"):
            timing = times[f"{way} {coder.name}"]
            # The time between events and its spread; the wall time if the host works too.
            ms = timing.ms if coder.on_device else timing.wall_ms
            spread: dict[str, Any] = {"p20": timing.p20_ms, "p80": timing.p80_ms} if coder.on_device else {}
            add(way, "ms", ms, n=timing.n_rounds, **spread)
            add(f"{way} rate", "GB/s", raw / ms / 1e6)
            if way == "encode":
                # Encoding reads two tensors and writes the patch; a copy reads one tensor and writes one.
                add("encode, of the copy rate", "share", (2 * raw + nbytes) / ms / (2 * raw / copy_ms))


def _decoding(coder: Coder, coded: Any, old: list[Tensor], buffers: list[Tensor]) -> Prepared:
    """Decoding, which starts from the old weights in each call."""
    start: Any = None

    def before() -> None:
        nonlocal start
        for buffer, tensor in zip(buffers, old, strict=True):
            buffer.copy_(tensor)
        start = coder.start(buffers)

    return Prepared(before, lambda: coder.decode(start, coded))


def _activate(run: Run, args: Namespace, device: torch.device) -> None:
    """The rows of `DeltaSet.activate`, of elements and of tiles."""
    torch.manual_seed(args.seed)
    shapes = scaled(LLAMA_3_2_3B, args.numel).values()
    model = nn.ParameterList(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for shape in shapes)
    layout, weights = read_state(model)

    def change(spec: TensorSpec, tile: int) -> tuple[Tensor, Tensor]:
        rows, columns = spec.shape
        chosen = torch.rand(-(-rows // tile), -(-columns // tile), device=device) < ACTIVATED
        chosen = chosen.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :columns]
        new = weights[spec.name].clone()
        as_bits(new).bitwise_xor_(chosen.reshape(-1).to(torch.int16))
        return weights[spec.name], new

    for pattern, tile in (("element", 1), ("tile64", 64)):
        read = functools.partial(change, tile=tile)
        deltas = {name: SparseDelta.of_tensors(layout, read) for name in "ab"}
        activate = DeltaSet(model, deltas).activate
        for name in ("a", "b", "a", None):
            activate(name)
            delta = deltas[name or "a"]
            delta.require_bits({key: weights[key] for key in delta.changes}, "activate", applied=name is not None)
        case = {"pattern": pattern, "density": ACTIVATED, "numel": layout.numel, "device": device.type}
        to_a = functools.partial(activate, "a")
        works = [
            Work({**case, "from": start}, Prepared(functools.partial(activate, before), to_a))
            for start, before in (("the base", None), ("another delta", "b"))
        ]
        time_works(run, "delta_activate", works, device, args.n_rounds)
        activate(None)


main = Benchmark(
    name="delta",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure_all,
    output="bench/results/delta_{device}.json",
    threads=1,
).main
