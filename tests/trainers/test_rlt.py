"""The loop of reinforcement-learned teachers on a tiny model: its modes, its memory, what it writes and refuses."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stopping import assert_same_run, stop_and_resume
from transformers import AutoModelForCausalLM

from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import rlt
from sparse_opt.trainers.data.encoding import TokenSequence, collate
from sparse_opt.trainers.data.teacher_data import read_templates
from sparse_opt.trainers.policy import reference
from sparse_opt.trainers.policy.logprobs import token_logprobs
from sparse_opt.trainers.rewards.student import load_student_tokenizer
from sparse_opt.trainers.rlt import RLTConfig
from sparse_opt.trainers.rollouts import ChunkedEngine, Completions, Sampling

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
TEMPLATES = {
    "teacher_system": "",
    "teacher_user": "{question}",
    "teacher_start": " {solution}. ",
    "explanation_end": "o",  # an untrained model writes it now and then
    "student_system": "",
    "student_user": "{question}",
    "student_answer": " {explanation}. {solution}",
}


@pytest.fixture(scope="module")
def lessons_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    rows = [{"question": f"What is {n} plus {n % 7}?", "solution": f"It is {n + n % 7}"} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rlt_options(tmp_path, model_folder, lessons_file):
    def make(**changes):
        options = {
            "policy_name": str(model_folder),
            "dataset": str(lessons_file),
            "output_dir": tmp_path / "run",
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": 3,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "n_generations": 4,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "seed": 3,
            **TEMPLATES,
        }
        return RLTConfig(**{**options, **changes})

    return make


def without_times(rows):
    names = ("_time_s", "per_s")
    return [{name: value for name, value in row.items() if not name.endswith(names)} for row in rows]


def weights(folder):
    return load_file(f"{folder}/model.safetensors")


def same_weights(one, two):
    one, two = weights(one["checkpoint"]), weights(two["checkpoint"])
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def full_mask(tmp_path, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return MaskSet.random(model, density=1.0).save(tmp_path / "full.safetensors")


def test_rewards_of_a_run_are_those_of_its_completions(rlt_options, read_metrics, model_folder, tokenizer, monkeypatch):
    """What the log says of the first rollout, computed once more, row by row, by the start model."""
    score_rollout, scored = rlt.score_rollout, []

    def spied(config, run, student, rollout, examples, eos_ids):
        scored.append((rollout.completions, examples))
        return score_rollout(config, run, student, rollout, examples, eos_ids)

    monkeypatch.setattr(rlt, "score_rollout", spied)
    config = rlt_options(n_steps=1, activate_debugging_logs=True)
    summary = rlt.train(config)
    (row,) = read_metrics(summary)
    parts = [json.loads(line) for line in (config.output_dir / "reward_parts.jsonl").read_text().splitlines()]
    ((completions, examples),) = scored
    assert len(parts) == len(completions) == 8
    assert 0 < sum(part["closed"] for part in parts) < 8
    for name in ("reward", "reward_kl", "solution_logprob_min", "explanation_kl_max", "explanation_length"):
        assert row[name] == pytest.approx(sum(part[name] for part in parts) / 8, rel=1e-5)
    assert row["format_rate"] == sum(part["closed"] for part in parts) / 8
    assert row["kl"] == row["ratio_error"] == 0.0

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()

    def logprobs(ids, span):
        with torch.no_grad():
            return token_logprobs(model, collate([TokenSequence(ids, 1)], 0), 0.7)[0, span.start - 1 : span.stop - 1]

    for part, completion, example in zip(parts, completions, examples, strict=True):
        assert (part["prompt"], part["completion"]) == (example.text, tokenizer.decode(completion))
        explanation = completion[: part["explanation_length"]]
        tag = completion[part["explanation_length"] :]
        assert part["closed"] == ("o" in tokenizer.decode(tag)) and "o" not in tokenizer.decode(explanation)
        assert part["closed"] or tag in ([], [tokenizer.eos_token_id])
        read = example.student_sequence(explanation)
        span = slice(len(example.ids), len(example.ids) + len(explanation))
        kl = logprobs([*example.ids, *explanation], span) - logprobs(read.ids, read.explanation)
        solution = logprobs(read.ids, read.solution)
        expected = solution.mean() + 0.01 * solution.min() - (0 if part["closed"] else 1)
        expected = expected - (3 * kl.mean() + 0.03 * kl.max() if explanation else 3.03)
        # Log-probabilities of up to 10 whose logits are sums of 32 products in another order; weights of about 4.
        assert part["reward"] == pytest.approx(expected.item(), abs=4 * 10 * 32 * 2**-23)


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(rlt_options, model_folder, mask_file, tmp_path, monkeypatch, mode):
    options = {
        "mode": mode,
        "mask": mask_file if mode == "sparse" else None,
        "student_model": str(model_folder),
        "save_steps": 1,
        "activate_debugging_logs": True,
    }
    whole = rlt.train(rlt_options(output_dir=tmp_path / "whole", **options))
    stopped = rlt_options(output_dir=tmp_path / "stopped", **options)
    assert_same_run(whole, stop_and_resume(monkeypatch, rlt.train, stopped, 1))


def test_sparse_with_every_element_active_is_dense(rlt_options, full_mask, tmp_path, read_metrics):
    dense = rlt.train(rlt_options(output_dir=tmp_path / "dense"))
    sparse = rlt.train(rlt_options(output_dir=tmp_path / "sparse", mode="sparse", mask=full_mask))
    dense_rows, sparse_rows = read_metrics(dense), read_metrics(sparse)
    for name in ("loss", "reward", "reward_solution", "reward_kl", "kl", "grad_norm", "completion_length"):
        # As in test_runs: the same arithmetic in another order; the completions are the same ones.
        assert [row[name] for row in sparse_rows] == pytest.approx(
            [row[name] for row in dense_rows], rel=2e-4, abs=1e-5
        )
    assert dense_rows[-1]["kl"] > 0


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_resumed_run_is_the_run_that_was_never_stopped(
    rlt_options, mask_file, tmp_path, read_metrics, mode, monkeypatch
):
    changes = {
        "mode": mode,
        "mask": mask_file if mode == "sparse" else None,
        "save_steps": 1,
        "num_iterations": 2,
        "activate_debugging_logs": True,
        "generation_aggregation_steps": 1,
    }
    whole = rlt.train(rlt_options(output_dir=tmp_path / "whole", **changes))
    halves = rlt_options(output_dir=tmp_path / "halves", **changes)
    update, calls = rlt.update_on_rollout, []

    def killed(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return update(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(rlt, "update_on_rollout", killed)
        with pytest.raises(KeyboardInterrupt):
            rlt.train(halves)
    resumed = rlt.train(dataclasses.replace(halves, resume=True))
    assert without_times(read_metrics(resumed)) == without_times(read_metrics(whole))
    assert same_weights(resumed, whole)
    parts = [(tmp_path / name / "reward_parts.jsonl").read_text() for name in ("whole", "halves")]
    assert parts[0] == parts[1] and len(parts[0].splitlines()) == 3 * 8


def test_models_kept_off_the_device_change_no_number(rlt_options, model_folder, tmp_path, read_metrics, monkeypatch):
    moved = []

    @contextmanager
    def spied(model, device):
        moved.append(model)
        yield

    monkeypatch.setattr(reference, "on_device", spied)
    runs = [
        rlt.train(
            rlt_options(
                output_dir=tmp_path / str(offload),
                offload_untrained_models=offload,
                student_model=str(model_folder),
                n_steps=2,
            )
        )
        for offload in (False, True)
    ]
    on, off = (without_times(read_metrics(run)) for run in runs)
    assert on == off
    assert same_weights(*runs)
    # Student and reference in turn, each once in each of the two steps.
    assert len(moved) == 4 and moved[:2] == moved[2:] and moved[0] is not moved[1]


def test_student_is_the_start_unless_another_is_named(rlt_options, model_folder, tmp_path, read_metrics):
    """By its path the policy's own start is the same student; other weights are another."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    other = tmp_path / "other"
    model.save_pretrained(other)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other / file).write_bytes((model_folder / file).read_bytes())
    runs = {
        name: without_times(read_metrics(rlt.train(rlt_options(output_dir=tmp_path / name, student_model=student))))
        for name, student in (("none", None), ("start", str(model_folder)), ("another", str(other)))
    }
    assert runs["none"] == runs["start"]
    assert runs["none"][0]["reward_solution"] != runs["another"][0]["reward_solution"]
    assert runs["none"][0]["completion_length"] == runs["another"][0]["completion_length"]


