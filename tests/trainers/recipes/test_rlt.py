"""`sparse-opt train rlt`: its reward against numbers computed once more, its runs on a tiny model, what it refuses."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from launch import run_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.integrations.trl.command_line import parse
from sparse_opt.trainers.recipes import rlt
from sparse_opt.trainers.recipes.rlt import RLTOptions, split_explanation, teacher_reward

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
TEXTS = {
    "teacher_system": "",
    "teacher_user": "{question}",
    "teacher_start": " {solution}. ",
    "explanation_end": "o",  # an untrained model writes it now and then
    "student_system": "",
    "student_user": "{question}",
    "student_answer": " {explanation}. {solution}",
}
REDUCE = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def expected_reward(solution, divergence, closed, options):
    """One completion's reward in float64."""
    reward = 0.0 if closed else options.not_matched_penalty
    for how, weight in zip(options.reduction_log_prob_fn, options.answer_log_prob_coeff, strict=True):
        reward += weight * REDUCE[how](solution)
    for how, weight in zip(options.reduction_kl_fn, options.kl_penalty_reward_coeff, strict=True):
        reward -= weight * (REDUCE[how](divergence) if len(divergence) else -options.not_matched_penalty)
    return reward


OTHERS = {"reduction_log_prob_fn": ["sum", "max", "mean"], "answer_log_prob_coeff": [0.5, -2.0, 1.5]}
OTHERS |= {"reduction_kl_fn": ["min"], "kl_penalty_reward_coeff": [0.7], "not_matched_penalty": -2.5}


@pytest.mark.parametrize("changes", [{}, OTHERS], ids=["the-paper's", "others"])
def test_reward_is_the_formula(changes):
    options = RLTOptions(**changes)
    generator = np.random.default_rng(0)
    for _ in range(20):
        solution = -generator.exponential(2.0, generator.integers(1, 7))
        divergence = generator.normal(0.0, 2.0, generator.integers(0, 10))
        closed = bool(generator.random() < 0.5)
        found = teacher_reward(torch.tensor(solution), torch.tensor(divergence), closed, options)["reward"]
        assert found == pytest.approx(expected_reward(solution, divergence, closed, options), rel=1e-12)


@pytest.mark.parametrize(
    ("completion", "explanation", "closed"),
    [("It is so.# More#", "It is so.", True), ("It is so.", "It is so.", False), ("é ü 漢#", "é ü 漢", True)],
)
@pytest.mark.parametrize("ends", [True, False])
def test_an_explanation_ends_at_the_tag(tokenizer, completion, explanation, closed, ends):
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * ends
    count, found = split_explanation(tokenizer, ids, "#", [tokenizer.eos_token_id])
    assert (tokenizer.decode(ids[:count]), found) == (explanation, closed)


def test_a_token_that_holds_the_tags_beginning_is_the_tags():
    pieces = ["so", " it", " is.<", "end", ">\n"]
    words = SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids))
    assert split_explanation(words, [0, 1, 2, 3, 4], "<end>", [9]) == (2, True)
    assert split_explanation(words, [4], ">", [9]) == (0, True)
    assert split_explanation(words, [], ">", [9]) == (0, False)


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    path = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    rows = [{"question": f"What is {n} plus {n % 7}?", "solution": f"It is {n + n % 7}"} for n in range(12)]
    path.write_text("".join(json.dumps(row | {"explanation": "Count."}) + "\n" for row in rows))
    return path


@pytest.fixture
def words(tmp_path, model_folder, lessons):
    """`words(beta=0)`: the command line of a tiny run into tmp_path/run, with the given options."""

    def make(**changes):
        config = tmp_path / "texts.yaml"
        config.write_text(yaml.safe_dump(TEXTS))
        options = {"model_name_or_path": model_folder, "dataset_name": lessons, "output_dir": tmp_path / "run"}
        options |= {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12}
        options |= {"learning_rate": 1e-3, "logging_steps": 1, "report_to": "none", "seed": 3}
        return ["--config", str(config), *(f"{name}={value}" for name, value in (options | changes).items())]

    return make


@pytest.fixture
def run(words, tmp_path, capfd):
    """`run(beta=0)`: a run that must succeed; returns its logged steps."""

    def call(**changes):
        code = main(["train", "rlt", *words(**changes)])
        said = capfd.readouterr()
        assert code == 0, said.err
        assert "rlt: " in said.out and "grpo: " not in said.out
        folder = Path(changes.get("output_dir", tmp_path / "run"))
        return [row for row in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in row]

    return call


