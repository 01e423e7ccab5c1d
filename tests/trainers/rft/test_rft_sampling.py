"""Sampling and verifying block by block: the same files however often it was interrupted, and no mixing of runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from rft_worlds import ScriptedEngine
from rollout_models import greedy_by_hand

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers.data.encoding import load_examples
from sparse_opt.trainers.data.prompts import load_prompts
from sparse_opt.trainers.rft import evaluate as rft_evaluate
from sparse_opt.trainers.rft import sampling as rft_sampling
from sparse_opt.trainers.rft import train as rft
from sparse_opt.trainers.rft.datagen import DatagenConfig, datagen, fingerprint
from sparse_opt.trainers.rft.evaluate import TestConfig
from sparse_opt.trainers.rollouts import GenerateEngine

N_PROMPTS = 10


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"What is {i} plus {2 * i}?", "answer": str(3 * i)} for i in range(N_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def options(tmp_path, model_folder, prompts_file):
    def make(config_class=DatagenConfig, **changes):
        values = {
            "policy_name": str(model_folder),
            "dataset": str(prompts_file),
            "output_dir": tmp_path / "data",
            "dtype": "fp32",
            "device": "cpu",
            "reward_functions": ["rft_worlds:short"],
            "prompts_per_batch": 4,
            "max_completion_length": 6,
            "seed": 3,
        }
        sampled = {"n_generations": 3} if config_class is DatagenConfig else {}
        return config_class(**{**values, **sampled, **changes})

    return make


@pytest.fixture
def scripted(monkeypatch, tokenizer):
    """`scripted(["42", ...])`: these are the completions that will be sampled."""

    def use(completions):
        engine = ScriptedEngine(tokenizer, completions)
        monkeypatch.setattr(rft_sampling, "make_engine", lambda *args, **kwargs: engine)
        return engine

    return use


def kept(report):
    return [json.loads(line) for line in Path(report["kept_file"]).read_text().splitlines()]


def untimed(report):
    timed = ("_time_s", "tokens_per_s", "n_parts_resumed", "text", "_file")
    return {name: value for name, value in report.items() if not name.endswith(timed)}


def rows_of(folder):
    return [json.loads(path.read_text())["rows"] for path in sorted((folder / "parts").glob("*.json"))]


class KilledError(Exception):
    pass


def kill_in_block(monkeypatch, config, block):
    """Run `datagen` until it dies in this block, from 0."""
    original = rft_sampling._sample_block

    def sample_block(options, number, *args):
        if number == block:
            raise KilledError
        return original(options, number, *args)

    with monkeypatch.context() as patch:
        patch.setattr(rft_sampling, "_sample_block", sample_block)
        with pytest.raises(KilledError):
            datagen(config)


@pytest.fixture
def many_ends(monkeypatch):
    """A quarter of the vocabulary ends a completion: a random model's hardly ever end by themselves."""
    monkeypatch.setattr(
        rft_sampling,
        "make_engine",
        lambda name, model, tokenizer, **settings: GenerateEngine(
            model, pad_id=tokenizer.pad_token_id, eos_ids=range(2, len(tokenizer), 4)
        ),
    )


def test_a_resumed_run_is_the_uninterrupted_one(options, tmp_path, monkeypatch, many_ends):
    whole = datagen(options(output_dir=tmp_path / "whole"))
    config = options(output_dir=tmp_path / "killed")
    kill_in_block(monkeypatch, config, 1)
    assert not (tmp_path / "killed/kept.jsonl").exists()
    (tmp_path / "killed/parts/.000001.json.77.ab.tmp").write_text('{"rows": [')  # what a kill may leave
    kill_in_block(monkeypatch, dataclasses.replace(config, resume=True), 2)
    resumed = datagen(dataclasses.replace(config, resume=True))
    assert (whole["n_parts_resumed"], resumed["n_parts_resumed"]) == (0, 2)
    assert untimed(resumed) == untimed(whole)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert Path(resumed["kept_file"]).read_bytes() == Path(whole["kept_file"]).read_bytes()
    assert 0 < whole["n_kept"] < whole["n_completions"] == 3 * N_PROMPTS
    # Nothing is left to do, and nothing is done again.
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed/parts").glob("*.json")}
    assert untimed(datagen(dataclasses.replace(config, resume=True))) == untimed(whole)
    assert parts == {path: path.stat().st_mtime_ns for path in parts}


