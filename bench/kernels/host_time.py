"""What sparse-opt costs the host: a step's launches and a gradient hook, on as many small tensors as a 3B model has.

`python -m sparse_opt.bench.kernels.host_time`. Steps follow each other at once, so that the caches hold what they need;
the tables of `sparse-opt bench kernels` show a step that comes after other work. On a GPU the time is until the calls
have returned. A hook's time is what a backward pass takes longer for each parameter.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from sparse_opt import MaskSet, SparseAdamW

from ..common.report import table
from ..common.shapes import LLAMA_3_2_3B
from .optimizers import Gradients, step_again

HEADERS = ("what", "us")
N_TENSORS, SIDE, DENSITY = len(LLAMA_3_2_3B), 8, 0.2
N_STEPS = 50  # consecutive steps, fewer than fit into a GPU's launch queue
HOOKS = ("no hooks", "empty Python hooks", "SparseAdamW's hooks")


def model_of(device: torch.device) -> nn.ParameterDict:
    torch.manual_seed(0)
    return nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(SIDE, SIDE, device=device)) for i in range(N_TENSORS)})


def step_us(grads: Gradients, device: torch.device, n_rounds: int) -> float:
    """Host time of one step in microseconds; the best of `n_rounds` means."""
    model = model_of(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=DENSITY), grads=grads)
    backward(model, torch.ones(SIDE, SIDE, device=device))

    def steps() -> float:
        began = time.perf_counter()
        for _ in range(N_STEPS):
            step_again(optimizer)
        return 1e6 * (time.perf_counter() - began) / N_STEPS

    return min(_from_rest(steps, device) for _ in range(n_rounds))


def backward_us(device: torch.device, n_rounds: int) -> dict[str, float]:
    """Median microseconds of a backward pass by kind of hooks, over `n_rounds` rounds in which the kinds alternate."""
    passes = {hooks: _backward_pass(hooks, device) for hooks in HOOKS}
    times: dict[str, list[float]] = {hooks: [] for hooks in HOOKS}
    for _ in range(n_rounds):
        for hooks, run in passes.items():
            times[hooks].append(_from_rest(run, device))
    return {hooks: statistics.median(found) for hooks, found in times.items()}


def _backward_pass(hooks: str, device: torch.device) -> Callable[[], float]:
    model, x = model_of(device), torch.ones(SIDE, SIDE, device=device)
    forget: Callable[[], None] = functools.partial(model.zero_grad, set_to_none=True)
    if hooks == "empty Python hooks":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: None)
    elif hooks == "SparseAdamW's hooks":
        forget = SparseAdamW(model, MaskSet.random(model, density=DENSITY)).zero_grad

    def run() -> float:
        forget()
        return backward(model, x)

    return run


def backward(model: nn.ParameterDict, x: torch.Tensor) -> float:
    """Microseconds until `loss.backward()` returns."""
    loss = torch.stack([(param * x).sum() for param in model.values()]).sum()
    began = time.perf_counter()
    loss.backward()
    return 1e6 * (time.perf_counter() - began)


def _from_rest(call: Callable[[], float], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return call()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_opt.bench.kernels.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="(%(default)s)")
    parser.add_argument("--n_rounds", type=int, default=200, help="(%(default)s)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"device {device}: torch {torch.__version__} finds no CUDA device here")
    if args.n_rounds < 1:
        parser.error(f"--n_rounds is {args.n_rounds}, wanted 1 or more")
    torch.set_num_threads(1)
    rows = [
        [f"SparseAdamW.step, {grads} gradients, {N_TENSORS} tensors", f"{step_us(grads, device, args.n_rounds):.1f}"]
        for grads in ("compact", "dense")
    ]
    passes = backward_us(device, args.n_rounds)
    rows += [[f"backward pass, {hooks}", f"{passes[hooks]:.0f}"] for hooks in HOOKS]
    for hooks in HOOKS[1:]:
        rows.append([f"one of {hooks}", f"{(passes[hooks] - passes[HOOKS[0]]) / N_TENSORS:.2f}"])
    print(table(HEADERS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
