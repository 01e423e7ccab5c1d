"""The example scripts: verl's own configuration takes their overrides, and the engine what comes of them."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="needs verl: make test-verl")

import verl_lab
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.integrations.verl import SparseFSDPEngineConfig
from sparse_opt.integrations.verl.options import build_optimizer, require_supported

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def model(tmp_path):
    return verl_lab.save_model(tmp_path / "model")


@pytest.fixture
def mask(model, tmp_path):
    return MaskSet.random(weights(model), density=0.2, seed=1).save(tmp_path / "mask.safetensors")


def weights(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model)


def started(script: str, arguments: list[str], tmp_path: Path) -> tuple[dict[str, str], list[str]]:
    """Run an example, and return the environment and the words of the command that it starts.

    The first programs of these names on the PATH write them to a file, and end.
    """
    programs, seen = tmp_path / "programs", tmp_path / "seen"
    programs.mkdir()
    for name in ("python3", "torchrun"):
        program = programs / name
        program.write_text(f"#!/bin/sh\nenv -0 > {seen}.environment\nprintf '%s\\0' \"$@\" > {seen}.words\n")
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "GPUS": "4"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    subprocess.run(["bash", str(EXAMPLES / script), *arguments], env=environment, check=True, timeout=60)
    pairs = Path(f"{seen}.environment").read_text().split("\0")[:-1]
    words = Path(f"{seen}.words").read_text().split("\0")[:-1]
    return dict(pair.split("=", 1) for pair in pairs), words


def composed(name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides)


def test_grpo(model, mask, tmp_path):
    files = [str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")]
    environment, words = started("verl_grpo.sh", [str(model), *files, str(mask), "trainer.save_freq=7"], tmp_path)
    assert environment["VERL_USE_EXTERNAL_MODULES"] == "sparse_opt.integrations.verl"
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    config = composed("ppo_trainer", words[2:])
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert [config.data.train_files, config.data.val_files] == files
    assert (config.trainer.n_gpus_per_node, config.trainer.save_freq) == (4, 7)
    assert need_reference_policy(config) and not need_critic(config)
    worker = config.actor_rollout_ref
    # With which verl computes the reference in the actor, and expects no adapters.
    assert worker.model.lora_rank > 0 and worker.model.lora.merge
    assert worker.model.path == str(model)
    omega_conf_to_dataclass(worker.rollout)
    actor = omega_conf_to_dataclass(worker.actor)
    assert actor.engine.strategy == "sparse_fsdp2"
    require_supported(actor.engine)
    optimizer = build_optimizer(weights(model), actor.optim)
    assert isinstance(optimizer, SparseAdamW) and optimizer.mask.digest == MaskSet.load(mask).digest
    assert optimizer.param_groups[0]["lr"] == 1e-6


def test_sft(model, mask, tmp_path):
    train = str(tmp_path / "train.parquet")
    environment, words = started("verl_sft.sh", [str(model), train, str(mask), "optim.weight_decay=0.5"], tmp_path)
    assert environment["VERL_USE_EXTERNAL_MODULES"] == "sparse_opt.integrations.verl"
    module = words.index("-m")
    assert words[:module] == ["--standalone", "--nproc_per_node=4"] and words[module + 1] == "verl.trainer.sft_trainer"
    config = composed("sft_trainer_engine", words[module + 2 :])
    assert config.data.train_files == train
    assert config.model.path == str(model)
    engine = omega_conf_to_dataclass(config.engine)
    assert isinstance(engine, SparseFSDPEngineConfig) and engine.strategy == "sparse_fsdp2"
    require_supported(engine)
    optimizer = build_optimizer(weights(model), omega_conf_to_dataclass(config.optim))
    assert isinstance(optimizer, SparseAdamW) and optimizer.mask.digest == MaskSet.load(mask).digest
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (1e-5, 0.5)


def test_the_options_of_the_checkpoint_engine_in_the_docs(model):
    page = (EXAMPLES.parent / "docs" / "verl.md").read_text()
    section = page[page.index("### The checkpoint engine") :]
    words = section.split("```")[1].removeprefix("bash").replace("\\\n", " ").replace("...", "").split()
    actor = ["actor_rollout_ref.actor.strategy=sparse_fsdp2", f"actor_rollout_ref.model.path={model}"]
    config = composed("ppo_trainer", [*actor, "actor_rollout_ref.rollout.name=vllm", *words])
    assert config.trainer.v1.trainer_mode == "separate_async" and not config.actor_rollout_ref.hybrid_engine
    assert config.algorithm.rollout_correction.bypass_mode
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.checkpoint_engine.backend == "sparse_opt" and not rollout.free_cache_engine
