"""Completions by transformers' continuous batching.

Rows of all lengths go through the model together, without padding, with their keys and values in pages; a row that ends
gives its place to the next. Written for transformers 5.17 to 5.23, on the manager under `model.generate_batch`:
`generate_batch` itself adds requests while its thread already works on the first, so that which rows share a batch, and
with it what is drawn, would depend on the two threads' timing; and it logs failed requests instead of raising.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparse_opt.errors import ConfigError, SparseOptError

from .generate import causal_lm, generating, generation_config
from .sampling import Sampling, require_room

# Tokens of keys and values in a page. torch's attention is given a mask over all pages, so small ones waste less; other
# implementations get transformers' own value, which their block tables are made for.
_PAGE, _PAGE_OF_OTHERS = 32, 256
# Tokens that go through the model at once, unless more rows are in flight; the mask has a row for each.
_LARGEST_BATCH = 512


class ContinuousBatchingEngine:
    """transformers' continuous batching, on the model that is trained, in its dtype.

    While it generates, the model's attention is torch's under the name that continuous batching wants, and the model is
    in eval mode; both are as before afterwards. The pages are allocated for each call, so nothing stays from weights
    that have changed since.

    With torch's attention each token attends to the pages of all rows, masked to its own: time and the mask's memory
    grow with the square of the rows in flight, which `max_rows` bounds. An implementation that knows where rows end,
    such as flash_attention_2 of the package flash-attn, does not have that cost.

    Args:
        model: a transformers causal language model, or peft's wrapper of one with LoRA-like adapters.
        pad_id: is not used, as nothing is padded.
        eos_ids: any of them ends a completion.
        max_rows: completions in flight at once; None for all of a call's.
        attention: transformers' name of the attention to generate with; None for torch's.

    Raises:
        ConfigError: the model has no continuous batching, or makes positions from an attention mask, as BLOOM does:
            rows share one here, and it would write other text without an error.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        max_rows: int | None = None,
        attention: str | None = None,
    ):
        self.model = causal_lm(model)
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.max_rows = max_rows
        self.attention = attention
        if not hasattr(self.model, "init_continuous_batching"):
            raise ConfigError(
                f"rollout_engine continuous_batching wants a transformers model, found {type(self.model).__name__}"
            )
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        if not takes_positions or getattr(self.model.config.get_text_config(), "alibi", False):
            raise ConfigError(
                f"rollout_engine continuous_batching wants a model that takes position ids, which "
                f"{type(self.model).__name__} does not: use generate"
            )

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[list[int]]:
        """See `Engine.generate`. The draws' seed comes from torch's global random state, which advances by one draw.

        Raises:
            ConfigError: min_new_tokens, which continuous batching does not know, or a prompt and its completion are
                longer than the model's positions reach.
            SparseOptError: a completion failed, as when the pages do not fit into memory; with the cause.
        """
        if sampling.min_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {sampling.min_new_tokens}: rollout_engine continuous_batching cannot hold EOS back"
            )
        require_room(self.model, prompts, sampling)
        config = generation_config(sampling, self.pad_id, self.eos_ids)
        device = self.model.device
        seed = int(torch.randint(2**31, (), device="cpu"))
        # The thread that generates seeds torch's random states, of all devices.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            generating(self.model, config),
            _attention(self.model, self.attention),
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
                    # The manager's stream goes; torch would keep cuBLAS's workspace of it, 32 MiB a call on an H200.
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
        return completions

    def _batching(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int) -> Any:
        """Settings with room for all rows in flight, so that what is batched does not depend on free memory."""
        from transformers import ContinuousBatchingConfig

        n_rows = len(prompts) * n
        in_flight = n_rows if self.max_rows is None else min(n_rows, self.max_rows)
        fields = ContinuousBatchingConfig.__dataclass_fields__
        page = _PAGE if self.attention is None else _PAGE_OF_OTHERS
        pages = -(-(max(map(len, prompts)) + sampling.max_new_tokens) // page)
        settings: dict[str, Any] = {
            "page_size" if "page_size" in fields else "block_size": page,  # its name until 5.17
            "num_blocks": in_flight * pages,
            "max_batch_tokens": max(in_flight, min(_LARGEST_BATCH, n * sum(map(len, prompts)))),
            "max_requests_per_batch": in_flight,
            "seed": seed,
        }
        if "auto_switch_to_flash" in fields:
            # It would fetch kernels from the hub; earlier versions leave an attention of their own name alone.
            settings["auto_switch_to_flash"] = False
        return ContinuousBatchingConfig(**settings)

    def close(self) -> None:
        """Nothing is held between calls."""


@contextmanager
def _attention(model: Any, name: str | None) -> Iterator[None]:
    """Inside, the model attends with this implementation, or with torch's as continuous batching calls it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name is None:
        # Until 5.17 attention with pages had names of its own.
        name = "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def _results(manager: Any, n: int) -> dict[str, Any]:
    """What each of `n` requests ended with, by name; fewer where the thread that generates has ended early."""
    results: dict[str, Any] = {}
    while len(results) < n:
        running = manager.is_running()  # asked first: what it leaves in the queue as it ends is still read
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        elif result is None and not running:
            break
    return results
