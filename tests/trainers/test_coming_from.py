"""The configs for users of the research code, and the page that names them: each runs, and each command is one."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import make_model
from small_classifiers import BAD, GOOD, PLAIN, save_sentiment_classifier
from transformers import GPT2Config, GPT2LMHeadModel

from sparse_opt.bench.training.baseline import main as baseline
from sparse_opt.bench.training.baseline import run as baseline_run
from sparse_opt.bench.training.profiles import main as profiles
from sparse_opt.bench.training.profiles import run as profiles_run
from sparse_opt.bench.training.profiles.main import ProfilesOptions
from sparse_opt.cli import analyze, delta, doctor, mask, train
from sparse_opt.cli.main import main
from sparse_opt.config import add_options, parse_config
from sparse_opt.integrations.trl import command_line
from sparse_opt.option_parser import CommandParser
from sparse_opt.trainers import rft
from sparse_opt.trainers.data import question_pairs, teacher_data
from sparse_opt.trainers.dpo import DPOConfig
from sparse_opt.trainers.recipes import ppo
from sparse_opt.trainers.rlt import RLTConfig

CHECKOUT = Path(__file__).parents[2]
CONFIGS = CHECKOUT / "examples" / "configs"
FOLDERS = ("reinforcement_casino", "sparsellm_rl", "rlt", "unit_conversion_rft", "minimal_dpo")
PAGE = CHECKOUT / "docs" / "coming_from.md"
FILES = sorted(path.relative_to(CHECKOUT) for folder in FOLDERS for path in (CONFIGS / folder).glob("*.yaml"))
ON_CPU = ["--device", "cpu", "--dtype", "fp32"]


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


def parsed(words: list[str]) -> None:
    """Parse a command's words with its own parser, and make its options."""
    name, *rest = words
    if name.startswith("sparse_opt."):
        converters = {
            "teacher_data": teacher_data.TeacherDataConfig,
            "question_pairs": question_pairs.QuestionPairsConfig,
        }
        parse_config(converters[name.rpartition(".")[2]], rest)
    elif name == "train":
        algorithm, *rest = rest
        if algorithm in train.TRL_ALGORITHMS:
            command_line.parse(algorithm, rest)
            return
        if algorithm == "ppo":
            ppo.parser().parse_words(rest)
            return
        module = __import__(f"sparse_opt.trainers.{algorithm.removeprefix('minimal_')}", fromlist=["train"])
        values = vars(train._algorithm_parser(algorithm, module).parse_words(rest))
        values.pop("json")
        config_class = module.STAGES[values.pop("stage")][0] if algorithm == "rft" else None
        (config_class or getattr(module, train.ALGORITHMS[algorithm]))(**values)
    elif name == "bench" and rest[0] == "baseline":
        baseline.main.__self__.parser().parse_words(rest[1:])
    elif name in ("mask", "delta", "analyze", "doctor"):
        {"mask": mask, "delta": delta, "analyze": analyze, "doctor": doctor}[name]._parser().parse_words(rest)
    else:
        assert words[:2] == ["bench", "profiles"]
        parse_config(ProfilesOptions, rest[1:])


