"""Options under the names of other trainers: aliases, settings in other units, sections of YAML files, and hints."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest

from sparse_opt.config import parse_config, to_yaml
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.data.order import held_out
from sparse_opt.trainers.dpo import DPOConfig
from sparse_opt.trainers.grpo import GRPOConfig
from sparse_opt.trainers.ppo import PPOConfig
from sparse_opt.trainers.rft.train import RFTConfig
from sparse_opt.trainers.rlt import RLTConfig
from sparse_opt.trainers.run.run_files import averages
from sparse_opt.trainers.sft import SFTConfig

NEEDED = ["policy_name=m", "dataset=d"]


@pytest.mark.parametrize("config_class", [SFTConfig, DPOConfig, GRPOConfig, PPOConfig, RLTConfig, RFTConfig])
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("model_name=x", "policy_name"),
        ("model_name_or_path=x", "policy_name"),
        ("max_steps=400", "n_steps"),
        ("num_train_epochs=2", "n_epochs"),
        ("dataset_name=x", "dataset"),
        ("max_seq_length=77", "max_length"),
        ("lr=0.5", "learning_rate"),
        ("lr_scheduler_type=cosine", "lr_schedule"),
        ("grad_accum=2", "gradient_accumulation_steps"),
        ("adam_eps=0.5", "adam_epsilon"),
        ("wandb_project=x", "project_name"),
        ("save_every=7", "save_steps"),
        ("epochs=2", "n_epochs"),
        ("per_device_train_batch_size=16", "batch_size"),
        ("optimizer=sgd", "optim"),
        ("torch_dtype=fp32", "dtype"),
        ("grad_clip=0.5", "max_grad_norm"),
        ("save_interval=7", "save_steps"),
        ("eval_interval=7", "eval_steps"),
        ("log_interval=7", "logging_steps"),
        ("max_len=77", "max_length"),
        ("subset=5", "subset_size"),
        ("log_steps=3", "logging_steps"),
        ("torch_compile=true", "compile"),
        ("use_compile=true", "compile"),
    ],
)
def test_an_alias_is_its_option_in_every_loop(config_class, alias, name):
    needed = [*NEEDED, *(["reward_functions=exact_match"] if config_class is PPOConfig else [])]
    word = f"{name}={alias.partition('=')[2]}"
    found = parse_config(config_class, [*needed, alias])
    assert found == parse_config(config_class, [*needed, word]) != parse_config(config_class, needed)


def test_a_subset_is_a_number_or_a_split():
    assert parse_config(DPOConfig, [*NEEDED, "subset=5"]).subset_size == 5
    config = parse_config(DPOConfig, [*NEEDED, "subset=train[:90%]"])
    assert (config.dataset_split, config.subset_size, config.subset) == ("train[:90%]", None, None)


def test_warm_up_as_a_share_of_the_steps():
    config = parse_config(DPOConfig, [*NEEDED, "warmup_ratio=0.05", "n_steps=50"])
    config.set_length(10)
    assert config.warmup_steps == 3
    config = parse_config(DPOConfig, [*NEEDED, "warmup_ratio=0.05", "n_steps=50", "warmup_steps=0"])
    config.set_length(10)
    assert config.warmup_steps == 3
    config = DPOConfig(policy_name="m", dataset="d", warmup_ratio=0.05, n_steps=50, warmup_steps=20)
    config.set_length(10)
    assert config.warmup_steps == 20
    with pytest.raises(ConfigError, match="'warmup_ratio' is 1.5: expected at least 0, at most 1"):
        parse_config(DPOConfig, [*NEEDED, "warmup_ratio=1.5"])


def test_examples_that_are_held_out(dpo_options, pairs, read_metrics):
    summary = dpo.train(dpo_options(eval_ratio=0.25, eval_steps=2, n_epochs=1))
    assert summary["n_steps"] == math.ceil(len(pairs) * 0.75 / 4) and summary["last_evaluation"]["eval_loss"] > 0
    examples = list(range(10))
    train, held = held_out(examples, 0.3, 5, "d")
    assert sorted(train + held) == examples and len(held) == 3 and held_out(examples, 0.3, 5, "d") == (train, held)
    assert held_out(examples, 0.3, 6, "d") != (train, held)
    with pytest.raises(DataError, match="dataset d: 0.01 of 10 examples are 0"):
        held_out(examples, 0.01, 5, "d")
    with pytest.raises(ConfigError, match="'eval_ratio' is 0.1, and eval_dataset is x"):
        dpo_options(eval_ratio=0.1, eval_dataset="x")


def test_num_generations_is_an_alias():
    assert parse_config(GRPOConfig, [*NEEDED, "--num_generations", "4"]).n_generations == 4


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("bf16=true", "bf16"),
        ("bf16=false", "fp32"),
        ("dtype=fp32", "fp32"),
        ("dtype=fp16", "fp16"),
        ("fp16=true", "fp16"),
        ("fp16=true bf16=false", "fp16"),
        ("fp16=false", "bf16"),
        ("fp16=false bf16=false", "fp32"),
        ("bf16=true fp16=false", "bf16"),
    ],
)
def test_bf16_and_fp16_are_aliases_of_a_dtype(words, dtype, tmp_path):
    config = parse_config(DPOConfig, [*NEEDED, *words.split()])
    assert config.dtype == dtype
    (tmp_path / "options.yaml").write_text(to_yaml(config))
    assert parse_config(DPOConfig, ["--config", str(tmp_path / "options.yaml")]) == config


def test_batches_of_each_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert parse_config(DPOConfig, [*NEEDED, "per_device_train_batch_size=2"]).batch_size == 6


def test_passes_over_the_data_are_steps():
    options = [*NEEDED, "n_epochs=1.5", "batch_size=4", "gradient_accumulation_steps=2", "save_strategy=epoch"]
    config = parse_config(DPOConfig, options)
    config.set_length(21)  # 2.625 steps
    assert (config.n_steps, config.save_steps) == (4, 3)
    config = parse_config(DPOConfig, [*options, "delta_log_steps=5"])
    with pytest.raises(ConfigError, match="'delta_log_steps' is '5': selects no step of 1 to n_steps 4"):
        config.set_length(21)
    with pytest.raises(ConfigError, match="expected at most"):
        dataclasses.replace(config, n_epochs=1e9).set_length(10**6)


def test_a_run_of_epochs_and_its_resumed_rest(dpo_options, read_metrics, tmp_path):
    options = {"n_epochs": 0.5, "save_strategy": "epoch", "warmup_ratio": 0.5, "output_dir": tmp_path / "run"}
    whole = dpo.train(dpo_options(**options))
    n_examples = whole["data"]["n_examples"]
    assert whole["n_steps"] == -(-n_examples // (2 * dpo_options().examples_per_step)) > 1
    options |= {"output_dir": tmp_path / "again", "n_epochs": 2.0}
    first = dpo.train(dpo_options(**options))
    # As if it had been killed before it saved the final model.
    (tmp_path / "again" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "again" / "final")
    resumed = dpo.train(dpo_options(**options, resume=True))
    assert resumed["n_steps"] == first["n_steps"] and resumed["last"]["loss"] == first["last"]["loss"]
    assert len(read_metrics(resumed)) == first["n_steps"]


def test_save_strategy():
    assert parse_config(DPOConfig, [*NEEDED, "save_steps=5", "save_strategy=steps"]).save_steps == 5
    assert DPOConfig(policy_name="m", dataset="d", save_steps=5, save_strategy="no").save_steps is None


def test_no_in_yaml_is_the_word(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("save_strategy: no\n")  # YAML's false
    assert parse_config(DPOConfig, [*NEEDED, "--config", str(file)]).save_strategy == "no"
    file.write_text("save_strategy: yes\n")
    with pytest.raises(ConfigError, match="'save_strategy' .*is True: expected one of no, steps, epoch"):
        parse_config(DPOConfig, [*NEEDED, "--config", str(file)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["save_strategy=steps"], "'save_strategy' is steps: expected save_steps"),
        (["fp16=false", "dtype=fp16"], "'fp16' is false, and dtype is fp16"),
        (["mode=dense", "mask=m"], "mode sparse only, and mode is dense"),
        (["enforce_eager=true"], "unknown option 'enforce_eager'.*the nearest is 'vllm_enforce_eager'"),
        (["rollout=vllm"], "the nearest is 'rollout_engine'"),
        (["lerning_rate=1"], "the nearest is 'learning_rate'"),
        (["zebra=1"], r"unknown option 'zebra' \(from 'zebra=1'\) \(see"),
        (["deepspeed=zero3.json"], "unknown option 'deepspeed' .*; instead: parallel=fsdp, "),
        (["data_seed=1"], "; instead: seed, "),
        (["use_peft=true"], "; instead: mode=lora"),
        (["resume_from_checkpoint=c"], "; instead: resume, "),
        (["train_dataset=d"], "; instead: dataset"),
        (["--use_wandb"], "; instead: report_to=wandb"),
        (["eval_strategy=steps"], "; instead: eval_dataset or eval_ratio, with eval_steps"),
    ],
)
def test_hints_are_meaningful(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(GRPOConfig, [*NEEDED, *words])


def test_no_hint_names_the_negative_of_a_switch():
    for config_class in (SFTConfig, DPOConfig, RFTConfig):
        with pytest.raises(ConfigError, match=r"unknown option 'num_generations' \(from 'num_generations=4'\) \(see"):
            parse_config(config_class, [*NEEDED, "num_generations=4"])


def test_the_reference_under_the_name_of_other_trainers():
    assert parse_config(DPOConfig, [*NEEDED, "ref_model_name=r"]).ref_name == "r"


# What a config has, what words after it say, and the options that follow.
OVERRIDDEN = [
    ("n_epochs: 10", "max_steps=50", {"n_epochs": None, "n_steps": 50}),
    ("n_steps: 10", "epochs=3", {"n_epochs": 3, "n_steps": 100}),
    ("n_epochs: 10", "n_epochs=none n_steps=50", {"n_epochs": None, "n_steps": 50}),
    ("per_device_train_batch_size: 16", "batch_size=4", {"batch_size": 4}),
    ("batch_size: 4", "per_device_train_batch_size=16", {"batch_size": 32}),
    ("subset: train[:90%]", "dataset_split=test", {"dataset_split": "test"}),
    ("subset: 5", "subset_size=7", {"subset_size": 7}),
    ("subset: 5", "dataset_split=test", {"subset_size": 5, "dataset_split": "test"}),
    ("subset_size: 7", "subset=5", {"subset_size": 5}),
    ("dtype: fp32", "bf16=true", {"dtype": "bf16"}),
    ("bf16: false", "dtype=bf16", {"dtype": "bf16"}),
    ("bf16: true\nfp16: false", "fp16=true", {"dtype": "fp16"}),
    ("fsdp: true", "parallel=replicate", {"parallel": "replicate"}),
    ("warmup_ratio: 0.5", "warmup_steps=7", {"warmup_ratio": None, "warmup_steps": 7}),
    ("warmup_steps: 7", "warmup_ratio=0.5", {"warmup_ratio": 0.5, "warmup_steps": 0}),
    ("save_strategy: epoch", "save_steps=5", {"save_strategy": None, "save_steps": 5}),
    ("save_steps: 5", "save_strategy=no", {"save_strategy": "no", "save_steps": None}),
    ("eval_ratio: 0.1", "eval_dataset=e", {"eval_ratio": None, "eval_dataset": "e"}),
    ("gradient_accumulation_steps: 16\nbatch_size: 1", "train_batch_size=32", {"gradient_accumulation_steps": 32}),
    ("train_batch_size: 32", "grad_accum=3", {"gradient_accumulation_steps": 3, "batch_size": 4}),
]


@pytest.mark.parametrize(("text", "words", "expected"), OVERRIDDEN)
def test_a_word_overrides_what_a_config_has_under_another_name(tmp_path, monkeypatch, text, words, expected):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "run.yaml").write_text(text)
    config = parse_config(SFTConfig, [*NEEDED, *words.split(), "--config", str(tmp_path / "run.yaml")])
    assert {name: getattr(config, name) for name in expected} == expected
    later = tmp_path / "later.yaml"
    later.write_text("\n".join(words.split()).replace("=", ": "))
    assert config == parse_config(SFTConfig, [*NEEDED, f"config={tmp_path / 'run.yaml'}", f"config={later}"])
    (tmp_path / "options.yaml").write_text(to_yaml(config))
    assert parse_config(SFTConfig, ["--config", str(tmp_path / "options.yaml")]) == config


def test_a_word_overrides_what_a_profile_has_under_another_name(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["profile=balanced", "per_device_train_batch_size=3", "warmup_steps=7", "fp16=true"]
    config = parse_config(RFTConfig, [*NEEDED, *words])
    assert (config.batch_size, config.warmup_steps, config.warmup_ratio, config.dtype) == (6, 7, None, "fp16")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("max_steps", "num_train_epochs"),
        ("batch_size", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "train_batch_size"),
        ("subset", "subset_size"),
        ("warmup_steps", "warmup_ratio"),
    ],
)
def test_two_options_with_one_meaning_at_one_place(tmp_path, first, second):
    (tmp_path / "run.yaml").write_text(f"{first}: 1\n{second}: 1\n")
    message = f"options '{first}' and '{second}' exclude each other: give one"
    with pytest.raises(ConfigError, match=f"^config file .*run.yaml: {message}"):
        parse_config(DPOConfig, [*NEEDED, "--config", str(tmp_path / "run.yaml")])
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_config(DPOConfig, [*NEEDED, f"{first}=1", f"--{second}", "1"])


@pytest.mark.parametrize("pair", ["bf16=true dtype=fp32", "fp16=true dtype=fp32", "bf16=true fp16=true"])
def test_two_dtypes(pair):
    first, second = (word.partition("=")[0] for word in pair.split())
    with pytest.raises(ConfigError, match=f"options '{first}' and '{second}' exclude each other"):
        parse_config(DPOConfig, [*NEEDED, *pair.split()])
    given = {key: value == "true" or value for key, value in (word.split("=") for word in pair.split())}
    with pytest.raises(ConfigError, match=r"'\w+' (is true, and dtype is fp32|and 'fp16' are true): give one"):
        DPOConfig(policy_name="m", dataset="d", **given)


def test_two_names_of_an_option_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("n_steps: 5\nmax_steps: 6\n")
    with pytest.raises(ConfigError, match="run.yaml: 'n_steps' and 'max_steps' are the same option: give one"):
        parse_config(DPOConfig, [*NEEDED, "--config", str(tmp_path / "run.yaml")])
    assert parse_config(DPOConfig, [*NEEDED, "n_steps=5", "max_steps=6"]).n_steps == 6


@pytest.mark.parametrize("config_class", [SFTConfig, RLTConfig])
def test_train_batch_size_is_that_of_a_step(monkeypatch, config_class):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse_config(config_class, [*NEEDED, "train_batch_size=32", "per_device_train_batch_size=1"])
    assert (config.batch_size, config.gradient_accumulation_steps) == (2, 16)
    config = parse_config(config_class, [*NEEDED, "train_batch_size=32"])
    assert config.batch_size * config.gradient_accumulation_steps == 32
    with pytest.raises(ConfigError, match="'train_batch_size' is 30, .* expected a multiple of batch_size 4"):
        parse_config(config_class, [*NEEDED, "train_batch_size=30", "batch_size=4"])


def test_a_mask_implies_mode_sparse():
    assert parse_config(DPOConfig, [*NEEDED, "mask=m"]).mode == "sparse"
    assert parse_config(DPOConfig, NEEDED).mode == "dense"


def test_sections_of_a_file_are_flattened(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "policy_name: m\ndataset:\n  dataset: d\n  max_length: 64\ndpo_training:\n  beta: 0.2\n  epochs: 3\n"
    )
    found = parse_config(DPOConfig, ["--config", str(file)])
    assert (found.dataset, found.max_length, found.beta, found.n_epochs) == ("d", 64, 0.2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  beta: 1\nb:\n  beta: 2\n", "option 'beta' is in section 'a' and in section 'b': give it once"),
        ("beta: 1\nb:\n  beta: 2\n", "option 'beta' is outside of sections and in section 'b'"),
        ("a:\n  bta: 1\n", "unknown option 'bta'.*the nearest is 'beta'"),
        ("a:\n  beta:\n    beta: 1\n", "option 'beta' .*expected float"),
    ],
)
def test_sections_that_are_refused(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_config(DPOConfig, [*NEEDED, "--config", str(file)])


def test_averages_of_the_steps_between_reports():
    rows = [
        {"step": 3, "loss": 1.0, "kl": None, "peak_memory_bytes": 5, "reward": 2.0},
        {"step": 4, "loss": 2.0, "kl": None, "peak_memory_bytes": 7, "reward": None},
    ]
    assert averages(rows) == {"loss": 1.5, "kl": None, "peak_memory_bytes": 7, "reward": 2.0}


def test_trackers_get_every_so_many_steps(tracked):
    reported, rows = tracked(logging_steps=2, n_steps=5)
    assert [step for step, _ in reported] == [2, 4, 5]
    losses = [row["loss"] for row in rows]
    assert [metrics["loss"] for _, metrics in reported] == [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]


def test_statistics_of_the_update_in_every_loop(tracked, tmp_path):
    reported, rows = tracked(statistics_steps=3, statistics_tau=1e-4, n_steps=4, statistics_include=["*q_proj*"])
    measured = [row["step"] for row in rows if "update_share" in row]
    assert measured == [3, 4] and rows[2]["update_share"] > 0 < rows[2]["update_share_above_tau"] < 1
    name = "model.layers.1.self_attn.q_proj.weight"
    of_matrix = {step: metrics for step, metrics in reported if f"update_rank/{name}" in metrics}
    lines = [json.loads(line) for line in (tmp_path / "run" / "update_statistics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(of_matrix) == measured
    for line in lines:
        for key in ("effective_rank", "frobenius_norm", "share_above_tau"):
            assert of_matrix[line["step"]][f"update_{key}/{name}"] == line["matrices"][name][key]


@pytest.fixture
def tracked(dpo_options, monkeypatch, read_metrics):
    """Run with a tracker that keeps what it is given: (step, metrics), and the rows of the run."""

    def run(**options):
        reported = []

        class Tracker:
            def log(self, step, metrics):
                reported.append((step, dict(metrics)))

            def close(self):
                pass

        monkeypatch.setattr("sparse_opt.trainers.run.run_files.make_trackers", lambda *args: [Tracker()])
        return reported, read_metrics(dpo.train(dpo_options(**options)))

    return run
