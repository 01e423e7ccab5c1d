"""One copy of the weights for a trainer and a vLLM engine of its process: an update is no message and copies nothing.

The parameters of the trained model become views of the engine's tensors: the rows of `qkv_proj` that are `q_proj`, the
slice of an expert in `w13`. The trace of vLLM's loaders (loader_trace.py) says where each of them is. The trainer
takes the engine's memory and not the other way round, because vLLM captures CUDA graphs, which have the addresses of
the weights, when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import WeightSyncError
from ...masks.patterns import matrix_shape
from ...tensors import canonical_names, holds_base_weights, is_wrapper, named_parameters_of
from ...weight_sync import Destination
from ...weight_sync.destinations import first_moved
from ..loader_trace import trace_destinations

_OTHER_WAY = "send updates in place of sharing weights (vllm_weights='sparse', VLLMWeightSync)"


class SharedWeights:
    """The weights that a model and a vLLM engine have in common; `share_weights` makes it."""

    def __init__(self, model: nn.Module, llm: Any) -> None:
        self._model, self._llm = model, llm
        self._parameters = named_parameters_of(model)
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device

    def update(self) -> None:
        """Wait for the steps that the current stream has, and discard vLLM's cached keys and values.

        Call it after a step of the optimizer and before vLLM generates.

        Raises:
            WeightSyncError: a parameter is not a view of vLLM's weights any more, as after `model.to(dtype)`; or the
                model holds its base weights; or vLLM cannot discard its cached keys and values.
        """
        if (name := first_moved(self._model, self._addresses)) is not None:
            raise WeightSyncError(
                f"{name} was moved, cast or replaced after share_weights, and vLLM has its weights of before: do so "
                "before share_weights"
            )
        if holds_base_weights(self._parameters.values()):
            raise WeightSyncError("the model holds its base weights: leave base_weights() before vLLM generates")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise WeightSyncError("reset_prefix_cache of vLLM failed: blocks are still in use")


def share_weights(model: nn.Module, llm: Any) -> SharedWeights:
    """Make the parameters of a model views of a vLLM engine's weights, and free their own memory.

        llm = LLM(folder, dtype="bfloat16")
        shared = share_weights(model, llm)
        optimizer = SparseAdamW(model, mask, lr=3e-5)
        for prompts in batches:
            rows = llm.generate(prompts)
            loss(model, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            shared.update()

    The engine gets the model's values, bit for bit, and the model is on the engine's device afterwards: until then it
    can be on the CPU, so that the GPU never holds two copies. Parameters stay the same objects and tied ones tied; an
    optimizer may exist already, if the model is on the engine's device. Within `base_weights()` the engine has the base
    weights, too, and must not generate.

    Args:
        model: of transformers, in the dtypes of the engine. The engine has loaded a checkpoint of the same shapes.
        llm: a `vllm.LLM` that runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), with one worker. If it has
            `enable_sleep_mode=True`, `llm.sleep()` of any level releases its key-value cache, and keeps the weights,
            from now on (sleep.py). It must not have slept before.

    Raises:
        WeightSyncError: the engine is another one, or a parameter cannot be a view of its weights, because it is stored
            in another dtype, transposed, padded, in several parts, quantised, or packed for a kernel; the message
            names the parameter. The model has not changed.
    """
    worker, config = _worker_in_process(llm)
    named = getattr(model, "_orig_mod", model).named_parameters()  # of a model that torch.compile has wrapped
    parameters = {name: parameter for name, parameter in named if parameter.numel()}
    if holds_base_weights(parameters.values()):
        raise WeightSyncError("the model holds its base weights: call share_weights outside of base_weights()")
    views = _views(parameters, worker.get_model(), config)
    if config.model_config.enable_cumem_allocator:
        _keep_in_sleep(worker, config.model_config)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(parameters[name])
            parameters[name].data = view
    model.to(next(iter(views.values())).device)  # the buffers
    return SharedWeights(model, llm)


def _worker_in_process(llm: Any) -> tuple[Any, Any]:
    """Return the only worker of an engine, which is in this process, and the engine's configuration."""
    config = llm.llm_engine.vllm_config
    sizes = {
        name: getattr(config.parallel_config, name)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    for name, size in sizes.items():
        if size != 1:
            raise WeightSyncError(f"{name} of the vLLM engine is {size}, expected 1 to share weights with it")
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    if worker is None:
        raise WeightSyncError(
            "the vLLM engine runs in another process, whose weights cannot be shared: set "
            f"VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts, or {_OTHER_WAY}"
        )
    return worker, config


def _keep_in_sleep(worker: Any, model_config: Any) -> None:
    """Let the engine keep its weights when it sleeps."""
    from .sleep import CacheOnlySleep  # imports vLLM

    model_config.sleep_mode_backend = "sparse_opt"  # the worker reads it when it first uses the backend
    if not isinstance(worker.sleep_mode_backend, CacheOnlySleep):
        raise WeightSyncError(
            "the vLLM engine has slept already, and would discard the weights when it sleeps again: call share_weights "
            "before its first sleep"
        )


def _views(parameters: dict[str, nn.Parameter], engine: nn.Module, config: Any) -> dict[str, Tensor]:
    """Return a tensor over the engine's memory for each parameter; see `share_weights`."""
    from .packed_layers import PackedLayers  # imports vLLM

    packed, dtype = PackedLayers(engine), config.model_config.dtype
    views: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if is_wrapper(parameter) or parameter.is_meta:
            raise WeightSyncError(
                f"{name} is a {type(parameter).__name__} on {parameter.device}, expected a plain parameter in memory"
            )
        weight = tuple(parameter.shape), parameter.dtype
        try:
            with packed.as_loaded():
                pieces = trace_destinations(engine, {name: weight}, config=config.model_config.hf_config)[name]
                packed.require_known_layout(name, pieces)
            packed.require_unpacked(name, pieces)
            views[name] = _view(name, parameter, pieces)
        except WeightSyncError as error:
            if parameter.dtype != dtype:
                remedy = f"load the model in vLLM's dtype {dtype}, or vLLM in the model's (dtype=)"
            else:
                remedy = _OTHER_WAY
            raise WeightSyncError(f"{error}: {remedy}") from error
    for name, first in canonical_names(views).items():
        if name != first:
            raise WeightSyncError(
                f"{name} and {first} are one weight in vLLM, and two in the model: tie them, or {_OTHER_WAY}"
            )
    return views


def _view(name: str, parameter: Tensor, pieces: Sequence[Destination]) -> Tensor:
    if len(pieces) != 1 or pieces[0].tensor.shape != matrix_shape(parameter.shape):
        found = [list(piece.tensor.shape) for piece in pieces]
        where = f"in parts of {found}" if found else "nowhere"
        raise WeightSyncError(f"{name} of shape {list(parameter.shape)} is stored {where} by vLLM, expected as a whole")
    tensor = pieces[0].tensor.detach()
    if not tensor.is_contiguous():
        raise WeightSyncError(
            f"{name} of shape {list(parameter.shape)} is stored with strides {list(tensor.stride())} by vLLM, expected "
            "contiguous rows"
        )
    # A storage of its own over the same memory. With the storage of a fused tensor, save_pretrained would copy every
    # view of it and torch.save write all of it. Besides, vLLM's tensor may be one of inference mode.
    return torch.from_dlpack(tensor).view(parameter.shape)
