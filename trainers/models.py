"""Models of the loops: device, loading, attention without masks, compiled layers, and adapters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt import quantised_layers
from sparse_opt.errors import ConfigError
from sparse_opt.optim.gradients import tile_compiler

from .pretrained import load_causal_lm

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# torch's attention, registered under another name so that `_mask` makes its masks.
SKIPPABLE_ATTENTION = "sparse_opt_sdpa"
# Models whose layers attend to all previous tokens, unless a window is set.
_CAUSAL_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")


def load_model(source: str | Path, device: torch.device, dtype: str, *, gradient_checkpointing: bool = False) -> Any:
    """A causal language model to train, by hub name or local folder, in `dtype`, a key of `DTYPES`.

    Dropout is disabled, because policy and reference must give the same log-probabilities for the same weights. The
    model is nevertheless in train mode, because transformers checkpoints activations only then.

    Raises:
        DataError: see `pretrained.load_pretrained`.
    """
    model = load_causal_lm(source, DTYPES[dtype])
    disable_dropout(model)
    model.to(device).train()
    make_masks_skippable(model)
    if gradient_checkpointing:
        # transformers 5.23 renamed the method and warns under the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


_skipping = ContextVar("skipping", default=False)  # of each thread


def make_masks_skippable(model: Any) -> bool:
    """Enable `skip_padding_masks` for a causal model; return whether it is supported.

    Supported are models of `_CAUSAL_MODELS` without a window that use torch's attention; others are not changed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in _CAUSAL_MODELS or windowed or kinds != {"full_attention"}:
        return False
    if config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(SKIPPABLE_ATTENTION, _attention)
    AttentionMaskInterface.register(SKIPPABLE_ATTENTION, _mask)
    model.set_attn_implementation(SKIPPABLE_ATTENTION)
    return True


def attends_without_masks(model: Any) -> bool:
    """Whether `make_masks_skippable` supported the model."""
    found: bool = causal_lm(model).config._attn_implementation == SKIPPABLE_ATTENTION
    return found


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """torch's attention, or that of the `branch_layout` with which the model was called."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layout = kwargs.pop("branch_layout", None)  # of `shared_prompts`
    if layout is not None:
        return layout.attend(query, key, value, kwargs.get("scaling")), None
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers makes for torch's attention, or None for causal attention over all tokens."""
    from transformers.masking_utils import sdpa_mask

    # A compiled function would keep the behaviour at its compilation. The mask of packed sequences is always made,
    # because transformers marks it as different from causal attention over all tokens.
    if not torch.compiler.is_compiling() and _skipping.get() and kwargs.get("allow_is_causal_skip", True):
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


@contextmanager
def skip_padding_masks() -> Iterator[None]:
    """A context in which models of `make_masks_skippable` attend without a mask, in this thread; for right-padded
    input.

    With causal attention no token attends to padding on its right. transformers makes a mask anyway, and synchronizes
    with the GPU once per forward pass to decide whether it is needed; with a mask, attention cannot use its fastest
    kernels. Left-padded input, and a cache longer than its tokens, need their masks. Packed sequences get a mask from
    their position ids.
    """
    before = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(before)


def causal_lm(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, whose layers include the adapters; any other model itself.

    The `generate` of the PEFT wrapper would leave an attribute on the wrapped model.
    """
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def compile_layers(model: nn.Module) -> None:
    """`torch.compile` each layer of a model in place (regional compilation): layers of one class share code.

    The modules next to the layers that have no matrix, such as the last norm and the rotary embedding, are compiled
    too: eagerly they are dozens of small kernels. Names in the state dict are unchanged. Copies of the model are not
    compiled. See `compile_layer`.

    Raises:
        ConfigError: the model has no list of layers of one class.
    """
    lists = list(_layer_lists(model))
    if not lists:
        raise ConfigError(f"option 'compile': {type(model).__name__} has no list of layers of one class")
    for layers in lists:
        for layer in layers:
            compile_layer(layer)
    for module in _outside_layers(model):
        module.compile(backend=tile_compiler.inductor)


def compile_layer(layer: nn.Module) -> None:
    """`torch.compile` a layer in place. If its activations are checkpointed, its compiled code recomputes them.

    `torch.utils.checkpoint` around a compiled layer runs its whole forward pass again. Compiled code that keeps only
    its inputs computes again what its gradients need: not the layer's last product, whose output no gradient needs.
    Where torch.compile runs the layer eagerly with gradients, activations are kept. Dropout is refused. A layer with
    quantised weights, at each of which its graph breaks, stays in `torch.utils.checkpoint`: its parts would keep them.
    """
    checkpointed = getattr(layer, "gradient_checkpointing", False)  # of transformers' layers
    if checkpointed and not quantised_layers.find(layer):
        layer.gradient_checkpointing = False  # type: ignore[assignment]
        layer.compile(backend=_recomputing_inductor)
    else:
        layer.compile(backend=tile_compiler.inductor)


# One function for all layers, so that they share compiled code.
_recomputing_inductor = functools.partial(tile_compiler.inductor, recompute=True)


def has_compiled_layers(model: nn.Module) -> bool:
    """Whether the model's layers are compiled, as by `compile_layers`."""
    layers = next(_layer_lists(model), None)
    return layers is not None and layers[0]._compiled_call_impl is not None


def _layer_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Lists of at least two modules of one class, outer ones first."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(layer) for layer in module}) == 1:
            yield module


def _outside_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules next to the outermost lists of layers that have neither modules nor matrices, except dropout."""
    outermost, inside = set[nn.Module](), set[nn.Module]()
    for layers in _layer_lists(model):
        if layers not in inside:
            outermost.add(layers)
            inside.update(layers.modules())
    for parent in model.modules():
        children = list(parent.children())
        if outermost.isdisjoint(children):
            continue
        for child in children:
            is_small = not list(child.children()) and all(param.ndim < 2 for param in child.parameters())
            if is_small and not isinstance(child, nn.Dropout):
                yield child


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in dropout modules and in the attributes of attention and layers.

    The model's config, and so the output of `save_pretrained`, is unchanged.
    """
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
                setattr(module, name, 0.0)


# Adapters


def add_lora(model: Any, rank: int) -> Any:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) on all linear layers but the output layer, the rest frozen.

    They are added to `model` itself and have its dtype. At first they change nothing. Alpha is twice the rank.

    Returns:
        The model in a PEFT wrapper, whose `disable_adapter()` restores the initial weights.

    Raises:
        ConfigError: peft is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"LoRA needs peft, which cannot be imported ({error}): pip install peft") from error

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)
