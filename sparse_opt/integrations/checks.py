"""Checks that refuse trainer settings that do not work with SparseAdamW, each with the reason and an alternative."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from inspect import BoundArguments, Parameter
from typing import Any

import torch
from torch import nn

from .. import quantised_layers
from ..errors import ConfigError
from ..masks.mask_set import MaskSet
from .arguments import SparseArguments

_ADAMW = ("adamw_torch", "adamw_torch_fused")


def of_call(bound: inspect.BoundArguments) -> None:
    """Check the arguments of the trainer's constructor before it runs.

    Raises:
        ConfigError: the caller passes an optimizer, a scheduler, a PEFT adapter or a quantization_config.
    """
    given = named(bound)
    optimizer, scheduler = given.get("optimizers") or (None, None)
    if optimizer is not None or given.get("optimizer_cls_and_kwargs") is not None:
        raise ConfigError(
            "found an optimizer; sparse_trainer creates it: pass neither optimizers nor optimizer_cls_and_kwargs"
        )
    if scheduler is not None:
        raise ConfigError(
            "the scheduler in optimizers is bound to another optimizer: set lr_scheduler_type, or override "
            "create_scheduler"
        )
    if given.get("peft_config") is not None:
        raise ConfigError(
            "peft_config trains an adapter, but a mask selects the model's own weights: use only one of the two"
        )
    if given.get("quantization_config") is not None:
        raise ConfigError(
            "quantization_config needs an adapter in TRL: load the model with it, and pass the model "
            "(AutoModelForCausalLM.from_pretrained(..., quantization_config=...))"
        )
    of_model(given.get("model"))


def of_model(model: Any) -> None:
    """Check that the model's own, whole weights are trained, which a mask requires.

    Raises:
        ConfigError: the model is a PEFT model, or transformers has sharded it.
    """
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"the model is a {type(model).__name__} with a PEFT adapter, but a mask selects the model's own weights: "
            "pass model.merge_and_unload().requires_grad_(True)"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError("the model is sharded over devices (distributed_config): load a whole copy on each device")


def of_frozen_parameters(model: nn.Module, mask: MaskSet) -> None:
    """Raise a ConfigError if the mask has active elements in a parameter that does not require grad."""
    quantised = quantised_layers.find(model)  # their active weights are parameters of the optimizer
    for name, param in quantised_layers.named_parameters(model):
        if not param.requires_grad and name not in quantised and name in mask and mask[name].numel():
            raise ConfigError(
                f"the mask has {mask[name].numel():,} active elements in {name!r}, which does not require grad: call "
                "requires_grad_(True) on it, or make the mask without it (exclude=)"
            )


def of_callbacks(callbacks: Iterable[Any]) -> None:
    """Raise a ConfigError if TRL's SyncRefModelCallback would update a reference that is the base weights."""
    for callback in callbacks:
        if type(callback).__name__ == "SyncRefModelCallback" and not any(True for _ in callback.ref_model.parameters()):
            raise ConfigError(
                "SyncRefModelCallback updates the reference, but base weights are constant: leave it out, or pass a "
                "ref_model to DPO"
            )


def of_accelerator(accelerator: Any, args: Any, options: SparseArguments) -> None:
    """Check that accelerate leaves gradients and weights where the optimizer can access them.

    Raises:
        ConfigError: the run uses DeepSpeed, FSDP 1, Megatron-LM, XLA, DataParallel, or another parallelism than that of
            data; FSDP2 with dense gradients, full checkpoints or `load_best_model_at_end`; or a GradScaler with compact
            gradients and without `amp_scaling`.
    """
    kind = str(accelerator.distributed_type.value)
    if kind == "FSDP" and accelerator.is_fsdp2:
        _of_fsdp2(accelerator.state.fsdp_plugin, args, options)
    elif kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise ConfigError(
            f"{kind} keeps weights and gradients in its own buffers, to which a mask cannot be applied: use "
            "`accelerate launch --multi_gpu` with the whole model in each process, or FSDP2 (fsdp_version: 2)"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ConfigError("parallelism_config has tensor, context or sequence parallelism; use data parallelism only")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process use DataParallel: start with `accelerate launch`, or make one GPU "
            "visible with "
            "CUDA_VISIBLE_DEVICES"
        )
    if accelerator.mixed_precision == "fp16" and options.grads == "compact" and not options.amp_scaling:
        raise ConfigError(
            "the GradScaler of fp16 mixed precision does not handle compact gradients: use "
            "SparseArguments(amp_scaling=True), grads='dense', or bf16"
        )


def _of_fsdp2(plugin: Any, args: Any, options: SparseArguments) -> None:
    if options.vllm_weights != "full":
        raise ConfigError(f"vllm_weights is {options.vllm_weights!r}, expected 'full' with FSDP2")
    if options.grads != "compact":
        raise ConfigError(f"grads is {options.grads!r}, expected 'compact' with FSDP2")
    if options.save_delta:
        raise ConfigError("save_delta is True, expected False with FSDP2: compare the saved checkpoints (delta diff)")
    # transformers looks for the best checkpoint's folder on each process, before all of its sharded files are written.
    if args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end is True, expected False with FSDP2: transformers' processes may disagree on which "
            "sharded checkpoint is the best, and then wait for each other"
        )
    if _value(args.save_strategy) != "no" and not args.save_only_model:
        kind = plugin.state_dict_type.name
        if kind != "SHARDED_STATE_DICT":
            raise ConfigError(
                f"fsdp_state_dict_type is {kind}, expected SHARDED_STATE_DICT: torch does not gather states of "
                "different lengths"
            )


