"""The rollout engine `continuous_batching`, by transformers' continuous batching.

Rows of all lengths run through the model together, without padding, with their keys and values in pages; the next row
replaces a finished one. Written for transformers 5.17 to 5.23. It uses the manager under `model.generate_batch` instead
of that function, which adds requests while its thread already processes the first, so that the batches, and with them
the samples, would depend on the timing of the threads, and which logs failed requests instead of raising.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparse_opt.errors import ConfigError, SparseOptError

from ..policy.models import causal_lm
from .engine import Completions, Sampling, require_positions
from .generate import generating, generation_config

# Tokens of keys and values per page. torch's attention has a mask over all pages, so small pages waste less.
_PAGE = 32
# Tokens per forward pass, unless more rows are in flight; the mask has a row for each.
_LARGEST_BATCH = 512


class ContinuousBatchingEngine:
    """transformers' continuous batching, on the trained model in its dtype.

    During generation, the model uses torch's attention under the name that continuous batching requires, and is in eval
    mode; both are restored afterwards. The pages are allocated for each call, so no cache of older weights remains.

    With torch's attention each token attends to the pages of all rows under a mask: time and the memory of the mask
    grow with the square of the rows in flight, which `max_rows` limits.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one with LoRA-like adapters.
        pad_id: not used, because nothing is padded.
        eos_ids: any of them ends a completion.
        max_rows: completions in flight at once; None for all of a call.

    Raises:
        ConfigError: the model does not support continuous batching, or computes positions from an attention mask, as
            BLOOM does: rows share one mask here, so that it would silently generate other text.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        max_rows: int | None = None,
    ):
        self.model = causal_lm(model)
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.max_rows = max_rows
        if not hasattr(self.model, "init_continuous_batching"):
            raise ConfigError(
                f"rollout_engine continuous_batching needs a transformers model, found {type(self.model).__name__}"
            )
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        if not takes_positions or getattr(self.model.config.get_text_config(), "alibi", False):
            raise ConfigError(
                f"rollout_engine continuous_batching needs a model that takes position ids, which "
                f"{type(self.model).__name__} does not: use generate"
            )

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`. The draws' seed comes from torch's global random state, which advances by one draw.

        Raises:
            ConfigError: min_new_tokens is set, which continuous batching does not support, or a prompt with its
                completion exceeds the model's positions.
            SparseOptError: a completion failed, for example because the pages do not fit into memory; with the cause.
        """
        if sampling.min_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {sampling.min_new_tokens}: rollout_engine continuous_batching cannot suppress EOS"
            )
        if not prompts:
            return Completions([])
        require_positions(self.model, prompts, sampling)
        config = generation_config(sampling, self.pad_id, self.eos_ids)
        device = self.model.device
        seed = int(torch.randint(2**31, (), device="cpu"))
        # The generating thread seeds torch's random states of all devices.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            generating(self.model, config),
            _torch_attention(self.model),
        ):
            manager = self.model.init_continuous_batching(
                generation_config=config,
                continuous_batching_config=self._batching(prompts, n, sampling, seed),
            )
            try:
                names = [manager.add_request(list(prompt)) for prompt in prompts for _ in range(n)]
                manager.start()
                results = _results(manager, len(names))
            finally:
                manager.stop(hard_stop=True)
                manager.destroy()
                if device.type == "cuda":
                    # Free the cuBLAS workspace of the manager's stream, which torch would keep: 32 MiB per call on an
                    # H200.
                    torch._C._cuda_clearCublasWorkspaces()
        completions = []
        for row, name in enumerate(names):
            result = results.get(name)
            if result is None or result.error is not None:
                cause = "it was not finished" if result is None else result.error
                raise SparseOptError(
                    f"continuous batching: completion {row} of {len(names)}: {cause}; where memory is short, lower "
                    "max_rows or max_completion_length"
                )
            completions.append(list(result.generated_tokens))
        return Completions(completions)

    def _batching(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int) -> Any:
        """Settings with capacity for all rows in flight, so that batches do not depend on free memory."""
        from transformers import ContinuousBatchingConfig

        n_rows = len(prompts) * n
        in_flight = n_rows if self.max_rows is None else min(n_rows, self.max_rows)
        fields = ContinuousBatchingConfig.__dataclass_fields__
        pages = -(-(max(map(len, prompts)) + sampling.max_new_tokens) // _PAGE)
        settings: dict[str, Any] = {
            "page_size" if "page_size" in fields else "block_size": _PAGE,  # its name until 5.17
            "num_blocks": in_flight * pages,
            "max_batch_tokens": max(in_flight, min(_LARGEST_BATCH, n * sum(map(len, prompts)))),
            "max_requests_per_batch": in_flight,
            "seed": seed,
        }
        if "auto_switch_to_flash" in fields:
            # Otherwise it would fetch kernels from the hub; earlier versions do not replace the paged attention.
            settings["auto_switch_to_flash"] = False
        return ContinuousBatchingConfig(**settings)

    def close(self) -> None:
        """Do nothing: no resources are held between calls."""


@contextmanager
def _torch_attention(model: Any) -> Iterator[None]:
    """A context in which the model uses torch's attention, under its name in continuous batching."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Until 5.17, paged attention had separate names.
    name = "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def _results(manager: Any, n: int) -> dict[str, Any]:
    """The results of `n` requests by name; fewer if the generating thread has stopped early."""
    results: dict[str, Any] = {}
    while len(results) < n:
        running = manager.is_running()  # read first, so that results queued as the thread ends are still read
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        elif result is None and not running:
            break
    return results
