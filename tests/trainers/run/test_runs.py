"""Whole runs of dpo.train and sft.train on a CPU."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DataError, MaskError, SparseOptError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import dpo, sft
from sparse_opt.trainers.data.encoding import collate, load_examples
from sparse_opt.trainers.data.order import ShuffledOrder
from sparse_opt.trainers.policy.logprobs import completion_logprobs
from sparse_opt.trainers.policy.models import load_policy
from sparse_opt.trainers.policy.optimizers import make_optimizer

LN_2 = pytest.approx(math.log(2), abs=2**-24)
TIMES = {"step_time_s", "reference_time_s", "forward_backward_time_s", "optimizer_time_s", "tokens_per_s"}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def without_times(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_dpo_learns_and_its_first_loss_is_ln_2(dpo_options, mask_file, model_folder, read_metrics, mode, dtype):
    options = dpo_options(mode=mode, mask=mask_file if mode == "sparse" else None, n_steps=8, dtype=dtype)
    summary = dpo.train(options)
    rows = read_metrics(summary)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["loss"] == LN_2
    assert rows[0]["margin"] == 0.0
    assert rows[-1]["loss"] < 0.65
    assert rows[-1]["margin"] == pytest.approx(rows[-1]["rewards_chosen"] - rows[-1]["rewards_rejected"], abs=1e-6)
    assert summary["first"] == rows[0] and summary["last"] == rows[-1]
    assert all(row["grad_norm"] > 0 and row["step_time_s"] > row["optimizer_time_s"] > 0 for row in rows)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * (8 - i) / 8 for i in range(8)])

    start, end = weights(model_folder), weights(summary["checkpoint"])
    assert start.keys() == end.keys()
    assert {tensor.dtype for tensor in end.values()} == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    assert any(not torch.equal(start[name].to(end[name].dtype), end[name]) for name in start)
    tokenizer = AutoTokenizer.from_pretrained(summary["checkpoint"])
    assert tokenizer.eos_token == "</s>"


def test_sparse_run_leaves_inactive_weights_as_they_were(dpo_options, mask_file, model_folder):
    mask = MaskSet.load(mask_file)
    start, end = weights(model_folder), weights(dpo.train(dpo_options(mode="sparse", mask=mask_file))["checkpoint"])
    changed = 0
    for name, before in start.items():
        active = mask.bool(name) if name in mask else torch.zeros(before.shape, dtype=torch.bool)
        same_bits = before.view(torch.int32) == end[name].view(torch.int32)
        assert same_bits[~active].all(), name
        changed += int((~same_bits).sum())
    assert changed > mask.nnz // 2  # the embeddings of tokens that never occur have no gradient


def test_sparse_with_every_element_active_is_dense(dpo_options, model_folder, tmp_path, read_metrics):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    full = MaskSet.random(model, density=1.0).save(tmp_path / "full.safetensors")
    dense = dpo.train(dpo_options(output_dir=tmp_path / "dense", n_steps=6))
    sparse = dpo.train(dpo_options(output_dir=tmp_path / "sparse", n_steps=6, mode="sparse", mask=full))
    dense_rows, sparse_rows = read_metrics(dense), read_metrics(sparse)
    for name in ("loss", "margin", "grad_norm", "rewards_chosen", "rewards_rejected"):
        # The same arithmetic in another order: a rounding or two of 2^-23 per operation of a step. Adam divides by the
        # gradient's own size, so a weight whose gradient is all rounding moves by the learning rate either way; such
        # weights hardly move the loss.
        assert [row[name] for row in sparse_rows] == pytest.approx(
            [row[name] for row in dense_rows], rel=2e-4, abs=1e-5
        )


def test_base_weights_equal_a_second_model(dpo_options, mask_file, model_folder, tokenizer, pairs_file):
    """The rewards that a sparse run reports are those of its checkpoint against the start, computed apart."""
    options = dpo_options(mode="sparse", mask=mask_file, n_steps=3, lr_schedule="constant")
    two_steps = dpo.train(dataclasses.replace(options, n_steps=2, output_dir=options.output_dir / "two"))
    three_steps = dpo.train(dataclasses.replace(options, output_dir=options.output_dir / "three"))
    examples, _ = load_examples("preference", str(pairs_file), "train", tokenizer, max_length=64)
    rows = [examples[i] for i in ShuffledOrder(len(examples), options.seed).take(8, 4)]
    batch = collate([sequence for column in zip(*rows, strict=True) for sequence in column], 0)
    with torch.no_grad():
        policy, reference = (
            completion_logprobs(AutoModelForCausalLM.from_pretrained(folder), batch)
            for folder in (two_steps["checkpoint"], model_folder)
        )
    chosen, rejected = (options.beta * (policy - reference)).chunk(2)
    # Differences of sums of about 10 log-probabilities of about 6, each of a few fp32 roundings.
    assert three_steps["last"]["rewards_chosen"] == pytest.approx(chosen.mean().item(), abs=10 * 6 * 8 * 2**-23)
    assert three_steps["last"]["rewards_rejected"] == pytest.approx(rejected.mean().item(), abs=10 * 6 * 8 * 2**-23)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_same_seed_same_run(dpo_options, mask_file, tmp_path, read_metrics, mode):
    mask = mask_file if mode == "sparse" else None
    runs = [
        dpo.train(dpo_options(output_dir=tmp_path / str(i), mode=mode, mask=mask, seed=seed))
        for i, seed in enumerate((5, 5, 6))
    ]
    first, again, other = (without_times(read_metrics(run)) for run in runs)
    assert first == again
    assert first[1:] != other[1:]
    one, two = weights(runs[0]["checkpoint"]), weights(runs[1]["checkpoint"])
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["dpo-dense", "dpo-sparse", "sft"])
def test_accumulation_of_two_twos_is_a_batch_of_four(dpo_options, mask_file, tmp_path, read_metrics, algorithm):
    options = dpo_options(n_steps=5)
    if algorithm == "dpo-sparse":
        options = dataclasses.replace(options, mode="sparse", mask=mask_file)
    curves = []
    for batch_size, accumulation in ((4, 1), (2, 2), (1, 4)):
        changes = {
            "batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
            "output_dir": tmp_path / str(batch_size),
        }
        curves.append(without_times(read_metrics(run_of(algorithm, options, changes))))
    for curve in curves[1:]:
        for row, whole in zip(curve, curves[0], strict=True):
            assert row["n_tokens"] == whole["n_tokens"]
            # As for the full mask: the same sums in another order.
            assert row["loss"] == pytest.approx(whole["loss"], rel=2e-4)
            assert row["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-4)


def run_of(algorithm, options, changes):
    if algorithm != "sft":
        return dpo.train(dataclasses.replace(options, **changes))
    names = {field.name for field in dataclasses.fields(sft.SFTConfig)} & set(vars(options))
    shared = {name: getattr(options, name) for name in names}
    return sft.train(sft.SFTConfig(**{**shared, **changes}))


def test_sft_loss_is_the_mean_over_completion_tokens(dpo_options, model_folder, tokenizer, pairs_file, tmp_path):
    summary = run_of("sft", dpo_options(n_steps=12, batch_size=24), {"learning_rate": 1e-2})
    examples, _ = load_examples("demonstration", str(pairs_file), "train", tokenizer, max_length=64)
    batch = collate([sequence for (sequence,) in examples], 0)
    with torch.no_grad():
        logprobs = completion_logprobs(AutoModelForCausalLM.from_pretrained(model_folder), batch)
    expected = -logprobs.sum().item() / int(batch.completion_mask.sum())
    assert summary["first"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert summary["last"]["loss"] < 0.7 * summary["first"]["loss"]


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_delta_log_holds_the_asked_steps_and_the_checkpoints_bits(dpo_options, mask_file, model_folder, tmp_path, mode):
    mask = mask_file if mode == "sparse" else None
    options = dpo_options(
        mode=mode, mask=mask, delta_log_dir=tmp_path / "log", delta_log_steps="1,every:2,last", n_steps=5
    )
    summary = dpo.train(options)
    log = DeltaLog.open(summary["delta_log_dir"])
    assert log.steps == (0, 1, 2, 4, 5)
    assert log.metadata["model"] == str(model_folder)
    for step, folder in ((0, model_folder), (5, summary["checkpoint"])):
        logged, saved = log.load(step), weights(folder)
        assert logged.keys() == saved.keys()
        assert all(torch.equal(logged[name].view(torch.int32), saved[name].view(torch.int32)) for name in saved)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_mlp_only_trains_mlp_weights_alone(dpo_options, mask_file, model_folder, mode):
    options = dpo_options(mode=mode, mask=mask_file if mode == "sparse" else None, mlp_only=True)
    start, end = weights(model_folder), weights(dpo.train(options)["checkpoint"])
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if ".mlp." in name}


def test_checkpoint_gives_the_starting_weights_and_the_reference(dpo_options, model_folder, tmp_path):
    first = dpo.train(dpo_options(output_dir=tmp_path / "first"))
    second = dpo.train(dpo_options(output_dir=tmp_path / "second", checkpoint=tmp_path / "first" / "final", n_steps=1))
    assert second["first"]["loss"] == LN_2
    start, end = weights(first["checkpoint"]), weights(second["checkpoint"])
    # Adam's first step moves a weight by the learning rate at most.
    assert max((start[name] - end[name]).abs().max().item() for name in start) <= 1e-3 * 1.001
    assert any(not torch.equal(start[name], weights(model_folder)[name]) for name in start)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("hidden_size", 64, "hidden_size is 64, 32 in"),
        ("num_hidden_layers", 3, "num_hidden_layers is 3, 2 in"),
        ("vocab_size", 400, "vocab_size is 400"),
    ],
)
def test_checkpoint_of_another_model_is_refused(dpo_options, model_folder, tmp_path, name, size, message):
    config = AutoConfig.from_pretrained(model_folder)
    setattr(config, name, size)
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match=message) as raised:
        dpo.train(dpo_options(checkpoint=tmp_path / "other"))
    assert f"checkpoint {tmp_path / 'other'} is not of the model {model_folder}" in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_gradient_checkpointing_and_dropout_leave_the_run_as_it_is(dpo_options, tokenizer, tmp_path, read_metrics):
    folder = tmp_path / "gpt2"  # dropout modules with p = 0.1, and fused ones
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    runs = [
        dpo.train(dpo_options(policy_name=str(folder), output_dir=tmp_path / str(on), gradient_checkpointing=on))
        for on in (False, True)
    ]
    plain, recomputed = (without_times(read_metrics(run)) for run in runs)
    assert plain[0]["loss"] == LN_2
    assert plain == recomputed
    assert AutoModelForCausalLM.from_pretrained(runs[0]["checkpoint"]).config.resid_pdrop == 0.1


def test_gradient_checkpointing_recomputes_the_layers(dpo_options, tokenizer, pairs_file):
    examples, _ = load_examples("preference", str(pairs_file), "train", tokenizer, max_length=64)
    batch = collate(examples[0], 0)
    for on, times in ((False, 1), (True, 2)):
        model = load_policy(dpo_options(gradient_checkpointing=on), torch.device("cpu"))
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        completion_logprobs(model, batch).sum().backward()
        assert len(calls) == times


def test_weights_that_do_not_cover_the_model_are_refused(dpo_options, model_folder, tmp_path):
    folder = tmp_path / "part"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DataError, match=r"part: no weights for 1 tensors of a causal language model, among them model\.norm\.weight"
    ):
        dpo.train(dpo_options(policy_name=str(folder)))


def test_optimizer_bytes(dpo_options, mask_file, model_folder, tmp_path):
    numel = sum(tensor.numel() for tensor in weights(model_folder).values())
    nnz = MaskSet.load(mask_file).nnz
    dense = dpo.train(dpo_options(output_dir=tmp_path / "dense", n_steps=1))["optimizer_bytes"]
    sparse = dpo.train(dpo_options(output_dir=tmp_path / "sparse", n_steps=1, mode="sparse", mask=mask_file))
    n_tensors = len(weights(model_folder))
    assert dense["state"] == 2 * 4 * numel + 4 * n_tensors  # two fp32 moments, and a step counter per tensor
    assert dense["grad"] == 4 * numel
    assert sparse["optimizer_bytes"]["state"] == 2 * 4 * nnz
    assert sparse["optimizer_bytes"]["grad"] == 4 * nnz


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_master_weights_are_kept_for_16_bit_weights_unless_refused(dpo_options, mask_file, model_folder, mode):
    options = dpo_options(mode=mode, mask=mask_file if mode == "sparse" else None)
    for dtype, asked, kept in (
        ("bf16", None, True),
        ("bf16", True, True),
        ("bf16", False, False),
        ("fp32", True, False),
    ):
        changed = dataclasses.replace(options, dtype=dtype, master_weights=asked)
        optimizer = make_optimizer(changed, load_policy(changed, torch.device("cpu")))
        assert (optimizer.nbytes()["master"] > 0) is kept


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_lean_has_16_bit_state_and_gradients_and_no_masters(dpo_options, mask_file, optim):
    options = dpo_options(lean=True, dtype="bf16", mask=mask_file, optim=optim, seed=3)
    optimizer = make_optimizer(options, load_policy(options, torch.device("cpu")))
    nnz, nbytes = MaskSet.load(mask_file).nnz, optimizer.nbytes()
    assert (nbytes["state"], nbytes["grad"]) == ((0 if optim == "sgd" else 4) * nnz, 2 * nnz)
    assert nbytes["master"] == 0 and optimizer.stochastic_rounding and optimizer.offload_base_weights
    assert {group["seed"] for group in optimizer.param_groups} == {3}


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"mode": "sparse"}, ConfigError, ["--mask"]),
        ({"mode": "dense", "mask": "m.safetensors"}, ConfigError, ["m.safetensors", "mode sparse", "mode is dense"]),
        ({"beta": 0.0}, ConfigError, ["'beta'", "0.0"]),
        ({"n_steps": 0}, ConfigError, ["'n_steps'", "0"]),
        ({"learning_rate": float("nan")}, ConfigError, ["'learning_rate'", "nan"]),
        ({"delta_log_steps": "sometimes"}, ConfigError, ["sometimes"]),
        ({"delta_log_steps": "5,every:7"}, ConfigError, ["'delta_log_steps'", "5,every:7", "n_steps 4"]),
        ({"lean": True}, ConfigError, ["'lean'", "mode is dense: expected sparse"]),
        ({"lean": True, "mask": "m", "dtype": "fp32"}, ConfigError, ["'lean'", "dtype is fp32: expected bf16"]),
        ({"lean": True, "mask": "m", "dtype": "bf16", "master_weights": True}, ConfigError, ["'lean'", "without them"]),
        ({"lean": True, "mask": "m", "dtype": "bf16", "seed": -1}, ConfigError, ["'seed' is -1 with lean"]),
        ({"lean": True, "mask": "m", "dtype": "bf16", "parallel": "fsdp"}, ConfigError, ["'lean'", "parallel fsdp"]),
    ],
)
def test_options_that_contradict_each_other(dpo_options, changes, error, parts):
    with pytest.raises(error) as raised:
        dpo_options(**changes)
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_what_cannot_be_loaded_is_one_error_and_leaves_nothing(dpo_options, tmp_path, pairs_file, tokenizer):
    other = tmp_path / "other.safetensors"
    MaskSet.random({"model.nothing.weight": (4, 4)}, density=0.5).save(other)
    columns = tmp_path / "columns.jsonl"
    columns.write_text('{"prompt": "a", "chosen": "b"}\n')
    cases = [
        ({"policy_name": str(tmp_path / "nowhere")}, DataError, "nowhere"),
        ({"checkpoint": tmp_path / "nowhere"}, DataError, "nowhere"),
        ({"dataset": str(columns)}, DataError, "columns.jsonl: found columns (chosen, prompt); expected"),
        ({"mode": "sparse", "mask": other}, MaskError, "model.nothing.weight"),
        ({"mode": "sparse", "mask": tmp_path / "no.safetensors"}, MaskError, "no.safetensors"),
        ({"device": "gpu"}, ConfigError, "'gpu'"),
    ]
    for changes, error, part in cases:
        with pytest.raises(error) as raised:
            dpo.train(dpo_options(**changes))
        assert part in str(raised.value) and "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(dpo_options, tmp_path):
    with pytest.raises(SparseOptError, match=r"step \d+: .* is (nan|inf)"):
        dpo.train(dpo_options(learning_rate=1e30, n_steps=10, max_grad_norm=None))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "options.yaml"]