def of_arguments(args: Any, options: SparseArguments, model: nn.Module) -> None:
    """Check for training arguments that would not have their documented effect.

    Raises:
        ConfigError: another optimizer is selected; an option casts the trained weights in place; an option restarts the
            run, which a delta log does not support; or loads weights, which are not saved.
    """
    if args.optim not in _ADAMW:
        raise ConfigError(
            f"optim is {_value(args.optim)!r}, expected {' or '.join(_ADAMW)}, which SparseAdamW replaces"
        )
    if args.auto_find_batch_size and options.delta_log_dir is not None:
        raise ConfigError(
            "auto_find_batch_size restarts the run, which a delta log does not support: set only one of the two"
        )
    if args.load_best_model_at_end and not options.save_weights:
        raise ConfigError("load_best_model_at_end is True, expected False with save_weights=False")
    for option, dtype in (("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)):
        if getattr(args, option):
            _refuse_cast(model, dtype, f"{option}=True", f"load the model in {dtype}, or leave it out")
    # With this option, generation in TRL's GRPO starts with `model.to(...)`, and nothing casts the weights back.
    if getattr(args, "use_transformers_continuous_batching", False):
        what = "use_transformers_continuous_batching=True"
        if args.cast_lm_head_to_fp32:
            raise ConfigError(f"{what} casts an fp32 lm_head to 16 bits and back: set cast_lm_head_to_fp32=False")
        if args.bf16 or args.fp16:
            dtype = torch.bfloat16 if args.bf16 else torch.float16
            _refuse_cast(model, dtype, what, f"load the model in {dtype} (model_init_kwargs), or use vLLM")


def of_quantised(args: Any, options: SparseArguments, model: nn.Module) -> None:
    """Check for options that would read the trained weights of a model with a quantised base from the model.

    Raises:
        ConfigError: an option logs, sends or loads them; the message names it.
    """
    name = next(iter(quantised_layers.find(model)), None)
    if name is None:
        return
    found = {
        "delta_log_dir": options.delta_log_dir is not None,
        "use_vllm": bool(getattr(args, "use_vllm", False)),
        "load_best_model_at_end": args.load_best_model_at_end,
    }
    for option, is_set in found.items():
        if is_set:
            raise ConfigError(
                f"{option} is set, and {name!r} is quantised: a checkpoint has the merged weights, and only its "
                "optimizer state the trained weights over the quantised base; leave the option out"
            )


def of_vllm(args: Any, options: SparseArguments) -> None:
    """Check that the trainer's arguments allow these with another `vllm_weights` than "full".

    Raises:
        ConfigError: vLLM is not used, or has tensor parallelism in the trainer's process, or sleeps there without
            sharing its weights; or the arguments of a run contradict each other.
    """
    way, found = options.vllm_weights, None
    if not getattr(args, "use_vllm", False):
        found = "use_vllm is False, expected True"
    elif args.vllm_mode not in ("colocate", "server"):
        found = f"vllm_mode is {args.vllm_mode!r}, expected 'colocate' or 'server'"
    elif way == "shared" and args.vllm_mode == "server":
        raise ConfigError("vllm_weights is 'shared', and vllm_mode is 'server', expected 'colocate': or set 'sparse'")
    elif way == "sparse" and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode:
        found = "vllm_enable_sleep_mode is True, expected False: a sleeping vLLM discards the weights; or set 'shared'"
    elif args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size != 1:
        found = f"vllm_tensor_parallel_size is {args.vllm_tensor_parallel_size}, expected 1"
    if found is not None:
        raise ConfigError(f"vllm_weights is {way!r}, and {found}; or set vllm_weights='full'")
    if args.vllm_mode == "server" and options.vllm_options is not None:
        raise ConfigError("vllm_options has no effect with vllm_mode='server': start the server with these options")
    # TRL checks this only with use_vllm=True, and `trl.generation.without_vllm` calls its constructor with False.
    modes = ("token_truncate", "token_mask")
    corrects = args.loss_type == "vespo" and args.vllm_importance_sampling_correction
    if corrects and args.vllm_importance_sampling_mode not in modes:
        raise ConfigError(
            f"loss_type is 'vespo', and vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}, "
            f"expected {' or '.join(map(repr, modes))}"
        )


def _refuse_cast(model: nn.Module, dtype: torch.dtype, what: str, instead: str) -> None:
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype != dtype:
            raise ConfigError(
                f"{what} casts the trained weights to {dtype} in place, and {name} is {param.dtype}: {instead}"
            )


def _value(option: Any) -> Any:
    return getattr(option, "value", option)


def named(bound: BoundArguments) -> dict[str, Any]:
    """The named arguments of the call, including those in `**kwargs` but not those in `*args`."""
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is Parameter.VAR_KEYWORD:
            found |= value
        elif kind is not Parameter.VAR_POSITIONAL:
            found[name] = value
    return found


def set_named(bound: BoundArguments, name: str, value: Any) -> None:
    """Set an argument of the call: a parameter if there is one of that name, else an entry of `**kwargs`."""
    parameters = bound.signature.parameters
    if name in parameters:
        bound.arguments[name] = value
    else:
        rest = next(p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD)
        bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