def test_lora_without_a_divergence_in_the_loss(rlt_options, read_metrics, lessons_file, tmp_path):
    config = rlt_options(
        mode="lora", lora_rank=4, beta=0.0, eval_dataset=str(lessons_file), eval_steps=2, n_minibatches=2
    )
    summary = rlt.train(config)
    rows = read_metrics(summary)
    assert all(row["kl"] is None and row["grad_norm"] > 0 for row in rows)
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert len({row["eval_reward"] for row in evaluations}) == 3
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "solution", "reward", "reward_kl", "closed"} <= samples[0].keys()
    AutoModelForCausalLM.from_pretrained(summary["checkpoint"])


def test_parts_of_a_rollout_are_sampled_in_turn():
    calls = []

    class Echo:
        eos_ids = (2,)

        def generate(self, prompts, n, sampling):
            calls.append(len(prompts) * n)
            return Completions([[*prompt, i] for prompt in prompts for i in range(n)])

        def close(self):
            calls.append("closed")

    engine = ChunkedEngine(Echo(), 4)
    prompts = [[3], [4], [5]]
    assert engine.generate(prompts, 2, Sampling(4)) == Echo().generate(prompts, 2, Sampling(4))
    engine.close()
    assert calls == [4, 2, 6, "closed"] and engine.eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_functions": ["math"]}, "'reward_functions': rlt has its own"),
        ({"n_generations": 1}, "'n_generations' is 1: expected at least 2"),
        ({"kl_coefficients": [3.0]}, "'kl_coefficients' has 1 values, kl_reductions 2"),
        ({"student_temperature": 0.0}, "'student_temperature' is 0.0"),
        ({"beta": -0.1}, "'beta' is -0.1"),
        ({"epsilon": 1.0}, "'epsilon' is 1.0"),
        ({"epsilon_high": 0.0}, "'epsilon_high' is 0.0"),
        ({"ref_name": "other", "student_model": "another", "beta": 0.0}, r"a reference \(other\) is used with beta"),
        ({"generation_aggregation_steps": 0}, "'generation_aggregation_steps' is 0"),
        (
            {"generation_aggregation_steps": 3},
            "= 12 completions sampled at once: expected a multiple of n_gen",
        ),
        ({"batch_size": 2, "generation_aggregation_steps": 1}, "= 2 completions sampled at once"),
        ({"student_answer": "{solution}"}, r"'student_answer' have no \{explanation\}"),
    ],
)
def test_options_that_contradict_each_other(rlt_options, changes, message):
    with pytest.raises(ConfigError, match=message):
        rlt_options(**changes)