def parts_of(folder):
    return [json.loads(line) for line in (folder / "reward_parts.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{k: v for k, v in row.items() if "time" not in k and "memory" not in k} for row in rows]


def same_weights(*folders):
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "changes",
    [{}, {"mask_density": 0.2}, {"mask_density": 0.2, "beta": 0}, {"use_peft": "true"}],
    ids=["dense", "sparse", "sparse-no-beta", "lora"],
)
def test_rewards_of_a_run_are_those_of_its_completions(run, changes, model_folder, tokenizer, tmp_path, monkeypatch):
    """The first rollout's parts, computed once more by plain forward passes of the initial model."""
    scored, score = [], rlt.StudentReward.__call__

    def spied(self, **columns):
        scored.append(columns)
        return score(self, **columns)

    monkeypatch.setattr(rlt.StudentReward, "__call__", spied)
    changes = {"train_batch_size": 8, "max_steps": 1, "activate_debugging_logs": "true"} | changes
    (logged,) = run(**changes)
    parts, (columns,) = parts_of(tmp_path / "run"), scored
    assert len(parts) == len(columns["completion_ids"]) == 8
    for name in ("reward", "reward_kl", "solution_logprob_min", "explanation_kl_max", "format_rate"):
        assert logged[name] == pytest.approx(np.mean([part[name] for part in parts]), rel=1e-5)
    assert 0 < logged["format_rate"] < 1

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()

    def logprobs(*pieces):
        ids = torch.tensor([[token for piece in pieces for token in piece]])
        with torch.no_grad():
            table = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1)
        values = table.gather(1, ids[0, 1:, None])[:, 0]
        ends = np.cumsum([len(piece) for piece in pieces]) - 1
        return [values[end - len(piece) : end] for piece, end in zip(pieces[1:], ends[1:], strict=True)]

    rows = zip(parts, columns["completion_ids"], columns["prompts"], columns["solution"], strict=True)
    for part, completion, prompt, solution in rows:
        explanation = completion[: int(part["explanation_length"])]
        tag = tokenizer.decode(completion[len(explanation) :], skip_special_tokens=True)
        assert "o" not in tokenizer.decode(explanation) and part["format_rate"] == ("o" in tag)
        question = prompt.removesuffix(f" {solution}. ")
        (teacher,) = logprobs(tokenizer(prompt)["input_ids"], explanation)
        before, middle, after = (
            tokenizer(question + " ")["input_ids"],
            *(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (". ", solution)),
        )
        student, _, solved = logprobs(before, explanation, middle, after)
        kl = (teacher - student).numpy()
        expected = expected_reward(solved.numpy(), kl, part["format_rate"], RLTOptions())
        # Log-probabilities of up to 10 whose logits are sums of 32 products in another order; weights of about 4.
        assert part["reward"] == pytest.approx(expected, abs=4 * 10 * 32 * 2**-23)


def test_a_student_of_its_own_and_offload(run, model_folder, tmp_path):
    """Named, the initial teacher is the same student as the reference; other weights are another one."""
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
        name: without_times(run(output_dir=tmp_path / name, student_model=student, offload_untrained_models=offload))
        for name, student, offload in (
            ("none", "none", "false"),
            ("offloaded", "null", "true"),
            ("named", model_folder, "true"),
            ("another", other, "false"),
        )
    }
    assert runs["none"] == runs["offloaded"] == runs["named"]
    assert same_weights(tmp_path / "none", tmp_path / "named")
    first, another = runs["none"][0], runs["another"][0]
    assert first["reward_solution"] != another["reward_solution"]
    assert first["explanation_length"] == another["explanation_length"]


def test_offloaded_models_leave_the_device_after_each_rollout(run, model_folder, monkeypatch):
    moves, to, score = [], torch.nn.Module.to, rlt.StudentReward.__call__

    def spied(self, where, *args, **kwargs):
        moves.append((id(self), str(where)))
        return to(self, where, *args, **kwargs)

    def scored(self, **columns):
        monkeypatch.setattr(torch.nn.Module, "to", spied)
        rewards = score(self, **columns)
        monkeypatch.setattr(torch.nn.Module, "to", to)
        return rewards

    monkeypatch.setattr(rlt.StudentReward, "__call__", scored)
    run(max_steps=1, offload_untrained_models="true", student_model=model_folder)
    (reference, off), (student, _), *last = moves
    assert off == "cpu" and student != reference
    assert set(last) == {(reference, "cpu"), (student, "cpu")}


