"""Benchmark of a 3B-shaped model's backward pass: gradients gathered in hooks, against dense gradients that are kept.

Both passes use copies of one randomly initialised model and the same tokens. Only matrices have gradients, as under a
mask over matrices, so the passes differ only in the gathering and freeing of each gradient.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparse_opt import MaskSet, SparseAdamW

from ..shapes import llama_config, random_model
from ..timing import Prepared
from .cases import WrongResult, check_bits
from .inputs import random_active
from .optimizers import LR, mask_of
from .recorder import TORCH, Recorder

HOOKS, PLAIN = "backward, gathering in its hooks", "backward, dense gradients kept"

N_SEQUENCES, N_TOKENS = 2, 512


def why_absent() -> str:
    """Empty if the models can be made, else the reason why not."""
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed"


def llama(sizes: Mapping[str, int], device: torch.device, seed: int) -> nn.Module:
    """A bf16 Llama with tied embeddings and random weights, created on the device; norm weights are frozen."""
    model = random_model(llama_config(sizes, N_TOKENS, use_cache=False), device, seed)
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    return model.train()


class BackwardPass:
    """A model and its loss: ``forward`` builds the graph that ``backward`` uses.

    Args:
        clear: frees the gradients of the previous pass.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, clear: Callable[[], None]) -> None:
        self.model, self.tokens, self.clear = model, tokens, clear
        self.loss: Tensor | None = None

    def forward(self) -> None:
        self.clear()
        self.loss = self.model(input_ids=self.tokens, labels=self.tokens).loss

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None


def time_rows(recorder: Recorder, sizes: Mapping[str, int], density: float, seed: int) -> None:
    """Time the two passes in turns, after a check of the gathered gradients."""
    device = recorder.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(sizes["vocab"], (N_SEQUENCES, N_TOKENS), device=device, generator=generator)
    plain, hooked = (llama(sizes, device, seed) for _ in range(2))
    seen, handles = _watch(hooked)
    params = {name: param for name, param in hooked.named_parameters() if param.requires_grad}
    mask = mask_of(params, random_active([param.detach() for param in params.values()], density, generator))
    optimizer = SparseAdamW(hooked, mask, lr=LR, keep_base_weights=False)
    gathering = BackwardPass(hooked, tokens, optimizer.zero_grad)
    keeping = BackwardPass(plain, tokens, functools.partial(plain.zero_grad, set_to_none=True))

    def check() -> None:
        gathering.forward()
        gathering.backward()
        check_gathered(optimizer, params, seen, mask)
        for handle in handles:
            handle.remove()
        seen.clear()

    backend = recorder.auto("masked_grad_gather_")
    peer = {"plain backward": {"work": PLAIN, "backend": TORCH}}
    gathered = Prepared(gathering.forward, gathering.backward)
    works = [
        recorder.work(HOOKS, backend, density, gathered, check=check, peers=peer),
        recorder.work(PLAIN, TORCH, density, Prepared(keeping.forward, keeping.backward)),
    ]
    recorder.time(works)


def _watch(model: nn.Module) -> tuple[dict[nn.Parameter, Tensor], list[RemovableHandle]]:
    """Keep every dense gradient. Hooks run in the order in which they were added, so these precede the optimizer's."""
    seen: dict[nn.Parameter, Tensor] = {}

    def keep(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter) and param.grad is not None
        seen[param] = param.grad

    return seen, [p.register_post_accumulate_grad_hook(keep) for p in model.parameters() if p.requires_grad]


def check_gathered(
    optimizer: SparseAdamW, params: Mapping[str, nn.Parameter], seen: Mapping[nn.Parameter, Tensor], mask: MaskSet
) -> None:
    """Compare what the hooks gathered with the dense gradients, bit by bit.

    Raises:
        WrongResult: a bit differs, or a gradient is missing.
    """
    for name, param in params.items():
        found = optimizer.compact_grad(param)
        if found is None or param not in seen or param.grad is not None:
            raise WrongResult(f"backward: the gradient of {name} was not gathered and freed")
        expected = seen[param].view(-1)[mask[name].to(param.device).long()].to(found.dtype)
        check_bits(f"backward: the compact gradient of {name}", found, expected)
