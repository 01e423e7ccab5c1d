"""The configs for users of the research code, and the page that names them: each runs, and each command is one."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from small_models import make_model, small
from transformers import LlamaConfig

from sparse_opt import MaskSet
from sparse_opt.bench.training import profiles
from sparse_opt.bench.training.baseline import main as baseline
from sparse_opt.cli import analyze, delta, doctor, mask, train
from sparse_opt.integrations.trl import command_line
from sparse_opt.trainers.batches import TokenSequence, collate_examples
from sparse_opt.trainers.models import make_masks_skippable
from sparse_opt.trainers.modes import sparse_training
from sparse_opt.trainers.recipes import minimal_dpo, ppo, rft, rlt

CHECKOUT = Path(__file__).parents[2]
CONFIGS = CHECKOUT / "examples" / "configs"
FOLDERS = ("reinforcement_casino", "sparsellm_rl", "rlt", "unit_conversion_rft", "minimal_dpo")
PAGE = CHECKOUT / "docs" / "coming_from.md"
FILES = sorted(path.relative_to(CHECKOUT) for folder in FOLDERS for path in (CONFIGS / folder).glob("*.yaml"))


def commands_of(text: str) -> list[list[str]]:
    """The words of the sparse-opt commands of a page or of a config's header, joined over lines."""
    text = re.sub(r"^#", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    spans = [*re.findall(r"`([^`\n]+)`", text), *(line.partition("  #")[0].strip() for line in text.splitlines())]
    found = []
    for span in spans:
        for launcher in (r"sparse-opt ", r"torchrun \S+ -m sparse_opt ", r"python -m (?=sparse_opt\.)"):
            if start := re.match(launcher, span):
                found.append(shlex.split(span[start.end() :]))
    return found


class Understood(Exception):
    """The options of a recipe were read."""


@pytest.fixture
def parsed(monkeypatch):
    """Parse a command's words with its own parser, and make its options."""

    def understood(*args, **kwargs):
        raise Understood

    for module, name in ((rft, "load_rows"), (rft, "_sample"), (minimal_dpo, "load_rows")):
        monkeypatch.setattr(module, name, understood)

    def parse(words: list[str]) -> None:
        name, *rest = words
        if name == "train" and rest[0] in train.TRL_ALGORITHMS:
            command_line.parse(rest[0], rest[1:])
        elif name == "train" and rest[0] == "rlt":
            command_line.parse("grpo", rest[1:], rlt.RECIPE)
        elif name == "train" and rest[0] == "ppo":
            ppo.parser().parse_words(rest[1:])
        elif name == "train" and rest[1] == "show_optimizations":
            rft.run(rest[1:])
        elif name == "train":
            with pytest.raises(Understood):
                {"rft": rft, "minimal_dpo": minimal_dpo}[rest[0]].run(rest[1:])
        elif name == "bench":
            benchmark = {"baseline": baseline.main, "profiles": profiles.main}[rest[0]]
            benchmark.__self__.parser().parse_words(rest[1:])
        else:
            {"mask": mask, "delta": delta, "analyze": analyze, "doctor": doctor}[name]._parser().parse_words(rest)

    return parse


@pytest.mark.parametrize("source", ["docs/coming_from.md", *map(str, FILES)])
def test_each_command_is_understood(source, parsed, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    commands = commands_of((CHECKOUT / source).read_text(encoding="utf-8"))
    assert commands
    for words in commands:
        parsed(words)


def test_the_page_names_each_config():
    named = set(re.findall(r"examples/configs/[\w/]+\.yaml", PAGE.read_text(encoding="utf-8")))
    assert {str(path) for path in FILES} <= named
    assert all((CHECKOUT / path).is_file() for path in named)


@pytest.fixture
def run(command):
    """`run("train", "sft", config="rlt/teacher_sft", max_steps=2)` in the test's folder; returns its output."""

    def call(*words: str, config: str, **options: object) -> str:
        given = [f"{key}={value}" for key, value in options.items()]
        return command(*words, "--config", CONFIGS / f"{config}.yaml", *given)

    return call


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory, chat_tokenizer):
    """A tiny Llama whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    model = make_model(chat_tokenizer)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files in the forms of the originals' datasets."""
    folder = tmp_path_factory.mktemp("data")
    sums = [(n, n % 7, n + n % 7) for n in range(12)]
    rows = {
        "light_r1.jsonl": [
            {"conversations": [{"from": "human", "value": f"What is {a} plus {b}?"}]}
            | {"chosen": [{"from": "gpt", "value": f"It is {c}."}], "rejected": [{"from": "gpt", "value": "No idea."}]}
            for a, b, c in sums
        ],
        "orca.jsonl": [
            {"system": "", "question": f"What is {a} plus {b}?", "chosen": f"It is {c}.", "rejected": "No."}
            for a, b, c in sums
        ],
        "openr1.jsonl": [
            {"problem": f"What is {a} plus {b}?", "solution": "It is.", "answer": str(c)} for a, b, c in sums
        ],
    }
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


TRL_TINY = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "report_to": "none"}


