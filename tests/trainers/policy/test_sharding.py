"""What `shard` refuses; tests of several ranks are in test_distributed_fsdp.py."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, JambaConfig

from sparse_opt.errors import ConfigError
from sparse_opt.trainers.policy.sharding import shard


def test_layers_of_several_classes_are_refused():
    config = JambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_experts=2,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="the 4 decoder layers of JambaForCausalLM are of more than one class"):
        shard(model, torch.device("cpu"))
