"""The rollout engine `generate` without repeated work: several calls of `model.generate` that share one cache.

`generate` computes a prompt for each of its completions, and computes every row of a batch until the last one has
ended. Here the keys and values of a prompt are computed once and copied to its rows (`share_prompts`), and ended rows
leave the batch whenever half of them have ended (`drop_ended`). The distribution of the samples is unchanged, but not
the samples: the random numbers that a row gets depend on the size of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError

from .engine import Sampling, cut_at_eos
from .generate import GenerateEngine, generating, generation_config

# Fewer rows take about as long as one, and another call of `generate` costs more than it saves.
_FEWEST_ROWS = 32


class SharedCacheEngine(GenerateEngine):
    """`GenerateEngine` that computes each prompt once, and drops ended rows.

    Args:
        share_prompts: compute the keys and values of equal prompts of a batch once.
        drop_ended: remove the ended rows when half of the rows have ended.
        model, pad_id, eos_ids, max_rows, by_length: see `GenerateEngine`.

    Raises:
        ConfigError: the model's cache holds more than keys and values, as that of a recurrent layer.
    """

    def __init__(self, model: Any, *, share_prompts: bool, drop_ended: bool, **arguments: Any):
        super().__init__(model, **arguments)
        self.share_prompts, self.drop_ended = share_prompts, drop_ended
        _empty_cache(self.model)

    def _sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        input_ids, attended = self.padded(prompts)
        cache = _empty_cache(self.model)
        if self.share_prompts and input_ids.shape[1] > 1:
            self._compute_once(prompts, input_ids[:, :-1], attended[:, :-1], cache)
        completions: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # those in the batch
        while True:
            width = input_ids.shape[1]
            many = self.drop_ended and len(rows) > _FEWEST_ROWS
            generated = self.model.generate(
                input_ids=input_ids,
                attention_mask=attended,
                past_key_values=cache,
                generation_config=generation_config(sampling, self.pad_id, self.eos_ids),
                stopping_criteria=[_HalfEnded(self.eos_ids)] if many else [],
            )
            n_new = generated.shape[1] - width
            going = []
            for place, ids in enumerate(generated[:, width:].tolist()):
                new = cut_at_eos(ids, self.eos_ids)
                completions[rows[place]] += new
                if new[-1] not in self.eos_ids and n_new < sampling.max_new_tokens:
                    going.append(place)
            if not going:
                return completions
            rows = [rows[place] for place in going]
            index = torch.tensor(going, dtype=torch.int64, device=self.model.device)
            cache.batch_select_indices(index)
            input_ids = generated[index]
            attended = torch.cat([attended[index], attended.new_ones(len(rows), n_new)], dim=1)
            sampling = replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - n_new,
                min_new_tokens=max(0, sampling.min_new_tokens - n_new),
            )

    def _compute_once(self, prompts: Sequence[Sequence[int]], input_ids: Tensor, attended: Tensor, cache: Any) -> None:
        """Fill the cache with the keys and values of input_ids [R, T], the padded prompts without their last token."""
        numbers: dict[tuple[int, ...], int] = {}  # distinct prompt -> its number, in order
        number_of = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        device = input_ids.device
        places = [number_of.index(number) for number in range(len(numbers))]
        first_rows = torch.tensor(places, dtype=torch.int64, device=device)
        # One token that is discarded; greedy, so that it takes no random number.
        greedy = generation_config(Sampling(1, temperature=0.0), self.pad_id, self.eos_ids)
        with generating(self.model, greedy):
            self.model.generate(
                input_ids=input_ids[first_rows],
                attention_mask=attended[first_rows],
                past_key_values=cache,
                generation_config=greedy,
            )
        cache.batch_select_indices(torch.tensor(number_of, dtype=torch.int64, device=device))


class _HalfEnded:
    """A stopping criterion of transformers: stop all rows when half of them have ended."""

    def __init__(self, eos_ids: Sequence[int]):
        self._eos_ids = eos_ids
        self._ended: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        last = input_ids[:, -1]
        ended = torch.isin(last, torch.tensor(self._eos_ids, dtype=last.dtype, device=last.device))
        # An ended row gets padding, which is not EOS for every tokenizer.
        self._ended = ended if self._ended is None else self._ended | ended
        return (2 * self._ended.sum() >= len(last)).expand(len(last))


def _empty_cache(model: Any) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    if not model._supports_default_dynamic_cache() or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(
            f"options 'share_prompts' and 'drop_ended': the cache of {type(model).__name__} cannot be divided by rows "
            f"({names or 'none of transformers own'}): set both to false"
        )
    return cache
