"""The part of one number of GPUs and network, which every rank runs: build the variants, check them, count their
collectives, and time them.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_opt import SparseAdamW

from ..harness import job_main
from ..models import n_parameters, pair
from ..ranks import Ranks
from ..timing import measure
from .reference import Reference, first_step, wrong_line
from .variants import VARIANTS, WARM_UP, Training, Variant, make_training

# A variant is built next to others only if this many times its bf16 weights are free, and no less than the largest peak
# of those. A step of the 3B shape on a pair of 512 tokens took 4.8 times its weights without a mask and 1.9 with one.
FREE_WEIGHTS = {"dense": 6, "sparse": 3}
MIN_ROUNDS = 3
GROUP_S = 10.0  # in which variants that run in turns are timed


REDUCTIONS = ("allreduce", "reduce_scatter")


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the block, those of C++ code (DDP's reducer) and of autograd's threads included.

    `bytes` are by name of the operation: allreduce, reduce_scatter, allgather, broadcast and so on. The
    bytes of a call are those of its largest argument: of an all-reduce the reduced tensors, of a reduce-scatter the
    whole input, of an all-gather the whole output.

    Every collective of torch.distributed is an op of the namespace c10d, so that a dispatch mode sees it, as that of
    torch's CommDebugMode does; that one counts calls, not bytes, and only some of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_").removesuffix("_base")
            sizes = [sum(t.nbytes for t in tree_leaves(argument) if isinstance(t, Tensor)) for argument in args]
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))

    @property
    def reduced(self) -> int:
        """Bytes of all reductions."""
        return sum(self.bytes[name] for name in REDUCTIONS)

    @property
    def other(self) -> int:
        """Bytes of all other collectives, such as FSDP's all-gathers of weights."""
        return sum(self.bytes.values()) - self.reduced


