"""Options of loops whose steps can be replayed as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .training import TrainingOptions

# A graph is kept for each length of the batches, so that with graphs they are always padded.
_MULTIPLE_WITH_GRAPHS = 64


@dataclass(kw_only=True)
class GraphOptions(TrainingOptions):
    """Options of loops whose steps depend on the data by the values and shapes of their batches alone."""

    cuda_graphs: bool = option(
        False,
        "mode sparse on one GPU: replay each step as a CUDA graph, one for each length of the batches; the host then "
        "launches one graph in place of thousands of kernels",
    )
    pad_to_multiple_of: int | None = option(
        None, "pad batches to a multiple of so many tokens; none is 64 with cuda_graphs, else no padding", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graphs and self.mode != "sparse":
            raise ConfigError(f"option 'cuda_graphs' is true, and mode is {self.mode}: expected mode sparse")
        if self.cuda_graphs and self.dtype == "fp16":
            raise ConfigError(
                "option 'cuda_graphs' is true, and dtype is fp16, whose steps are skipped if a gradient overflows: "
                "expected bf16 or fp32"
            )

    def require_no_padding(self, name: str) -> None:
        """Raise ConfigError if option `name`, of several sequences in a row, is true although batches are padded."""
        if getattr(self, name) and self.has_few_shapes:
            raise ConfigError(
                f"option '{name}' is true, and cuda_graphs or pad_to_multiple_of pads batches with one sequence in "
                "each row: give one"
            )

    @property
    def has_few_shapes(self) -> bool:
        """Whether batches are padded so that few different shapes occur."""
        return self.cuda_graphs or self.pad_to_multiple_of is not None

    @property
    def length_multiple(self) -> int:
        """Batches are padded to a multiple of so many tokens."""
        return self.pad_to_multiple_of or (_MULTIPLE_WITH_GRAPHS if self.cuda_graphs else 1)
