"""A job of `bench distributed` with layers that torch.compile traces and does not optimize; prints the number of calls.

python compiled_calls.py JOB RESULT
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparse_opt.bench.distributed.world import run
from sparse_opt.bench.harness import job_main

calls = 0
compile_module = nn.Module.compile


def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        global calls
        calls += 1
        return graph(*args)

    return call


if __name__ == "__main__":
    nn.Module.compile = lambda module, **options: compile_module(module, backend=counted)
    code = job_main(run)
    print(f"{calls} calls of compiled graphs")
    sys.exit(code)