@pytest.mark.parametrize(("stage", "config_class"), [("datagen", DatagenConfig), ("test", TestConfig)])
def test_trackers_get_the_report(options, tmp_path, stage, config_class):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = options(config_class, report_to=["tensorboard"], subset_size=2)
    report = rft.STAGES[stage][1](config)
    events = accumulator.EventAccumulator(str(tmp_path / "data" / "tensorboard"))
    events.Reload()
    found = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    for name in ("accuracy", "answer_rate", "n_completions", "tokens_per_s"):
        assert found[f"{stage}/{name}"] == pytest.approx(report[name], rel=1e-6)


def test_resume_of_nothing_begins(options):
    assert datagen(options(resume=True))["n_parts_resumed"] == 0


def test_the_seed_decides(options, tmp_path):
    torch.manual_seed(11)
    first = datagen(options(output_dir=tmp_path / "a"))
    torch.manual_seed(12)
    again = datagen(options(output_dir=tmp_path / "b"))
    datagen(options(output_dir=tmp_path / "c", seed=4))
    assert untimed(first) == untimed(again)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert rows_of(tmp_path / "a") != rows_of(tmp_path / "c")
    # Blocks draw from states of their own.
    first_block, second_block = rows_of(tmp_path / "a")[:2]
    assert [row["completions"] for row in first_block] != [row["completions"] for row in second_block]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "temperature is 0.5; expected 1.0, as in the run"),
        ({"seed": 4}, "seed is 4; expected 3, as in the run"),
        ({"keep": "best"}, "keep is best; expected all, as in the run"),
    ],
)
def test_another_run_is_not_gone_on_with(options, monkeypatch, changes, message):
    kill_in_block(monkeypatch, options(), 1)
    with pytest.raises(ConfigError, match=message):
        datagen(options(resume=True, **changes))


def test_other_prompts_and_other_weights_are_another_run(options, tmp_path, monkeypatch, prompts_file, model_folder):
    own_prompts, own_model = tmp_path / "prompts.jsonl", tmp_path / "model"
    shutil.copy(prompts_file, own_prompts)
    shutil.copytree(model_folder, own_model)
    config = options(dataset=str(own_prompts), policy_name=str(own_model))
    kill_in_block(monkeypatch, config, 1)
    rows = own_prompts.read_text()
    own_prompts.write_text(rows.replace('"answer": "3"', '"answer": "4"'))
    with pytest.raises(ConfigError, match="the prompts have digest [0-9a-f]{32}; expected [0-9a-f]{32}, as in the run"):
        datagen(dataclasses.replace(config, resume=True))
    own_prompts.write_text(rows)
    from safetensors.torch import load_file, save_file

    weights = load_file(own_model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, own_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="the weights have digest"):
        datagen(dataclasses.replace(config, resume=True))


def test_a_folder_that_holds_something_is_refused(options, monkeypatch):
    kill_in_block(monkeypatch, options(), 1)
    with pytest.raises(ConfigError, match="exists and is not empty; .*--resume"):
        datagen(options())


def test_a_damaged_part_is_named(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 2)
    part = tmp_path / "data/parts/000001.json"
    part.write_text(part.read_text()[:-30])
    with pytest.raises(DataError, match="parts/000001.json: cannot be read: .*; remove it to sample it again"):
        datagen(options(resume=True))
    part.unlink()
    assert datagen(options(resume=True))["n_parts_resumed"] == 1


def test_a_part_with_another_reward_is_damaged(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 2)
    part = tmp_path / "data/parts/000001.json"
    content = json.loads(part.read_text())
    content["rows"][0]["rewards"][0] = 7.0
    part.write_text(json.dumps(content))
    with pytest.raises(DataError, match="parts/000001.json: damaged: .*; remove it to sample it again"):
        datagen(options(resume=True))
    part.write_text("[]")
    with pytest.raises(DataError, match="000001.json: cannot be read: holds a list, expected an object; remove it"):
        datagen(options(resume=True))


@pytest.mark.parametrize(("work", "config_class"), [(datagen, DatagenConfig), (rft_evaluate.test, TestConfig)])
def test_a_second_run_in_the_folder_is_refused(options, monkeypatch, many_ends, work, config_class):
    original, refused = rft_sampling._sample_block, []
    config = options(config_class)

    def sample_block(*args):
        if not refused:
            for resume in (False, True):
                with pytest.raises(ConfigError, match="'output_dir': another run is writing to .*data") as error:
                    work(dataclasses.replace(config, resume=resume))
                refused.append(error.value)
        return original(*args)

    monkeypatch.setattr(rft_sampling, "_sample_block", sample_block)
    work(config)
    assert len(refused) == 2
    assert "run.lock" not in [path.name for path in config.folder("").iterdir()]