@pytest.mark.parametrize("source", ["docs/coming_from.md", *map(str, FILES)])
def test_each_command_is_understood(source, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    commands = commands_of((CHECKOUT / source).read_text(encoding="utf-8"))
    assert commands
    for words in commands:
        parsed(words)


def test_options_that_the_page_names_exist():
    classes = [DPOConfig, RLTConfig, *(config_class for config_class, _ in rft.STAGES.values())]
    classes += [question_pairs.QuestionPairsConfig, teacher_data.TeacherDataConfig, ProfilesOptions]
    parsers = [ppo.parser(), *(add_options(CommandParser(), config_class) for config_class in classes)]
    for group in (mask._parser(), analyze._parser(), delta._parser()):
        parsers += next(action for action in group._actions if action.dest == "action").choices.values()
    parsers += [command_line.parser(algorithm) for algorithm in train.TRL_ALGORITHMS]
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    # The second column of the tables is what this project has.
    ours = [line.split(" | ")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count(" | ") >= 2]
    named = {flag for cell in ours for flag in re.findall(r"(?<=[` ])--[a-z_0-9-]+", cell)}
    assert named > {"--prompt_prefix_words", "--sample_steps", "--oversample"}
    assert named - known == {"--config", "--nproc_per_node", "--no-build-isolation"}  # of every parser, torchrun, pip


def test_the_page_names_each_config():
    named = set(re.findall(r"examples/configs/[\w/]+\.yaml", PAGE.read_text(encoding="utf-8")))
    assert {str(path) for path in FILES} <= named
    assert all((CHECKOUT / path).is_file() for path in named)


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """`run("train", "sft", config="rlt/teacher_sft", max_steps=2)` in the test's folder; returns its output."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, config: str, **options: object) -> str:
        capfd.readouterr()
        given = [f"{key}={value}" for key, value in options.items()]
        code = main([*words, "--config", str(CONFIGS / f"{config}.yaml"), *given])
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

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
        "stratos.jsonl": [
            {"question": f"What is {a} plus {b}?", "solution": str(c), "explanation": "Count."} for a, b, c in sums
        ],
        "imdb.jsonl": [{"text": " ".join([*(GOOD if a % 2 else BAD), *PLAIN]), "label": a % 2} for a, _, _ in sums],
    }
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "train.json").write_text(json.dumps([[f"What is {a} plus {b}?", float(c)] for a, b, c in sums]))
    return folder


TINY = {"device": "cpu", "dtype": "fp32", "n_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1}
TRL_TINY = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "report_to": "none"}


def test_reinforcement_casino(run, chat_folder, data, tmp_path):
    tiny = {**TRL_TINY, "model_name_or_path": chat_folder, "max_length": 64, "dtype": "float32"}
    pairs, prompts = data / "light_r1.jsonl", data / "openr1.jsonl"
    log = {"delta_log_dir": "log", "delta_log_steps": "1-2"}
    run("train", "dpo", config="reinforcement_casino/dpo_train", dataset_name=pairs, output_dir="dense", **log, **tiny)
    found = run("mask", "find", config="reinforcement_casino/mask_find", delta_log_dir="log")
    (file,) = (tmp_path / "masks" / "log").glob("sparsity_90.0pct_magnitude_step2.safetensors")
    assert "accard" in found and str(file.name) in found
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


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_reinforcement_casino_timing(run, chat_folder, data, tmp_path, monkeypatch, algorithm):
    # In this process, where the benchmark starts one for each mode.
    monkeypatch.setattr(baseline, "_run", lambda job, folder, own_data: baseline_run.run(job))
    tiny = {"model_name": chat_folder, "modes": "dense", "device": "cpu", "n_steps": 2, "n_warmup": 1}
    tiny |= {"dataset": data / ("orca.jsonl" if algorithm == "dpo" else "openr1.jsonl"), "sequence_length": 64}
    tiny |= {"max_new_tokens": 4, "n_generations": 2, "batch_size": 2}
    run("bench", "baseline", algorithm, config=f"reinforcement_casino/{algorithm}_timing_baseline", **tiny)
    assert json.loads((tmp_path / f"timing_{algorithm}.json").read_text())


def test_sparsellm_rl(run, tokenizer, data, tmp_path):
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    classifier = save_sentiment_classifier(tmp_path / "classifier")
    tiny = {"policy_name": "./gpt2", "dataset_name": data / "imdb.jsonl", "reward_model_name": classifier}
    tiny |= {"num_updates": 2, "batch_size": 2, "mini_batch_size": 2, "max_new_tokens": 14}
    tiny |= {"rank_log_every": 1, "delta_log_steps": "1-2", "device": "cpu", "dtype": "float32"}
    run("train", "ppo", config="sparsellm_rl/main_ppo", **tiny)
    steps = [json.loads(line) for line in (tmp_path / "checkpoints_gpt2_medium_ppo/metrics.jsonl").open()]
    assert all(12 <= step["tokens/responses_len_mean"] <= 14 for step in steps)
    samples = [json.loads(line) for line in (tmp_path / "checkpoints_gpt2_medium_ppo/samples.jsonl").open()]
    assert all("Sentiment: Positive review." in sample["prompt"] for sample in samples)
    assert "wte.weight" in run("analyze", "shapes", config="sparsellm_rl/weight_shapes", model_name="gpt2")
    assert "tied: lm_head.weight" in run("analyze", "coverage", config="sparsellm_rl/coverage", no_plots=True)
    run("analyze", "ranks", config="sparsellm_rl/layer_ranks", no_plots=True)
    ranks = json.loads((tmp_path / "plots" / "ranks.json").read_text())
    assert [step["step"] for step in ranks["steps"]] == [1, 2] and len(ranks["matrices"]) == 3


def test_rlt(run, chat_folder, data):
    words = ["--dataset", data / "stratos.jsonl", "--tokenizer", chat_folder, "--output", "teacher.jsonl"]
    assert teacher_data.main(list(map(str, words))) == 0
    sft = {**TRL_TINY, "model_name_or_path": chat_folder, "max_length": 1024}
    run("train", "sft", config="rlt/teacher_sft", **sft)
    tiny = {**TINY, "policy_name": chat_folder, "max_length": 1024}
    tiny |= {"dataset": data / "stratos.jsonl", "rollout_engine": "generate", "n_generations": 2}
    tiny |= {"max_completion_length": 4, "vllm_gpu_memory_utilization": 0.3}
    tiny |= {"generation_aggregation_steps": "none", "vllm_enable_prefix_caching": "none"}
    run("train", "rlt", config="rlt/teacher_rlt_mono", **tiny)
    run("train", "rlt", config="rlt/teacher_rlt", student_model=chat_folder, **tiny)


def test_unit_conversion_rft(run, chat_folder, data, tmp_path, monkeypatch):
    def convert(source, output, *words):
        assert question_pairs.main(["--input", str(source), "--output", output, *words]) == 0

    convert(data / "train.json", "data/prompts.jsonl", "--style", "chat", "--system", "Add.")
    tiny = {"policy_name": chat_folder, "device": "cpu", "max_completion_length": 4}
    sampled = {**tiny, "subset_size": 2, "n_generations": 2, "reward_threshold": -1}
    run("train", "rft", "datagen", config="unit_conversion_rft/datagen", **sampled)
    # An untrained model hardly ever ends its answers, so that none is kept.
    kept = {"prompt": [{"role": "user", "content": "What is 2 plus 2?"}], "reward": 1.0}
    kept |= {"completion": [{"role": "assistant", "content": "2 + 2 = <answer>4</answer>"}]}
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(kept) + "\n" for _ in range(4)))
    convert("kept.jsonl", "data/rft.jsonl")
    convert(data / "train.json", "data/valid.jsonl")
    tiny |= {"max_length": 64, "n_epochs": 1, "lora_rank": 2}
    del tiny["max_completion_length"]
    run("train", "rft", "train", config="unit_conversion_rft/sft", batch_size=2, gradient_accumulation_steps=1, **tiny)
    run("train", "rft", "train", config="unit_conversion_rft/train_fast", output_dir="fast", **tiny)
    run("train", "rft", "train", config="unit_conversion_rft/train", batch_size=2, **tiny)
    tested = run("train", "rft", "test", config="unit_conversion_rft/test", device="cpu", subset_size=2)
    assert "accuracy" in tested and "answer rate" in tested


def test_unit_conversion_profiles(run, chat_folder, data, tmp_path, monkeypatch):
    jobs = []

    def measured(job):
        """Check the options of a configuration, without the minute that its stages take (tests/bench runs them)."""
        for stage, options in job.values.items():
            profiles_run.configured(rft.STAGES[stage][0], {"dataset": "kept.jsonl", **options})
        jobs.append(job.name)
        found = {"wall_s": 2.0, "work_s": 1.0, "tokens_per_s": 1.0, "peak_memory_bytes": None, "n_kept": 1}
        found |= {"optimizer_bytes": {}, "accuracy": 0.5, "answer_rate": 1.0, "n_prompts": 100}
        stages = dict.fromkeys(rft.STAGES, found)
        return {"name": job.name, "stages": stages, "checkpoint": None, "peak_resident_bytes": 1}

    monkeypatch.setattr(profiles, "_run", measured)
    tiny = {"model_name": chat_folder, "device": "cpu", "repeats": 1}
    shown = run("bench", "profiles", config="unit_conversion_rft/compare_profiles", **tiny)
    assert jobs[:2] == ["start", "plain"] and {"conservative", "balanced", "aggressive"} <= set(jobs)
    assert "aggressive" in shown and (tmp_path / "profiles.json").is_file()


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_minimal_dpo(run, chat_folder, data, tmp_path, monkeypatch, whose):
    theirs = (CONFIGS / "minimal_dpo" / "config_dpo.yaml").read_text(encoding="utf-8").partition("as_in_its_code:")[0]
    (tmp_path / "theirs.yaml").write_text(theirs, encoding="utf-8")
    config = "minimal_dpo/config_dpo" if whose == "ours" else tmp_path / "theirs"
    tiny = {"policy_name": chat_folder, "ref_name": chat_folder, "dataset": data / "orca.jsonl", "device": "cpu"}
    tiny |= {"precision": "fp32", "dataset_split": "train", "max_len": 64, "batch_size": 4, "eval_steps": 3}
    run("train", "minimal_dpo", config=config, **tiny)
    folder = tmp_path / "mounts" / "output"
    summary = json.loads(next(folder.rglob("summary.json")).read_text())
    assert summary["n_steps"] == 3  # 12 rows, less the tenth that is held out, by 4
    assert (folder / "dpo_model" / "model.safetensors").is_file()
    assert (folder / "logs" / "margins" / "margins_log.jsonl").is_file() == (whose == "ours")