def test_reinforcement_casino(run, chat_folder, data, tmp_path):
    tiny = {**TRL_TINY, "model_name_or_path": chat_folder, "max_length": 64, "dtype": "float32"}
    pairs, prompts = data / "light_r1.jsonl", data / "openr1.jsonl"
    log = {"delta_log_dir": "log", "delta_log_steps": "1-2"}
    run("train", "dpo", config="reinforcement_casino/dpo_train", dataset_name=pairs, output_dir="dense", **log, **tiny)
    found = run("mask", "find", config="reinforcement_casino/mask_find", delta_log_dir="log")
    (file,) = (tmp_path / "masks" / "log").glob("sparsity_90.0pct_magnitude_step2.safetensors")
    assert str(file.name) in found
    run("mask", "find", config="reinforcement_casino/better_mask_find", delta_log_dir="log", target_step=1)
    (other,) = (tmp_path / "masks" / "log").glob("top_10.0pct_magnitude_step1.safetensors")
    of_data = {"model_name": chat_folder, "dataset": pairs, "n_samples": 4}
    assert "snip" in run("mask", "find", config="reinforcement_casino/cold_start", **of_data)
    run("mask", "compare", str(file), str(other), config="reinforcement_casino/mask_compare", png="none")
    assert (tmp_path / "overlap.csv").read_text().count("\n") > 3
    for name in ("sparse_dpo", "sparse_dpo_efficiency", "sparse_dpo_bsr"):
        sparse = {"config": f"reinforcement_casino/{name}", "output_dir": name, "mask": file}
        assert f"mask {file} of" in run("train", "dpo", dataset_name=pairs, **sparse, **tiny)
    rebuild = {"delta_log_dir": "log", "step": 1, "model_name": chat_folder, "output_dir": "rebuilt"}
    run("delta", "reconstruct", config="reinforcement_casino/reconstruct", **rebuild)
    assert (tmp_path / "rebuilt" / "config.json").is_file()
    del tiny["max_length"]
    tiny |= {"dataset_name": prompts, "num_generations": 2, "max_completion_length": 4, "reward_funcs": "exact_match"}
    log = {"delta_log_dir": "grpo_log", "delta_log_steps": "1-2"}
    run("train", "grpo", config="reinforcement_casino/grpo_train", output_dir="grpo", **log, **tiny)
    run("train", "grpo", config="reinforcement_casino/sparse_grpo", output_dir="sparse_grpo", mask=file, **tiny)


ADDING = Path(__file__).parents[2] / "docs" / "adding_a_loop.md"


def test_adding_a_loop():
    names: dict = {"__name__": "docs_adding_a_loop"}
    for block in re.findall(r"^```python\n(.*?)^```$", ADDING.read_text(), flags=re.M | re.S):
        exec(compile(block, ADDING.name, "exec"), names)
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    model = small(LlamaConfig)
    make_masks_skippable(model)
    trained = sparse_training(model, MaskSet.random(model, density=0.2, seed=0), 1e-3)
    pairs = [[TokenSequence([i, 7, own], 2) for own in (20 + i, 40 + i)] for i in range(3, 9)]
    batch, mismatched = collate_examples(pairs, 0), collate_examples(names["mismatch"](pairs), 0)
    assert mismatched.input_ids[:, 2].tolist() == [24, 25, 26, 27, 28, 23]
    losses = [names["kto_step"](trained, batch, mismatched, beta=0.5)["loss"].item() for _ in range(20)]
    assert losses[0] == 0.5 and losses[-1] < 0.4
    assert torch.is_grad_enabled()