class World(Ranks):
    """The processes of one number of GPUs and network, each on its own share of the host's cores.

    Args:
        job: the options of the benchmark, with `variants`, the names of those to measure, and the `deadline` by
            `time.time()` or None.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        cores, n = sorted(os.sched_getaffinity(0)), int(os.environ["WORLD_SIZE"])
        if share := len(cores) // n:
            first = share * int(os.environ["RANK"])
            os.sched_setaffinity(0, cores[first : first + share])
        super().__init__(job)
        self.weights_nbytes = 2 * n_parameters(self.config)
        self.references: dict[str, Reference] = {}
        self.results: list[dict[str, Any]] = []
        self.longest_s = 0.0  # that building and checking a variant has taken

    def measure(self) -> list[dict[str, Any]]:
        """The measurements of the variants that the deadline leaves time for, FSDP2's after the others."""
        variants = [VARIANTS[name] for name in self.args.variants]
        for sharded in (False, True):
            self._measure_in_turns([variant for variant in variants if (variant.layout == "fsdp2") == sharded])
        return self.results

    def _measure_in_turns(self, missing: list[Variant]) -> None:
        """Measure variants that are compared with each other, as many in turns as memory holds."""
        while missing:
            group: list[tuple[Training, dict[str, Any]]] = []
            while missing and self._has_time(group) and (not group or self._fits(missing[0], group)):
                began = time.monotonic()
                group.append(self._prepare(missing.pop(0)))
                self.longest_s = max(self.longest_s, time.monotonic() - began)
            if not group:
                return
            self._time(group)
            while group:
                group.pop()[0].close()
            self.release_memory()

    def _prepare(self, variant: Variant) -> tuple[Training, dict[str, Any]]:
        """Build a variant, check its first step and count the collectives of another; return it and its row."""
        pattern = variant.pattern or "element"
        mask, reference = self.mask(pattern), self._reference(pattern)
        self.reset_peak()
        held_by_others = self.allocated()
        training = self._make(variant)
        build_peak = self.peak()
        check, own = None, [self._pair(self.rank)]
        if reference is None:
            training.step(own)
        else:
            first_step(training, own)
            if variant.layout != "local" or self.size == 1:
                check = reference.check(training, mask)
        training.set_lr(self.args.learning_rate)
        training.step(own)
        # Collectives are those of the third step, because DDP arranges its buckets in the second. They are counted
        # eagerly: torch.compile gives up, for all later models too, on a function that is called under a dispatch mode.
        with torch.compiler.set_stance("force_eager"), CollectiveCounter() as counter:
            training.step(own)
        if variant.cuda_graphs:
            for _ in range(WARM_UP - 1):  # further steps, the capture and a replay
                training.step(own)
        self.reset_peak()  # the steps before are slower and may need more memory: they compile and load kernels
        step_s = self.clock(lambda: training.step(own))[0] / 1e3
        peak = self.peak()
        row = {
            "variant": variant.name,
            "n_reduced": mask.nnz if variant.pattern else None,
            "check": check,
            "reduced_bytes": counter.reduced,
            "other_bytes": counter.other,
            "peak_memory_bytes": None if peak is None else peak - held_by_others,
            "build_peak_bytes": None if build_peak is None else build_peak - held_by_others,
            "step_s": step_s,  # of one step, for the number of rounds
        }
        if check is not None and not check["met"]:
            self.print(f"{self._where(variant)}: {wrong_line(check)}")
        return training, row

    def _time(self, group: list[tuple[Training, dict[str, Any]]]) -> None:
        """Time the steps of variants with right results in turns."""
        right = [(training, row) for training, row in group if row["check"] is None or row["check"]["met"]]
        own = [self._pair(self.rank)]
        in_a_row, n_rounds = self._counts(group)

        def call(training: Training) -> Callable[[], None]:
            return lambda: training.step(own)

        variants = {row["variant"]: call(training) for training, row in right}
        gc.collect()
        gc.freeze()  # a collection during a step scans the objects of that step, not the models of all variants
        timings = measure(
            variants, device=self.device, n_warmup=1, n_rounds=n_rounds, clock=partial(self._clock_of_steps, in_a_row)
        )
        gc.unfreeze()
        for training, row in group:
            row["ms"] = None
            if row["variant"] in timings:
                row |= vars(timings[row["variant"]])
                self.print(f"{self._where(training.variant)}: {row['p20_ms']:.1f} - {row['p80_ms']:.1f} ms")
            if training.variant.layout == "replicate":
                assert isinstance(training.optimizer, SparseAdamW)
                training.optimizer.check_ranks()  # after all steps
        self.results += [row for _, row in group]

    def _where(self, variant: Variant) -> str:
        return f"{self.size} x {self.args.network}, {variant.name}"

    def _counts(self, group: list[tuple[Training, dict[str, Any]]]) -> tuple[int, int]:
        """(steps in a row, rounds): as many as the options say, fewer if the group would last longer than GROUP_S."""
        step_s = sum(row["step_s"] for _, row in group)
        in_a_row = max(1, min(self.args.steps_in_a_row, int(GROUP_S / (MIN_ROUNDS * step_s))))
        return in_a_row, max(MIN_ROUNDS, min(self.args.n_rounds, int(GROUP_S / (in_a_row * step_s))))

    def _clock_of_steps(self, n: int, call: Callable[[], object]) -> tuple[float, float, float]:
        """The same for one of n calls in a row: their time divided by n."""

        def steps() -> None:
            for _ in range(n):
                call()

        ms, host_ms, wall_ms = self.clock(steps)
        return ms / n, host_ms / n, wall_ms / n

    # What variants are made of

    def _make(self, variant: Variant) -> Training:
        args = self.args
        mask = None if variant.pattern is None else self.mask(variant.pattern)
        return make_training(
            variant,
            self.config,
            mask,
            self.device,
            lr=args.learning_rate,
            seed=args.seed,
            checkpointing=args.gradient_checkpointing,
            compiled=args.compile,
            dpo=args.dpo,
        )

    def _reference(self, pattern: str) -> Reference | None:
        """The update of one device on the pairs of all ranks; None if the model does not fit one device."""
        if self.on_gpu and 2 * self.weights_nbytes > torch.cuda.get_device_properties(self.device).total_memory:
            return None
        if pattern not in self.references:
            training = self._make(VARIANTS[f"local_{pattern}_fp32"])
            pairs = [self._pair(rank) for rank in range(self.size)]
            self.references[pattern] = Reference.of(training, self.mask(pattern), pairs)
            training.close()
            del training
            self.release_memory()
        return self.references[pattern]

    def _pair(self, rank: int) -> Tensor:
        args = self.args
        return pair(args.seed + rank, args.sequence_length, self.config.vocab_size, self.device)

    def _has_time(self, group: Sequence[Any]) -> bool:
        """Whether another variant can be built and the group timed before the deadline, as rank 0 sees it."""
        if self.args.deadline is None:
            return True
        left_s = [self.args.deadline - time.time()]
        dist.broadcast_object_list(left_s)
        return left_s[0] > 1.5 * self.longest_s + (GROUP_S if group else 0)

    def _fits(self, variant: Variant, group: Sequence[tuple[Training, dict[str, Any]]]) -> bool:
        """Whether all ranks have memory for the variant next to those of the group, which are built."""
        if not self.on_gpu:
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        least = torch.tensor(free + unused, device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        needed = FREE_WEIGHTS["sparse" if variant.pattern else "dense"] * self.weights_nbytes
        alike = [
            row["peak_memory_bytes"] for other, row in group if bool(other.variant.pattern) == bool(variant.pattern)
        ]
        return least.item() > max([needed, *alike])


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    results = World(job).measure()
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    sys.exit(job_main(run))
