"""How vLLM gets the policy's weights: all of them, or those that have changed under a mask."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sparse_opt.errors import SparseOptError
from sparse_opt.integrations.vllm.client import VLLMWeightSync
from sparse_opt.masks import MaskSet
from sparse_opt.weight_sync import DistributedWeightSender, WeightSender

from ..ranks import ONE_RANK, Ranks


class WeightSync(Protocol):
    """Gives an engine the weights that the policy has; with several ranks, all call its methods."""

    # Whether `synchronize` writes changes to weights that the engine must still have, so that it may not discard them.
    needs_weights: bool

    def synchronize(self) -> None:
        """Make the engine's weights equal to the policy's; discard keys and values cached with other weights.

        Raises:
            SparseOptError: the engine did not take them.
        """

    def close(self) -> None:
        """Release its resources; the engine is still running."""


class FullReload:
    """Writes all weights of the policy to vLLM in the same process; LoRA adapters are merged on the way.

    Args:
        llm: a `vllm.LLM` that runs in this process.
        model: the policy; see `merged_weights`.
    """

    needs_weights = False

    def __init__(self, llm: Any, model: nn.Module):
        self._llm, self._model = llm, model

    def synchronize(self) -> None:
        """See `WeightSync`.

        Raises:
            SparseOptError: some of vLLM's weights are not among the policy's; or vLLM keeps its prefix cache.
        """
        (missing,) = self._llm.collective_rpc(_reload, args=(merged_weights(self._model),))
        if missing:
            raise SparseOptError(
                f"vLLM's {type(self._model).__name__} has {len(missing)} weights that the policy does not give it, "
                f"among them {min(missing)}"
            )
        if not self._llm.reset_prefix_cache(reset_connector=True):  # also blocks in other memory
            raise SparseOptError("reset_prefix_cache of vLLM failed: blocks are still in use")

    def close(self) -> None:
        """Do nothing: no resources are held."""


class SparseUpdates:
    """Writes the active values of the run's mask once, and then only those that have changed.

    With several ranks, rank 0 sends; of a sharded policy it collects the active values, never whole weights.

    Args:
        engine: a `vllm.LLM` of this process or the URL of a server, with the weight-transfer backend `sparse_opt`. It
            has loaded a checkpoint whose other values are those of the policy.
        model: the policy.
        mask: no weight outside of it changes.
        ranks: the processes that train the policy; several need a server.
    """

    needs_weights = True

    def __init__(self, engine: Any, model: nn.Module, mask: MaskSet, ranks: Ranks = ONE_RANK):
        self._engine, self._model, self._mask, self._ranks = engine, model, mask, ranks
        self._sync: VLLMWeightSync | None = None

    def synchronize(self) -> None:
        """See `WeightSync`."""
        if self._sync is not None:
            self._sync.update()
            return
        kind = WeightSender if self._ranks.size == 1 else DistributedWeightSender
        sync = VLLMWeightSync(kind(self._model, self._mask), self._engine)
        sync.connect()
        self._sync = sync

    def close(self) -> None:
        """Do nothing: no resources are held."""


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights with their names in its checkpoint and PEFT adapters merged, without changing the model.

    A sum is rounded to the weight's dtype, as when PEFT merges. Tied weights are yielded once.

    Args:
        model: a transformers model, whose layers may be wrapped by PEFT.
    """
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if "base_layer" in dict(module.named_children())
    }
    for name, parameter in model.named_parameters():
        layer, is_base, rest = name.partition(".base_layer.")
        if is_base and layer in adapted:
            weight = parameter.detach()
            if rest == "weight" and not adapted[layer].disable_adapters:
                for adapter in adapted[layer].active_adapters:
                    weight = weight + adapted[layer].get_delta_weight(adapter).to(weight.dtype)
            yield f"{layer}.{rest}", weight
        elif not any(name.startswith(f"{layer}.") for layer in adapted):
            yield name, parameter.detach()


def save_weights(weights: Iterable[tuple[str, Tensor]], file: Path) -> None:
    """Write weights to a safetensors file, as a checkpoint has them."""
    save_file({name: weight.contiguous() for name, weight in weights}, file, {"format": "pt"})


def _reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
    """Reload the weights of a vLLM worker; return the names of its weights that were not loaded.

    vLLM's `reload_weights` processes each layer again after loading it, because the layers may hold their weights in
    another form than the checkpoint: on a CPU, packed for oneDNN. It logs missing weights but does not return them.
    """
    model = worker.get_model()
    names = {name for name, _ in model.named_parameters()}
    load_weights = model.load_weights
    loaded: set[str] = set()

    def recording(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        found: set[str] | None = load_weights(weights)
        if found is None:
            raise SparseOptError(f"vLLM's {type(model).__name__} does not report the weights that it loaded")
        loaded.update(found)
        return found

    model.load_weights = recording
    try:
        with _quiet("vllm.model_executor.model_loader.reload"):
            worker.reload_weights(weights_iterator=weights)
    finally:
        model.load_weights = load_weights
    _process_tied(model)
    return names - loaded


class ReloadExtension:
    """Methods added to the workers of a vLLM server, by `--worker-extension-cls`; `VLLMServerEngine` calls them."""

    def reload_policy(self, file: str) -> list[str]:
        """Load all weights from a safetensors file; return the names of the model's weights missing from it."""
        with safe_open(file, framework="pt") as weights:
            return sorted(_reload(self, ((name, weights.get_tensor(name)) for name in weights.keys())))


def _process_tied(model: nn.Module) -> None:
    """Process the layers whose weight belongs to an earlier layer too, which `reload_weights` leaves out.

    On a CPU an output layer tied to the embedding has a packed copy of the weight, which would keep the old values.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        method = getattr(module, "quant_method", None)
        if id(weight) in seen and method is not None:
            method.process_weights_after_loading(module)
        seen.add(id(weight))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A context in which these loggers show errors only: vLLM warns of every layer without weights of its own."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