def test_evaluation_on_held_out_rows(run, tmp_path, lessons):
    splits = {"dataset_train_split": "train[:8]", "dataset_test_split": "train[8:]", "per_device_eval_batch_size": 4}
    run(eval_strategy="steps", eval_steps=1, activate_debugging_logs="true", **splits)
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    evaluated = [row for row in history if "eval_reward" in row]
    assert len(evaluated) == 2 and all(row["eval_reward_kl"] != 0 for row in evaluated)
    assert {part["step"] for part in parts_of(tmp_path / "run")} == {1, 2}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_resumed_run_is_the_run_that_was_never_stopped(run, words, tmp_path, monkeypatch):
    changes = {
        "mask_density": 0.2,
        "max_steps": 4,
        "save_steps": 2,
        "train_batch_size": 8,
        "generation_aggregation_steps": 1,
    }
    changes |= {"save_completions_probability": 0.5}
    run(output_dir=tmp_path / "whole", **changes)
    prepare = rlt.StudentReward.prepare

    def stopping(self, trainer):
        trainer.add_callback(Stop())
        prepare(self, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(rlt.StudentReward, "prepare", stopping)
        assert main(["train", "rlt", *words(**changes)]) == 130
    run(**changes, resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    parts = parts_of(tmp_path / "whole")
    assert parts == parts_of(tmp_path / "run") and 4 < len(parts) < 28
    assert {part["step"] for part in parts} == {1, 2, 3, 4}


@pytest.mark.dist
def test_two_processes_score_their_own_completions(words, tmp_path):
    command = words(train_batch_size=8, activate_debugging_logs="true", mask_density=0.2, use_cpu="true")
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "OMP_NUM_THREADS": "1"}
    ended = run_command(2, ["train", "rlt", *command], environment)
    assert ended.returncode == 0, ended.stderr
    parts = parts_of(tmp_path / "run")
    assert [part["step"] for part in parts] == [1] * 8 + [2] * 8
    assert len({part["prompt"] for part in parts[:8]}) == 2
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"][0]
    assert state["reward_kl"] == pytest.approx(np.mean([part["reward_kl"] for part in parts[:8]]), rel=1e-5)


@pytest.fixture
def rows_of(words, tmp_path, chat_tokenizer, tokenizer):
    """`rows_of(rows, chat=True)`: the rows that the trainer gets, with their tokenizer."""

    def make(rows, *, chat=False, **changes):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = {"dataset_name": file, "max_completion_length": 4} | changes
        options = parse("grpo", words(**changes), rlt.RECIPE)
        own = chat_tokenizer if chat else tokenizer
        return rlt.teacher_rows(options, own, own), own

    return make


def test_prompts_and_the_students_tokens(rows_of):
    rows, tokenizer = rows_of([{"problem": "2+2", "answer": "4"}], chat=True, student_system="Think.")
    assert rows[0]["prompt"] == "<|user|>2+2</s><|assistant|> 4. "  # TRL's tokens begin with BOS
    assert tokenizer.decode(rows[0]["student_start"]) == "<s><|system|>Think.</s><|user|>2+2</s><|assistant|> "
    assert tokenizer.decode(rows[0]["student_middle"] + rows[0]["solution_ids"]) == ". 4"
    rows, tokenizer = rows_of([{"question": "{solution}", "solution": "4", "answer": "5"}])
    assert rows[0]["prompt"] == "{solution} 4. "
    assert tokenizer.decode(rows[0]["student_start"]) == "<s>{solution} "


def test_rows_of_bespoke_stratos(rows_of):
    answer = (
        "<|begin_of_thought|>\n\nFirst.\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\nIt is {4}.\n<|end_of_solution|>"
    )
    turns = [{"from": "user", "value": "q"}, {"from": "assistant", "value": answer}]
    texts = {"student_answer": RLTOptions().student_answer}
    rows, _ = rows_of([{"system": "x", "conversations": turns}], **texts)
    assert (rows[0]["prompt"], rows[0]["solution"]) == ("q It is {4}.. ", "It is {4}.")
    turns[1]["value"] = "It is 4."
    with pytest.raises(DataError, match=r"row 1: found the answer \"It is 4\.\"; expected the form"):
        rows_of([{"conversations": turns}], **texts)


def test_rows_that_cannot_be_used(rows_of, tokenizer):
    long = {"question": "a long question, " * 20, "solution": "s"}
    short = {"question": "q", "solution": "s"}
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than --max_prompt_length 60, and are left out"):
        assert len(rows_of([long, short], max_prompt_length=60)[0]) == 1
    for rows, changes, error, said in (
        ([long], {"max_prompt_length": 60}, DataError, "1 of 1 prompts are longer"),
        ([short], {"max_completion_length": 125}, ConfigError, "max_position_embeddings of .*, 128"),
        ([{"question": "q", "chosen": "c"}], {}, DataError, r"found columns \(chosen, question\); expected one of"),
        ([short, {"question": " ", "solution": "s"}], {}, DataError, "row 2: column 'question' has \" \""),
    ):
        with pytest.raises(error, match=said):
            rows_of(rows, **changes)


def test_a_tokenizer_that_needs_the_whole_text_is_refused(words, tokenizer):
    class Spaced:  # puts a space before every piece, as some SentencePiece ones do
        chat_template, decode = None, staticmethod(tokenizer.decode)
        __call__ = staticmethod(lambda text, **given: tokenizer(" " + text, **given))

    with pytest.raises(DataError, match="row 1: the tokenizer changes the text if its pieces are tokenized apart"):
        rlt.teacher_rows(parse("grpo", words(), rlt.RECIPE), Spaced(), Spaced())


def test_rows_for_the_teachers_sft_have_the_prompts_of_the_run(run, words, lessons, model_folder, tmp_path, capfd):
    file = tmp_path / "sft" / "teacher.jsonl"
    assert main(["train", "rlt", *words(sft_rows=file)]) == 0
    assert capfd.readouterr().out == f"12 rows in {file}\n"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[3] == {"prompt": "What is 3 plus 3? It is 6. ", "completion": "Count.o"}
    assert main(["train", "rlt", *words(sft_rows=file)]) == 2
    assert "exists: choose another file" in capfd.readouterr().err
    trained = ["--model_name_or_path", model_folder, "--dataset_name", file, "--max_steps", 1, "--report_to", "none"]
    assert main(["train", "sft", *map(str, trained), "--output_dir", str(tmp_path / "start")]) == 0
    run(model_name_or_path=tmp_path / "start", student_model=model_folder)


@pytest.mark.parametrize("name", ["rlt", "rlt/teacher_rlt"])
def test_shipped_configs(words, model_folder, name, tmp_path, capfd):
    config = ["train", "rlt", "--config", str(CONFIGS / f"{name}.yaml")]
    tiny = {
        "max_steps": 1,
        "save_steps": 1,
        "train_batch_size": 8,
        "generation_aggregation_steps": 2,
        "warmup_steps": 0,
    }
    tiny |= {"dtype": "float32", "student_model": model_folder, "use_vllm": "false", "fsdp": ""}
    assert main([*config, *words(**tiny)]) == 0, capfd.readouterr().err
    options = yaml.safe_load((tmp_path / "run" / "options.yaml").read_text())
    assert options["answer_log_prob_coeff"] == [1.0, 0.01] and options["temperature"] == 0.7
    assert (options["train_batch_size"], options["gradient_accumulation_steps"]) == (8, 1)
    again = ["train", "rlt", "--config", str(tmp_path / "run" / "options.yaml"), f"output_dir={tmp_path / 'again'}"]
    assert main(again) == 0, capfd.readouterr().err
    assert same_weights(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_funcs": "exact_match"}, "is not supported: rlt has a reward of its own"),
        ({"unbias_student_log_probs_temp": 1}, "reference of --temperature 0.7: give both alike, or a --student_model"),
        ({"mask_density": 0.1, "keep_base_weights": "false"}, "the base weights are the student: set it to true"),
        (
            {"student_answer": "{solution}"},
            "--student_answer: found '{solution}', expected text with the fields ['expl",
        ),
        ({"student_model": "/nowhere"}, "cannot load a tokenizer from /nowhere"),
    ],
)
def test_what_is_refused(words, tmp_path, capfd, changes, said):
    assert main(["train", "rlt", *words(**changes)]) in (1, 2)
    error = capfd.readouterr().err.splitlines()[-1]
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_student_that_reads_other_tokens_is_refused(words, tmp_path, model_folder, tokenizer, capfd):
    changed = type(tokenizer).from_pretrained(model_folder)
    changed.add_tokens(["<new>"])
    changed.save_pretrained(tmp_path / "other")
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path / "other")
    assert main(["train", "rlt", *words(student_model=tmp_path / "other")]) == 2
    assert "another vocabulary than the teacher: the id of '<new>' differs" in capfd.readouterr().err
