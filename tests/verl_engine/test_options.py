"""The engine's options as verl's users write them, and what is refused."""

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="needs verl: make test-verl")

import verl_lab  # noqa: F401  # registers the engine
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

from sparse_opt import SparseAdamW, SparseLion, SparseSGD
from sparse_opt.errors import ConfigError, MaskError
from sparse_opt.integrations.verl.options import build_optimizer, require_supported


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


def optim(**options: Any) -> FSDPOptimizerConfig:
    override = options.pop("override", {"mask_density": 0.5})
    return FSDPOptimizerConfig(lr=1e-3, override_optimizer_config=override, **options)


def test_the_checkpoint_engines_overrides_find_its_class():
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs
    from verl.workers.rollout.sglang_rollout.delta_loader import LOADER_FQN

    rollout = "actor_rollout_ref.rollout"
    words = [
        f"{rollout}.checkpoint_engine.backend=sparse_opt",
        f"{rollout}.checkpoint_engine.custom_backend_module=sparse_opt.integrations.verl.checkpoint_engine",
        f"+{rollout}.checkpoint_engine.engine_kwargs.sparse_opt.timeout=60",
        # What verl sets itself for delta_sharded, so that the inference engine takes changes.
        f"+{rollout}.engine_kwargs.vllm.weight_transfer_config.backend=verl_delta_ipc",
        f"+{rollout}.engine_kwargs.sglang.custom_weight_loader=[{LOADER_FQN}]",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*words, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"])
    found = config.actor_rollout_ref.rollout
    assert found.engine_kwargs.vllm.weight_transfer_config.backend == "verl_delta_ipc"
    assert found.engine_kwargs.sglang.custom_weight_loader == [LOADER_FQN]
    options = omega_conf_to_dataclass(found.checkpoint_engine)
    import_external_libs(options.custom_backend_module)
    size = options.update_weights_bucket_megabytes << 20
    made = CheckpointEngineRegistry.new(
        options.backend, bucket_size=size, is_master=True, **options.engine_kwargs["sparse_opt"]
    )
    # How verl's CheckpointEngineWorker tells the rollout's adapter what comes.
    assert made.wire_format == "delta_flush" and made.prepare().address


@pytest.mark.parametrize(
    ("name", "kind"), [("AdamW", SparseAdamW), ("SparseLion", SparseLion), ("SGD", SparseSGD), ("Lion", SparseLion)]
)
def test_optimizers_by_name(name, kind, model):
    override = {"mask_density": 0.5, "state_dtype": "bfloat16"}
    optimizer = build_optimizer(model, optim(optimizer=name, betas=(0.8, 0.9), override=override))
    assert type(optimizer) is kind and optimizer.state_dtype == torch.bfloat16
    if kind is SparseAdamW:
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"override": None}, "needs either override_optimizer_config.mask"),
        ({"override": {"mask": "m", "mask_seed": 1}}, "mask_seed has no effect"),
        ({"override": {"mask_density": 0.5, "fused": True}}, "fused is not an option: expected mask"),
        ({"override": {"mask_density": 0.5, "state_dtype": "half-ish"}}, "half-ish"),
        ({"optimizer": "Adafactor"}, "Adafactor, expected one of AdamW, Lion, SGD"),
    ],
)
def test_wrong_options_of_the_optimizer(options, message, model):
    with pytest.raises((ConfigError, MaskError), match=message):
        build_optimizer(model, optim(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"param_offload": True},
        {"optimizer_offload": True},
        {"offload_policy": True},
        {"mixed_precision": {"param_dtype": "fp16"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_unsupported_options_of_the_engine(options):
    require_supported(FSDPEngineConfig())
    with pytest.raises(ConfigError, match=next(iter(options))):
        require_supported(FSDPEngineConfig(**options))