def test_a_run_that_was_killed_as_it_began_is_resumed(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 1)
    (tmp_path / "data/inputs.json").unlink()
    (tmp_path / "data/parts/000000.json").unlink()
    datagen(options(resume=True))


def test_inputs_that_are_gone_are_named(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 1)
    (tmp_path / "data/inputs.json").unlink()
    with pytest.raises(DataError, match="inputs.json: cannot be read: No such file"):
        datagen(options(resume=True))


def test_a_run_that_fails_before_its_first_part_leaves_nothing(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 0)
    assert not (tmp_path / "data").exists()


def test_an_option_that_came_later_had_its_default(options, tmp_path, monkeypatch):
    kill_in_block(monkeypatch, options(), 1)
    file = tmp_path / "data/options.yaml"
    lines = [line for line in file.read_text().splitlines(keepends=True) if not line.startswith("max_rows")]
    file.write_text("".join(lines))
    datagen(options(resume=True))


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (DatagenConfig, {"n_generations": 0}, "'n_generations' is 0: expected at least 1"),
        (DatagenConfig, {"prompts_per_batch": 0}, "'prompts_per_batch' is 0"),
        (DatagenConfig, {"top_p": 0.0}, "'top_p' is 0.0: expected more than 0"),
        (DatagenConfig, {"temperature": 0.0, "n_generations": 1}, "'temperature' is 0: rejection sampling is random"),
        (TestConfig, {"n_generations": 2}, "'n_generations' is 2 at temperature 0"),
        (DatagenConfig, {"reward_functions": []}, "'reward_functions' is empty"),
        (DatagenConfig, {"reward_weights": [1.0, 2.0]}, "'reward_weights' has 2 values, reward_functions 1"),
        (DatagenConfig, {"reward_threshold": float("nan")}, "'reward_threshold' is nan"),
    ],
)
def test_options_that_cannot_be(options, config_class, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(config_class, **changes)


# What is kept

GRADED = ["42", "42 ", "43", "the 42!", "skip", "42..."]


@pytest.mark.parametrize(
    ("changes", "expected", "counts"),
    [
        ({}, ["42", "the 42!"], (2, 1, 1, 0)),
        ({"deduplicate": "none"}, ["42", "42 ", "the 42!"], (2, 1, 0, 0)),
        ({"keep": "first"}, ["42"], (2, 1, 1, 1)),
        ({"keep": "best"}, ["the 42!"], (2, 1, 1, 1)),
        ({"reward_threshold": 2.0}, ["the 42!"], (4, 1, 0, 0)),
        ({"reward_threshold": 3.0}, [], (6, 0, 0, 0)),
    ],
)
def test_what_is_kept(options, scripted, prompts_file, changes, expected, counts):
    engine = scripted(GRADED)
    config = options(
        **{"reward_functions": ["rft_worlds:graded"], "n_generations": 6, "subset_size": 1, "seed": 0, **changes}
    )
    report = datagen(config)
    assert [row["completion"] for row in kept(report)] == expected
    names = ("n_wrong", "n_unfinished", "n_duplicates", "n_not_chosen")
    assert tuple(report[name] for name in names) == counts
    assert report["n_kept"] == len(expected) == 6 - sum(counts)
    assert report["n_prompts_kept"] == report["solved"] == bool(expected)
    threshold = changes.get("reward_threshold", 1.0)
    n_right = sum(reward >= threshold for reward in (1, 1, 0, 2, 1 + (len("42...") > 4)))
    assert (report["n_completions"], report["n_judged"]) == (6, 5)
    assert report["accuracy"] == n_right / 5
    assert report["answer_rate"] == 1.0
    assert report["finished"] == pytest.approx(5 / 6)
    assert report["reward"] == pytest.approx((1 + 1 + 0 + 2 + 2) / 5)
    assert engine.closed


def test_completions_are_compared_within_their_prompt(options, scripted):
    scripted(["42"] * 2 * N_PROMPTS)
    report = datagen(options(reward_functions=["rft_worlds:graded"], n_generations=2))
    assert report["n_kept"] == report["n_duplicates"] == N_PROMPTS


def test_no_reward_for_anything_is_an_error(options, scripted):
    scripted(["skip"] * N_PROMPTS)
    with pytest.raises(DataError, match="no reward function applies to any of 10 completions"):
        datagen(options(reward_functions=["rft_worlds:graded"], n_generations=1))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("so 6*7=42.", "Thus 6 * 7 = 42", True),
        ("so 6*7=42", "so 7*6=42", False),
        ("1+2=3, 3*4=12", "3*4=12, 1+2=3", False),  # the paper: another order is another path
        ("(1+2)/3 = 1.0", "we get (1 + 2) / 3 = 1.0", True),
        ("it is 42", "it  is\n42", True),
        ("it is 42", "it was 42", False),
    ],
)
def test_equations_say_what_is_the_same(one, other, same):
    assert (fingerprint(one, "equations") == fingerprint(other, "equations")) is same


