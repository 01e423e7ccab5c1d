"""Layers whose weights vLLM packs after loading, so that writing to `layer.weight` would not change their results.

On CPUs vLLM packs the weight of each linear layer for its GEMM (oneDNN, AMX, zentorch): the layer computes with the
packed copy, and `layer.weight` is replaced by an empty tensor. Embeddings keep `layer.weight`, but an output layer
computes with a packed copy of it too. A packed copy cannot be updated in place. For the layers that an update can
change, `PackedLayers` therefore keeps the plain weights, which are destinations like others, and packs a layer again
after its plain weights have changed, by vLLM's own `process_weights_after_loading`. This costs the memory of these
layers' weights a second time. On GPUs nothing is packed, and no memory is needed.

Packed layers are recognized by their tensors: a parameter whose shape, strides or dtype differ from those that vLLM
recorded when it created the layer, or a layer with a `cpu_linear`, which may hold a packed copy. The experts of a
layer (`w13_weight`, `w2_weight`) are packed for CPUs in tensors of the same shape; their kernels have a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from ...errors import WeightSyncError
from ...weight_sync import Destination
from ..loader_trace import require_plain_method, storage_key

# The kernels of experts that compute with weights as they were loaded. Others swap, shuffle or transpose them.
_PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


class PackedLayers:
    """The packed layers of a model, and the plain weights of those that updates change.

    Args:
        model: a model of vLLM after loading. Its packed layers are changed by `repack` only.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # layer -> name of a packed parameter -> the parameter as its loader needs it: on the meta device, until its
        # layer is kept.
        self._plain: dict[nn.Module, dict[str, Tensor]] = {}
        for layer in model.modules():
            plain = _packed_parameters(layer)
            if plain:
                self._plain[layer] = plain
        self._kept: set[nn.Module] = set()

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Give the packed layers their plain parameters, which vLLM's weight loaders expect, within the context."""
        packed = [(layer, name, layer._parameters[name]) for layer, plain in self._plain.items() for name in plain]
        for layer, plain in self._plain.items():
            layer._parameters.update(plain)  # type: ignore[arg-type]  # parameters, typed as tensors
        try:
            yield
        finally:
            for layer, name, parameter in packed:
                layer._parameters[name] = parameter

    def keep(self, slices: Mapping[str, Sequence[Destination]], vllm_config: Any) -> dict[str, list[Destination]]:
        """Read the plain weights of the packed layers in `slices` from the checkpoint, and return the slices there.

        Layers that are kept already are not read again: updates have changed them.

        Args:
            slices: by name of the weight, as traced within `as_loaded`.
            vllm_config: vLLM's configuration, which names the checkpoint that the engine has loaded.

        Returns:
            The slices, with those on the meta device replaced by the same elements of the plain weights.

        Raises:
            WeightSyncError: the plain weights cannot be read, or packed layers are part of a compiled graph.
        """
        pieces = [piece for several in slices.values() for piece in several]
        if vllm_config.compilation_config.mode and self.holding(pieces):
            raise WeightSyncError(
                f"{type(self.model).__name__} is compiled and its weights are packed for the CPU, so that updates "
                "would not reach the compiled code: start vLLM with enforce_eager=True (--enforce-eager)"
            )
        keys = {storage_key(piece.tensor) for piece in pieces if piece.tensor.is_meta}
        new: dict[nn.Module, dict[str, Tensor]] = {}
        kept: dict[int, Tensor] = {}
        for layer, recorded in self._plain.items():
            if any(storage_key(parameter) in keys for parameter in recorded.values()):
                with get_layerwise_info(layer).restore_device:
                    new[layer] = {name: materialize_meta_tensor(parameter) for name, parameter in recorded.items()}
                kept.update({storage_key(recorded[name]): plain for name, plain in new[layer].items()})
        if new:
            self._load(new, vllm_config)
        return {name: [_moved(piece, kept) for piece in several] for name, several in slices.items()}

    def _load(self, new: dict[nn.Module, dict[str, Tensor]], vllm_config: Any) -> None:
        """Read the weights of new layers from the checkpoint, and keep these layers if this succeeds."""
        weights = checkpoint_of(self.model, vllm_config)
        before = self._plain
        self._plain = {**before, **new}
        keys = {storage_key(plain) for parameters in new.values() for plain in parameters.values()}
        try:
            with torch.no_grad(), self.as_loaded(), _WriteOnlyTo(keys):
                self.model.load_weights(weights)  # type: ignore[operator]  # nn.Module has no such method
        except BaseException:
            self._plain = before
            raise
        self._kept.update(new)

    def holding(self, slices: Iterable[Destination]) -> list[nn.Module]:
        """Return the layers that compute with packed copies of the weights in `slices`. Biases are not packed."""
        keys = {storage_key(piece.tensor) for piece in slices}
        return [
            layer
            for layer in self.model.modules()
            if any(storage_key(weight) in keys for weight in self._packed_from(layer))
        ]

    def _packed_from(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors that vLLM packs, when it packs the layer again."""
        plain = self._plain.get(layer, {})
        weight = plain.get("weight", layer._parameters.get("weight")) if hasattr(layer, "cpu_linear") else None
        return [*plain.values(), *([] if weight is None or "weight" in plain else [weight])]

    def require_unpacked(self, name: str, slices: Sequence[Destination]) -> None:
        """Raise WeightSyncError if vLLM has packed a copy of a weight, with which it computes; names the weight."""
        for layer in self.holding(slices):
            if layer in self._plain or _ignores_weight(layer):
                layer_name = next(name for name, module in self.model.named_modules() if module is layer)
                raise WeightSyncError(
                    f"weight {name} belongs to layer {layer_name}, of which vLLM has a copy that is packed for the CPU"
                )

    def repack(self, layers: Iterable[nn.Module]) -> None:
        """Pack the weights of some layers again, after they have changed."""
        for layer in layers:
            for name, plain in self._plain.get(layer, {}).items():
                if name == "weight":
                    layer.weight = plain
                else:  # vLLM replaces the data, not the parameter
                    layer._parameters[name].data = plain.data  # type: ignore[union-attr]
            method: Any = layer.quant_method
            # The method of experts packs them the first time only.
            packing = method.moe_kernel.fused_experts if _has_packed_experts(layer) else method
            packing.process_weights_after_loading(layer)

    def kept(self) -> list[Tensor]:
        """Return the plain weights that are kept in addition to the packed ones."""
        return [plain for layer in self._kept for plain in self._plain[layer].values()]

    def require_known_layout(self, name: str, slices: Sequence[Destination]) -> None:
        """Raise if a weight, traced within `as_loaded`, belongs to a layer that may store it in another layout.

        Raises:
            WeightSyncError: the layer's quantization method is not one of plain weights, or has packed the weight in
                another way than for the GEMM of CPUs, or has rearranged experts; names the weight and the layer.
        """
        keys = {storage_key(piece.tensor) for piece in slices}

        def within(layer: nn.Module) -> list[Tensor]:
            parameters = {**dict(layer.named_parameters(recurse=False)), **self._plain.get(layer, {})}
            return [parameter for parameter in parameters.values() if storage_key(parameter) in keys]

        for layer_name, layer in self.model.named_modules():
            if isinstance(layer, MLAAttention) and within(layer.kv_b_proj):
                raise WeightSyncError(
                    f"weight {name} belongs to {layer_name}, which computes with copies that vLLM has made of it after "
                    "loading: exclude it from the mask"
                )
            mine = within(layer)
            if getattr(layer, "quant_method", None) is None or not mine:
                continue
            if isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
                _require_known_experts(name, layer_name, layer)
                continue
            require_plain_method(name, layer_name, layer)
            # On CPUs vLLM packs convolutions into tensors that may have the shape of the plain weight.
            convolution = any(parameter.ndim > 2 and parameter.device.type == "cpu" for parameter in mine)
            if convolution or (layer in self._plain and not hasattr(layer, "cpu_linear")):
                raise WeightSyncError(
                    f"weight {name} belongs to layer {layer_name}, whose parameters vLLM has rearranged after loading: "
                    "expected plain weights, or those of a linear layer packed for the CPU"
                )


def checkpoint_of(model: nn.Module, vllm_config: Any) -> Iterable[tuple[str, Tensor]]:
    """Return name and tensor of everything in the checkpoint that vLLM has loaded, which it reads again.

    Raises:
        WeightSyncError: the model was not loaded from a checkpoint on disk.
    """
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise WeightSyncError(
            f"load_format is {vllm_config.load_config.load_format}, expected a checkpoint on disk, which is read again"
        )
    weights: Iterable[tuple[str, Tensor]] = loader.get_all_weights(vllm_config.model_config, model)
    return weights


def _ignores_weight(layer: Any) -> bool:
    """Whether a layer's `cpu_linear` computes with a packed copy, whatever weight it is called with."""
    weight = layer.weight
    invalid = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
    outputs = layer.cpu_linear(torch.ones_like(invalid[:1]), invalid, None)
    return not bool(outputs.isnan().all())


def _has_packed_experts(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.unquantized_backend == UnquantizedMoeBackend.CPU
        and method.moe_kernel is not None
    )


def _require_known_experts(name: str, layer_name: str, layer: Any) -> None:
    backend = layer.quant_method.unquantized_backend
    if layer.moe_config.moe_parallel_config.enable_eplb:
        raise WeightSyncError(
            f"weight {name} belongs to the experts of {layer_name}, which vLLM moves between its workers: start it "
            "without enable_eplb"
        )
    if backend not in (*_PLAIN_EXPERTS, UnquantizedMoeBackend.CPU):
        raise WeightSyncError(
            f"weight {name} belongs to the experts of {layer_name}, which vLLM has rearranged for its kernels "
            f'{backend.value}: start it with moe_backend="triton" (--moe-backend triton)'
        )


def _packed_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters whose layout is not the one recorded at creation, as recorded, on the meta device."""
    recorded, _ = get_layerwise_info(layer).restore_metadata
    has_packed_experts = _has_packed_experts(layer)
    plain = {
        name: restore_layer_refs(parameter, layer)
        for name, parameter in recorded.items()
        if (current := layer._parameters.get(name)) is not None
        and (not _same_layout(current, parameter) or (has_packed_experts and parameter.ndim == 3))
    }
    # vLLM records no biases, which its kernels for small matrices (AMX) convert to float32.
    bias = layer._parameters.get("bias")
    if hasattr(layer, "cpu_linear") and bias is not None and "weight" in recorded:
        dtype = recorded["weight"].dtype
        if bias.dtype != dtype:
            plain["bias"] = bias.data.to("meta", dtype)
            plain["bias"].__class__ = bias.__class__
            plain["bias"].__dict__ = dict(bias.__dict__)
    return plain


def _same_layout(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.stride() == second.stride() and first.dtype == second.dtype


def _moved(piece: Destination, kept: dict[int, Tensor]) -> Destination:
    plain = kept.get(storage_key(piece.tensor))
    if plain is None:
        return piece
    target = piece.tensor
    view = plain.data.as_strided(target.shape, target.stride(), target.storage_offset())
    return Destination(view, piece.rows, piece.columns)


class _WriteOnlyTo(TorchDispatchMode):
    """Leave out the copies and fills of loaders whose destination is not in one of the given storages."""

    def __init__(self, keys: set[int]) -> None:
        super().__init__()
        self.keys = keys

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_") and storage_key(args[0]) not in self.keys:
            return args[0]
        return func(*args, **(kwargs or {}))
