"""The reference policy in every mode: the start weights, whatever training has done since, or another model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_opt.errors import DataError
from sparse_opt.optim.signals import UninterruptedContext
from sparse_opt.trainers.data.encoding import TokenSequence, collate
from sparse_opt.trainers.dpo import DPOConfig
from sparse_opt.trainers.policy.logprobs import completion_logprobs
from sparse_opt.trainers.policy.models import load_policy
from sparse_opt.trainers.policy.optimizers import adapt, make_optimizer
from sparse_opt.trainers.policy.reference import make_reference, on_device

BATCH = collate([TokenSequence(list(range(3, 30)), 4), TokenSequence(list(range(50, 60)), 4)], pad_id=0)
CPU = torch.device("cpu")


def trained_a_little(config):
    """(policy, reference, log-probabilities at the start): after three steps of training."""
    model = adapt(config, load_policy(config, CPU))
    optimizer = make_optimizer(config, model)
    with torch.no_grad():
        start = completion_logprobs(model, BATCH)
    reference = make_reference(config, model, optimizer, CPU)
    for _ in range(3):
        (-completion_logprobs(model, BATCH).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, reference, start


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_the_start_and_the_policy_comes_back(dpo_options, mask_file, mode, dtype):
    config = dpo_options(mode=mode, mask=mask_file if mode == "sparse" else None, dtype=dtype, learning_rate=1e-2)
    model, reference, start = trained_a_little(config)
    with torch.no_grad():
        trained = completion_logprobs(model, BATCH)
    assert not torch.equal(trained, start)
    with torch.no_grad(), reference.weights():
        assert torch.equal(completion_logprobs(reference.model, BATCH), start)
    with torch.no_grad():
        assert torch.equal(completion_logprobs(model, BATCH), trained)
    # A context manager of the trainers' around it could be interrupted where this one can't.
    assert isinstance(reference.weights(), UninterruptedContext) == (mode == "sparse")


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_another_model_as_the_reference(dpo_options, mask_file, model, tokenizer, tmp_path, mode):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "other")
    config = dpo_options(
        mode=mode, mask=mask_file if mode == "sparse" else None, ref_name=str(tmp_path / "other"), learning_rate=1e-2
    )
    _, reference, _ = trained_a_little(config)
    with torch.no_grad():
        expected = completion_logprobs(model, BATCH)
    with torch.no_grad(), reference.weights():
        assert torch.equal(completion_logprobs(reference.model, BATCH), expected)


def test_a_reference_that_is_missing_is_named(dpo_options, tmp_path):
    config = dpo_options(ref_name=str(tmp_path / "nowhere"))
    model = load_policy(config, CPU)
    with pytest.raises(DataError, match="cannot load a causal language model from .*nowhere"):
        make_reference(config, model, make_optimizer(config, model), CPU)


@pytest.mark.gpu
def test_offloading_keeps_the_values_on_a_gpu(dpo_options):
    cuda = torch.device("cuda")
    config = dataclasses.replace(dpo_options(), device="cuda")
    model = load_policy(config, cuda)
    with torch.no_grad():
        start = completion_logprobs(model, BATCH.to(cuda))
    reference = make_reference(config, model, make_optimizer(config, model), cuda, offload=True)
    for _ in range(2):
        with torch.no_grad(), reference.weights():
            assert {parameter.device.type for parameter in reference.model.parameters()} == {"cuda"}
            assert torch.equal(completion_logprobs(reference.model, BATCH.to(cuda)), start)
        assert {parameter.device.type for parameter in reference.model.parameters()} == {"cpu"}


def test_on_device_comes_back_after_an_exception():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="inside"), on_device(model, CPU):
        raise ValueError("inside")
    assert model.weight.device == CPU


def test_lora_ends_as_a_plain_model_with_its_adapters_next_to_it(dpo_options, model_folder, tmp_path):
    from peft import PeftModel

    from sparse_opt.trainers import dpo

    summary = dpo.train(dpo_options(mode="lora", lora_rank=4, learning_rate=1e-2, delta_log_dir=tmp_path / "log"))
    merged = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    start = AutoModelForCausalLM.from_pretrained(model_folder)
    assert merged.state_dict().keys() == start.state_dict().keys()
    adapted = PeftModel.from_pretrained(start, tmp_path / "run" / "adapter").eval()
    with torch.no_grad():
        one, two = completion_logprobs(merged.eval(), BATCH), completion_logprobs(adapted, BATCH)
    # The product of the adapters is added to the weight before or after the product with the input: sums of 64 fp32
    # terms in another order, over 26 tokens.
    assert torch.allclose(one, two, rtol=2**-23 * 64 * 2, atol=1e-4)
    # What is logged is what training changes: the adapters.
    from sparse_opt.delta.log import DeltaLog

    assert all("lora_" in name for name in DeltaLog.open(tmp_path / "log").layout.names)


@pytest.mark.parametrize(
    ("algorithm", "output", "log"),
    [
        ("dpo", "checkpoints_tiny_llama_dpo", "delta_logs_tiny_llama"),
        ("grpo", "checkpoints_tiny_llama_grpo", "delta_logs_tiny_llama_grpo"),
    ],
)
def test_folders_named_by_default_and_under_the_mount(dpo_options, tmp_path, algorithm, output, log):
    from sparse_opt.trainers.run.run_files import delta_log_folder, output_folder

    config: DPOConfig = dpo_options(output_dir=None, delta_log_dir=Path("auto"))
    assert str(output_folder(config, algorithm)) == output
    assert str(delta_log_folder(config, algorithm)) == log
    config.mount_dir = tmp_path
    assert output_folder(config, algorithm) == tmp_path / output
    assert delta_log_folder(config, algorithm) == tmp_path / log
    config.output_dir = Path("elsewhere")
    assert output_folder(config, algorithm) == tmp_path / "elsewhere"
    assert delta_log_folder(config, algorithm) == tmp_path / "elsewhere" / "delta_log"