def test_kept_rows_train_what_was_sampled(options, scripted, tokenizer):
    scripted(["It is 42."] * N_PROMPTS)
    config = options(reward_functions=["rft_worlds:graded"], n_generations=1)
    report = datagen(config)
    trained, _ = load_examples("demonstration", report["kept_file"], "train", tokenizer, max_length=64)
    prompts, _ = load_prompts(config.dataset, "train", tokenizer, max_prompt_length=64)
    answer_ids = [*tokenizer("It is 42.", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert [sequence.ids for (sequence,) in trained] == [[*prompt.ids, *answer_ids] for prompt in prompts]
    assert [sequence.prompt_length for (sequence,) in trained] == [len(prompt.ids) for prompt in prompts]


def test_messages_stay_messages(options, scripted, chat_tokenizer, model_folder, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(model_folder, folder)
    chat_tokenizer.save_pretrained(folder)
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "6 times 7?"}], "answer": "42"}) + "\n")
    scripted(["42"])
    config = options(policy_name=str(folder), dataset=str(data), reward_functions=["exact_match"], n_generations=1)
    report = datagen(config)
    assert kept(report) == [
        {
            "prompt": [{"role": "user", "content": "6 times 7?"}],
            "completion": [{"role": "assistant", "content": "42"}],
            "reward": 1.0,
        }
    ]
    ((sequence,),), _ = load_examples("demonstration", report["kept_file"], "train", chat_tokenizer, max_length=64)
    ((prompt,), _) = load_prompts(str(data), "train", chat_tokenizer, max_prompt_length=64)
    assert sequence.ids[: sequence.prompt_length] == prompt.ids
    assert chat_tokenizer.decode(sequence.ids[sequence.prompt_length :]) == "42</s>"


# The test stage


def test_accuracy_of_given_answers(options, scripted):
    right = [str(3 * i) for i in range(N_PROMPTS)]
    answers = [answer for i, value in enumerate(right) for answer in (value, value if i < 4 else "no", "")]
    scripted(answers)
    config = options(TestConfig, reward_functions=["exact_match"], n_generations=3, temperature=1.0)
    summary = rft.test(config)
    assert summary["accuracy"] == pytest.approx((10 + 4) / 30)
    assert summary["accuracy_stderr"] == pytest.approx((14 / 30 * 16 / 30 / 10) ** 0.5)
    assert summary["answer_rate"] == pytest.approx(20 / 30)
    assert summary["solved"] == 1.0
    rows = [json.loads(line) for line in Path(summary["results_file"]).read_text().splitlines()]
    assert [row["pass_rate"] for row in rows] == pytest.approx([2 / 3] * 4 + [1 / 3] * 6)
    assert [row["answer"] for row in rows] == right
    assert rows[0]["completions"] == ["0", "0", ""]
    assert "accuracy 0.4667 +- 0.1578" in summary["text"]
    assert json.loads((config.folder("test") / "summary.json").read_text())["accuracy"] == summary["accuracy"]


def test_greedy_is_greedy(options, model, tokenizer):
    config = options(TestConfig, subset_size=3)
    summary = rft.test(config)
    prompts, _ = load_prompts(config.dataset, "train", tokenizer, max_prompt_length=64, subset_size=3, seed=3)
    rows = [json.loads(line) for line in Path(summary["results_file"]).read_text().splitlines()]
    for row, prompt in zip(rows, prompts, strict=True):
        by_hand = greedy_by_hand(model, prompt.ids, 6)
        assert row["completions"] == [tokenizer.decode(by_hand, skip_special_tokens=True)]
        assert row["finished"] == [by_hand[-1] == tokenizer.eos_token_id]


def test_output_folders_have_names(options, tmp_path):
    config = options(output_dir=None, mount_dir=tmp_path / "mount")
    assert config.folder("datagen") == tmp_path / "mount/rft_datagen_tiny_llama"