def test_what_cannot_be_used_leaves_nothing(rlt_options, tmp_path, model_folder, tokenizer):
    other = tmp_path / "other"
    changed = type(tokenizer).from_pretrained(model_folder)
    changed.add_tokens(["<new>"])
    changed.save_pretrained(other)
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(other)
    n = len(tokenizer)
    with pytest.raises(ConfigError, match=rf"{n + 1} tokens against {n}; '<new>' has id {n} there, None here"):
        load_student_tokenizer(str(other), tokenizer)
    cases = [
        ({"student_model": str(tmp_path / "nowhere")}, DataError, "nowhere"),
        ({"student_model": str(other)}, ConfigError, "another vocabulary"),
        ({"max_completion_length": 120}, ConfigError, "max_position_embeddings"),
        ({"max_prompt_length": 2}, DataError, "no examples left"),
    ]
    for changes, error, part in cases:
        with pytest.raises(error, match=part):
            rlt.train(rlt_options(**changes))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["rlt", "rlt_single_gpu"])
def test_example_configs_are_options_of_the_loop(name):
    config = parse_config(RLTConfig, ["--config", str(EXAMPLES / f"{name}.yaml")])
    assert config.temperature == 0.7 and config.format_penalty == 1.0
    assert (config.solution_coefficients, config.kl_coefficients) == ([1.0, 0.01], [3.0, 0.03])
    assert read_templates(EXAMPLES / f"{name}.yaml").explanation_end == config.explanation_end
    if name == "rlt_single_gpu":
        assert (config.completions_per_step, config.n_generations, config.max_completion_length) == (32, 8, 4096)
        assert config.vllm_gpu_memory_utilization == 0.7 and config.offload_untrained_models
        assert config.student_model is None


def test_original_names_of_options_are_understood():
    words = ["--policy_name", "p", "--dataset", "d", "answer_log_prob_coeff=5,0.05", "kl_penalty_reward_coeff=1"]
    config = parse_config(RLTConfig, [*words, "reduction_kl_fn=sum", "unbias_student_log_probs_temp=1.0"])
    assert (config.solution_coefficients, config.kl_coefficients, config.kl_reductions) == ([5, 0.05], [1], ["sum"])
    assert config.student_temperature == 1.0


def test_fp16_scores_with_a_student_under_autocast_too(rlt_options, model_folder, tmp_path, read_metrics):
    half, single = (
        read_metrics(
            rlt.train(rlt_options(output_dir=tmp_path / dtype, dtype=dtype, n_steps=1, student_model=str(model_folder)))
        )[0]
        for dtype in ("fp16", "fp32")
    )
    assert half["completion_length"] == single["completion_length"]
    assert half["reward_solution"] == pytest.approx(single["reward_solution"], abs=0.02)
    assert half["reward_solution"] != single["reward_solution"]
    assert half["loss_scale"] == 2.0**16
