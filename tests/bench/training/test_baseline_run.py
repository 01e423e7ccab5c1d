"""What a mode of the end-to-end benchmark trains, in this process and on a CPU."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt import MaskSet
from sparse_opt.bench.models import (
    make_checkpoint,
    preference_pairs,
    without_weights,
    word_tokenizer,
    words_config,
    write_pairs,
)
from sparse_opt.bench.training.baseline import run as baseline_run
from sparse_opt.bench.training.baseline.modes import Job, held_bytes, make_policy, missing_package, n_trained, prepare
from sparse_opt.bench.training.baseline.results import FIRST_LOSS_ATOL, wrong_results
from sparse_opt.bench.training.baseline.run import covered, even_share, run
from sparse_opt.trainers import graphs
from sparse_opt.trainers.batches import TokenSequence, collate
from sparse_opt.trainers.console import StepTimer
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.models import load_model
from sparse_opt.trainers.shared_prompts import Pieces

MODES = ("dense", "adamw8bit", "galore", "sparse", "lora", "qlora", "shira")
OF_GRPO = tuple(mode for mode in MODES if mode != "qlora")  # bitsandbytes' 4-bit inference on a CPU needs other sizes


def need_packages(*modes: str) -> None:
    if error := missing_package(modes):
        pytest.skip(error)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    """DPO, sparse, on a small model, with steps large enough to show in bf16."""
    folder = tmp_path_factory.mktemp("baseline")
    config = words_config("tiny", 24)
    make_checkpoint(folder / "model", config, seed=0, device=torch.device("cpu"))
    MaskSet.random(without_weights(config), density=0.1, seed=0).save(folder / "mask.safetensors")
    write_pairs(folder / "pairs.jsonl", preference_pairs(6, 24, seed=0))
    return Job(
        algorithm="dpo",
        mode="sparse",
        model_name=str(folder / "model"),
        dataset=str(folder / "pairs.jsonl"),
        mask=str(folder / "mask.safetensors"),
        sequence_length=24,
        n_generations=3,
        max_new_tokens=8,
        n_steps=3,
        batch_size=2,
        learning_rate=1e-3,
        lora_rank=4,
        shira_rank=4,
        gradient_checkpointing=False,
        compile=False,
        kernel_time=False,
        device="cpu",
        seed=0,
    )


def changed(job: Job, **changes) -> Job:
    return dataclasses.replace(job, **changes)


def test_pairs_have_exactly_the_length_asked_for():
    tokenizer = word_tokenizer()
    for n_prompt in (8, 40):
        pairs = preference_pairs(5, 64, seed=1, n_prompt=n_prompt)
        assert len({pair["chosen"] for pair in pairs} | {pair["rejected"] for pair in pairs}) == 10
        for pair in pairs:
            prompt = tokenizer(pair["prompt"])["input_ids"]
            assert len(prompt) == n_prompt
            for completion in (pair["chosen"], pair["rejected"]):
                ids = tokenizer(pair["prompt"] + completion)["input_ids"]
                assert len(ids) + 1 == 64  # the trainer adds the EOS
                assert ids[: len(prompt)] == prompt
                assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_all_modes_begin_as_they_must_and_see_the_same_data(job, algorithm):
    modes = [mode for mode in (OF_GRPO if algorithm == "grpo" else MODES) if not missing_package([mode])]
    results = {mode: run(changed(job, mode=mode, algorithm=algorithm)) for mode in modes}
    assert wrong_results(algorithm, list(results.values())) == []
    assert len({result["data_digest"] for result in results.values()}) == 1
    if algorithm == "dpo":
        for result in results.values():
            losses = [step["loss"] for step in result["steps"]]
            assert losses[0] == pytest.approx(math.log(2), abs=FIRST_LOSS_ATOL)
            assert losses[1] != losses[0] or losses[2] != losses[0]  # it trains
    else:
        for result in results.values():
            assert all(step["ratio_error"] <= 1e-3 for step in result["steps"])  # one update a rollout
            assert result["steps"][2]["k3"] > 0  # the policy has left its reference


@pytest.fixture(scope="module")
def tile_masks(tmp_path_factory) -> dict[str, str]:
    """A row or column of tiles of every feed-forward matrix, and the same elements in a mask without a tile pattern."""
    folder = tmp_path_factory.mktemp("tile_masks")
    model = without_weights(words_config("tiny", 24))
    bools = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters() if ".mlp." in n}
    for name, active in bools.items():
        (active[:, 384:] if "down_proj" in name else active[384:]).fill_(True)
    tiles = MaskSet.from_bool(bools)
    assert tiles.pattern == "tile128"
    tiles.save(folder / "tiles.safetensors")
    MaskSet({name: tiles[name] for name in bools}, tiles.shapes).save(folder / "elements.safetensors")
    return {"tiles": str(folder / "tiles.safetensors"), "sparse": str(folder / "elements.safetensors")}


def test_grpo_with_shared_prompts_begins_with_the_same_gradient(job):
    separate, shared = (run(changed(job, algorithm="grpo", share_prompts=on, n_steps=1)) for on in (False, True))
    assert (separate["mode"], shared["mode"]) == ("sparse", "sparse, shared prompts")
    assert shared["steps"][0]["ratio_error"] <= 1e-3
    for name in ("loss", "grad_norm"):
        assert shared["steps"][0][name] == pytest.approx(separate["steps"][0][name], rel=2e-2, abs=1e-4), name


def test_graphs_get_what_ordinary_steps_get(job, monkeypatch):
    """On a CPU, with a stand-in that calls the function on copies of the inputs."""
    monkeypatch.setattr(baseline_run, "require_graphs", lambda *_, **__: None)
    monkeypatch.setattr(
        graphs, "GraphedStep", lambda function, _: lambda *inputs: function(*(tensor.clone() for tensor in inputs))
    )
    for changes in ({}, {"precomputed_reference": True}, {"share_prompts": True}):
        of_graphs, ordinary = (run(changed(job, cuda_graphs=on, **changes)) for on in (True, False))
        for step, other in zip(of_graphs["steps"], ordinary["steps"], strict=True):
            assert (step["loss"], step["grad_norm"]) == (other["loss"], other["grad_norm"])
        assert ordinary["steps"][0]["section_s"] and not of_graphs["steps"][0]["section_s"]
        assert wrong_results("dpo", [of_graphs]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("mode", ["sparse", "tiles"])
def test_replays_get_what_ordinary_steps_get(
    job, tile_masks, tmp_path, monkeypatch, mode, share_prompts, deterministic
):
    """With shared prompts, sequences are long enough that ordinary steps attend in separate rows too."""
    changes = {"mode": mode, "mask": tile_masks[mode], "n_steps": 7, "device": "cuda", "share_prompts": share_prompts}
    if share_prompts:
        write_pairs(tmp_path / "pairs.jsonl", preference_pairs(6, 64, seed=0))
        changes |= {"dataset": str(tmp_path / "pairs.jsonl"), "sequence_length": 64}
        monkeypatch.setattr(Pieces, "attend", lambda *_: pytest.fail("steps attended in pieces"))
    of_graphs, ordinary = (run(changed(job, cuda_graphs=on, **changes)) for on in (True, False))
    for step, other in zip(of_graphs["steps"], ordinary["steps"], strict=True):
        assert (step["loss"], step["grad_norm"]) == (other["loss"], other["grad_norm"])


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_tiles_train_as_their_elements_do(job, tile_masks, algorithm):
    tiles, sparse = (
        run(changed(job, mode=mode, mask=mask, algorithm=algorithm, n_steps=2)) for mode, mask in tile_masks.items()
    )
    assert (tiles["n_tiled"], sparse["n_tiled"]) == (6, 0)
    assert tiles["n_trained"] == sparse["n_trained"]
    assert wrong_results(algorithm, [tiles, sparse]) == []
    first = tiles["steps"][0], sparse["steps"][0]
    assert first[0]["loss"] == first[1]["loss"]
    # One sums a gradient in fp32 and rounds it to bf16, and so does the other, in another order: a unit in the last
    # place of each gradient, 2^-8 of it, bounds the norms' difference.
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=2**-8)


BATCH = collate([TokenSequence(list(range(3 + i, 20 + i)), 4) for i in range(4)], 0)


def take_steps(trained, n=2):
    step = baseline_run.dpo_steps(trained, [BATCH] * n, StepTimer(torch.device("cpu")).section)
    for i in range(n):
        step(i)


@pytest.mark.parametrize("mode", ["sparse", "lora", "shira"])
def test_the_mask_or_adapters_train_alone_and_the_reference_is_the_start(job, mode):
    need_packages(mode)
    policy = load_model(job.model_name, torch.device("cpu"), "bf16")
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    mask = MaskSet.load(job.mask, policy)
    with torch.no_grad():
        expected = token_logprobs(policy, BATCH)
    trained = prepare(changed(job, mode=mode), policy, mask if mode == "sparse" else None)
    assert trained.reference is policy
    take_steps(trained)
    after = {name.replace(".base_layer.", "."): parameter for name, parameter in policy.named_parameters()}
    moved = {name: (after[name] != value).view(-1) for name, value in before.items()}
    if mode == "sparse":
        assert sum(int(differs.sum()) for differs in moved.values()) > 0.1 * mask.nnz
        for name, indices in mask.indices.items():
            moved[name][indices.long()] = False
    else:
        assert n_trained(trained) == sum(after[name].numel() for name in after.keys() - before.keys())
        assert mode == "shira" or sum("lora_A" in name for name in after) == 2 * 7  # all linear layers but the last
        assert {parameter.dtype for parameter in after.values()} == {torch.bfloat16}
    assert not any(differs.any() for differs in moved.values())
    with torch.no_grad():
        assert not torch.equal(token_logprobs(policy, BATCH), expected)
        with trained.reference_weights():
            assert torch.equal(token_logprobs(policy, BATCH), expected)


def test_qlora_trains_bf16_adapters_on_a_quantized_base(job):
    need_packages("qlora")
    from bitsandbytes.nn import Linear4bit

    policy = load_model(job.model_name, torch.device("cpu"), "bf16")
    kept = {n: p.detach().clone() for n, p in policy.named_parameters() if "proj" not in n}  # norms and the embedding
    numel = sum(parameter.numel() for name, parameter in policy.named_parameters() if "proj" in name)
    job = changed(job, mode="qlora")
    policy = make_policy(job, torch.device("cpu"))
    trained = prepare(job, policy)
    layers = [layer.weight for layer in policy.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == 2 * 7 and all(weight.quant_state.nested for weight in layers)
    assert {weight.quant_state.quant_type for weight in layers} == {"nf4"}
    assert all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters() if parameter.requires_grad)
    assert sum(weight.nbytes for weight in layers) == numel // 2
    assert 0 < held_bytes(trained)["quantization"] < 0.03 * numel  # an 8-bit scale for 64 weights, and scales of those
    with torch.no_grad():
        before = token_logprobs(policy, BATCH)
    take_steps(trained)
    with torch.no_grad():
        assert not torch.equal(token_logprobs(policy, BATCH), before)
        with trained.reference_weights():
            assert torch.equal(token_logprobs(policy, BATCH), before)
    after = dict(policy.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in kept.items())


@pytest.mark.parametrize("mode", ["adamw8bit", "galore"])
def test_full_training_with_less_state_changes_all_weights_and_keeps_its_reference(job, mode):
    need_packages(mode)
    policy = load_model(job.model_name, torch.device("cpu"), "bf16")
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    trained = prepare(changed(job, mode=mode), policy)
    take_steps(trained, 1)
    names = [name for name in before if "layernorm" not in name and name != "model.norm.weight"]  # those are of 1s
    assert not any(torch.equal(policy.get_parameter(name), before[name]) for name in names)
    assert all(torch.equal(trained.reference.get_parameter(name), value) for name, value in before.items())
    held, numel = held_bytes(trained), sum(value.numel() for value in before.values())
    if mode == "adamw8bit":  # two moments of a byte, two fp32 scales for 256 of them, tables of 256 codes
        in_fp32 = sum(value.numel() for value in before.values() if value.numel() < 4096)
        tables = 2 * 4 * 256 * len(before)
        assert 2 * numel < held["state"] - 6 * in_fp32 < 2.04 * numel + tables
    else:  # rank 128 is more than these matrices have: projections are square
        smaller = [min(value.shape) for name, value in before.items() if "proj" in name]
        assert held["projections"] == sum(2 * side**2 for side in smaller)


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_shared_prompts_give_the_same_losses(job, mode):
    need_packages(mode)
    rows = [run(changed(job, mode=mode, share_prompts=flag)) for flag in (False, True)]
    assert [row["mode"] for row in rows] == [mode, f"{mode}, shared prompts"]
    assert rows[0]["data_digest"] == rows[1]["data_digest"]
    for separate, shared in zip(*(row["steps"] for row in rows), strict=True):
        # beta = 0.1 times sums of some 20 log-probabilities of about 8, whose bf16 logits round to 2^-8.
        assert shared["loss"] == pytest.approx(separate["loss"], abs=0.1 * 20 * 8 * 2**-8)
        assert shared["grad_norm"] == pytest.approx(separate["grad_norm"], rel=0.05)


def test_the_reward_counts_even_tokens_of_the_completion():
    batch = collate([TokenSequence([2, 2, 4, 5, 7], 2), TokenSequence([2, 6, 8], 1)], pad_id=0)
    assert even_share(batch).tolist() == pytest.approx([1 / 3, 1.0])


def test_kernels_that_overlap_count_once():
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (7.0, 8.0)]) == 6.0
