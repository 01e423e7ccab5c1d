"""Models for tests of rollouts, what they write by hand, and everything that generating may not change."""

from __future__ import annotations

import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

CONFIGS = {"gpt2": GPT2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}


def with_lora(model):
    """The model in peft's wrapper, with an adapter that changes what it writes."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return wrapped


@torch.no_grad()
def plain_table(model, ids, temperature=1.0):
    """log_softmax(logits / temperature) at each position of one sequence, without padding or cache: [T, V] fp32."""
    return (
        model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].float() / temperature
    ).log_softmax(-1)


def greedy_by_hand(model, prompt, n):
    """The `n` most likely tokens one after the other, each from a whole forward pass."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(plain_table(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def snapshot(model):
    """Weights to the bit, dtypes, what is trained, modes, hooks, configuration and attributes, to compare with ==."""
    own = {}
    for name, module in model.named_modules():
        hooks = [getattr(module, kind) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        own[name] = (module.training, [list(kind) for kind in hooks], sorted(vars(module)))
    tensors = {
        name: (tensor.dtype, tensor.requires_grad, tensor.data_ptr(), tensor.detach().view(torch.uint8).tolist())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.dim()
    }
    config = model.config
    return own, tensors, config.to_dict(), config._attn_implementation, id(model.generation_config)
