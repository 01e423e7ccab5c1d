"""Host time of a step, clipping, single ops and a gradient hook, on as many small tensors as a 3B model has.

The steps follow each other directly, so the CPU caches are warm; `sparse-opt bench kernels` times a step after other
work. On a GPU the time ends when the calls return. The time of a hook is the increase of the backward pass per
parameter.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, ops

from ..common.harness import Benchmark, Report
from ..common.report import render
from ..common.shapes import LLAMA_3_2_3B
from .optimizers import Gradients, step_again

GRADIENTS: tuple[Gradients, ...] = ("compact", "dense")
N_TENSORS, SIDE, DENSITY = len(LLAMA_3_2_3B), 8, 0.2
N_STEPS = 50  # consecutive calls, fewer than fit into a GPU's launch queue
HOOKS = ("no hooks", "empty Python hooks", "SparseAdamW's hooks")


def model_of(device: torch.device) -> nn.ParameterDict:
    torch.manual_seed(0)
    return nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(SIDE, SIDE, device=device)) for i in range(N_TENSORS)})


def step_us(grads: Gradients, device: torch.device, n_rounds: int) -> float:
    """Host time of one step in microseconds; the best of `n_rounds` means."""
    model = model_of(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=DENSITY), grads=grads)
    backward(model, torch.ones(SIDE, SIDE, device=device))

    return _call_us(lambda: step_again(optimizer), device, n_rounds)


def clip_us(device: torch.device, n_rounds: int) -> float:
    """Host time of `clip_grad_norm_` on gathered gradients in microseconds; the best of `n_rounds` means."""
    model = model_of(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=DENSITY))
    backward(model, torch.ones(SIDE, SIDE, device=device))
    return _call_us(lambda: optimizer.clip_grad_norm_(1.0), device, n_rounds)


def ops_us(device: torch.device, n_rounds: int) -> dict[str, float]:
    """Host time of single ops in microseconds, as functions and bound; the best of `n_rounds` means each."""
    model = model_of(device)
    mask = MaskSet.random(model, density=DENSITY)
    params = [parameter.detach() for parameter in model.values()]
    grads = [torch.randn_like(parameter) for parameter in params]
    indices = torch.cat([mask[name] for name in model]).to(device)
    ends = list(itertools.accumulate(mask[name].numel() for name in model))
    segments = indices, [0, *ends[:-1]], ends
    compact, exp_avg, exp_avg_sq = (torch.zeros(ends[-1], device=device) for _ in range(3))
    state = exp_avg, exp_avg_sq, torch.full((1,), 1e-3, device=device), torch.ones(len(params), device=device)
    bound = ops.bind(params, *segments)
    calls: dict[str, Callable[[], object]] = {
        "ops.indexed_adamw_": lambda: ops.indexed_adamw_(params, *segments, *state, grad=compact),
        "ops.bind(...).indexed_adamw_": lambda: bound.indexed_adamw_(*state, grad=compact),
        "ops.indexed_swap_": lambda: ops.indexed_swap_(params, compact, *segments),
        "ops.bind(...).indexed_swap_": lambda: bound.indexed_swap_(compact),
        "ops.masked_grad_gather_": lambda: ops.masked_grad_gather_(compact, grads, *segments),
        "ops.bind(...).masked_grad_gather_": lambda: bound.masked_grad_gather_(compact, grads),
    }
    return {name: _call_us(call, device, n_rounds) for name, call in calls.items()}


def _call_us(call: Callable[[], object], device: torch.device, n_rounds: int) -> float:
    def calls() -> float:
        began = time.perf_counter()
        for _ in range(N_STEPS):
            call()
        return 1e6 * (time.perf_counter() - began) / N_STEPS

    return min(_from_rest(calls, device) for _ in range(n_rounds))


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
    clear: Callable[[], None] = functools.partial(model.zero_grad, set_to_none=True)
    if hooks == "empty Python hooks":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: None)
    elif hooks == "SparseAdamW's hooks":
        clear = SparseAdamW(model, MaskSet.random(model, density=DENSITY)).zero_grad

    def run() -> float:
        clear()
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


def run(args: Namespace, report: Report) -> None:
    device = torch.device(args.device)
    rows = {
        f"SparseAdamW.step, {grads} gradients, {N_TENSORS} tensors": f"{step_us(grads, device, args.n_rounds):.1f}"
        for grads in GRADIENTS
    }
    rows["SparseAdamW.clip_grad_norm_"] = f"{clip_us(device, args.n_rounds):.1f}"
    rows |= {name: f"{us:.1f}" for name, us in ops_us(device, args.n_rounds).items()}
    passes = backward_us(device, args.n_rounds)
    rows |= {f"backward pass, {hooks}": f"{passes[hooks]:.0f}" for hooks in HOOKS}
    rows |= {f"one of {hooks}": f"{(passes[hooks] - passes[HOOKS[0]]) / N_TENSORS:.2f}" for hooks in HOOKS[1:]}
    report["rows"] = [{"what": what, "us": us} for what, us in rows.items()]


main = Benchmark(
    name="host_time",
    command="python -m sparse_opt.bench.kernels.host_time",
    doc=__doc__,
    options=lambda parser: parser.add_argument("--n_rounds", type=int, default=200, help="(%(default)s)"),
    measure=run,
    text=lambda report: render({"what": "{what}", "us": "{us}"}, report["rows"]),
    device="auto",
    threads=1,
).main

if __name__ == "__main__":
    sys.exit(main())
