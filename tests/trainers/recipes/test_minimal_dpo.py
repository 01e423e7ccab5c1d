"""`sparse-opt train minimal_dpo`: temp-dpo-v1's file of sections, its names and outputs, and calls that are wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from launch import run_command
from transformers import AutoModelForCausalLM

from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.recipes import minimal_dpo

CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "minimal_dpo" / "config_dpo.yaml"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with two untrained models, and 20 rows with the columns of Intel/orca_dpo_pairs."""
    folder = tmp_path_factory.mktemp("world")
    for seed, name in enumerate(("policy", "other")):
        make_arithmetic(folder / name, n_train=4, n_test=1, hidden_size=32, n_layers=1, seed=seed)
    rows = [
        {"system": "Add.", "question": f"{n} + {n} ", "chosen": f"It is {2 * n}.", "rejected": "No idea."}
        for n in range(20)
    ]
    (folder / "orca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(command, monkeypatch, world) -> Callable[..., str]:
    """`run("epochs=2")`: the example config on the tiny model -> stdout; with `code=` the error line."""
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    model = world / "policy" / "model"
    tiny = ("--policy_name", model, "--ref_name", model, "--dataset_name", world / "orca.jsonl")

    def call(*words: object, config: Path = CONFIG, code: int = 0) -> str:
        return command("train", "minimal_dpo", "--config", config, *tiny, *words, code=code)

    return call


@pytest.fixture
def options(run, monkeypatch) -> Callable[..., object]:
    """`options("epochs=2")`: the options of a run and the arguments of `train`, without training."""
    found = []
    monkeypatch.setattr(minimal_dpo, "train", lambda *args, **more: found.append((args[1], more)) or 0)

    def parse(*words: object, **more: object):
        run(*words, **more)
        return found[-1]

    return parse


def margins_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "margins_log.jsonl").read_text().splitlines()]


def test_the_original_file_trains_and_writes_its_files(run, world):
    shown = run("batch_size=4", "--learning_rate", 1e-2)
    assert "all weights" in shown
    folder = Path("mounts/output")
    state = AutoModelForCausalLM.from_pretrained(folder / "dpo_model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(world / "policy" / "model", dtype=torch.bfloat16).state_dict()
    assert all(value.dtype == torch.bfloat16 for value in state.values())
    assert any((state[name] != before[name]).any() for name in state)
    rows = margins_of(folder / "logs/margins")  # 18 rows, of which 2 are held out
    assert [(row["step"], row["epoch"], row["n"]) for row in rows] == [(n, 0, 4) for n in (1, 2, 3, 4)]
    values = np.load(folder / "logs/margins/epoch_000/step_00001.npy")
    assert values.tolist() == [0, 0, 0, 0]  # the policy is the reference
    assert rows[-1]["mean"] > 0
    logs = json.loads((folder / "dpo_model/trainer_state.json").read_text())["log_history"]
    assert [log["step"] for log in logs if "eval_loss" in log] == [4]


def test_sections_and_names_of_the_original(options, tmp_path):
    found, _ = options()
    args, own = found.training, found.recipe
    assert (args.num_train_epochs, args.per_device_train_batch_size, args.logging_steps) == (1, 8, 10)
    assert (args.beta, args.learning_rate, args.max_length, args.seed) == (0.1, 1e-6, 512, 42)
    assert (args.lr_scheduler_type, args.weight_decay, args.max_grad_norm) == ("constant", 0.01, 0)
    assert (found.model.dtype, args.bf16, args.fp16) == ("bfloat16", False, False)
    assert (found.script.dataset_train_split, own.val_ratio) == ("train[:90%]", 0.1)
    assert args.output_dir == "mounts/output/dpo_model"
    words = "epochs=3 --max_len=64 --log_steps 1 dpo_beta=0.3 --precision fp16 --mount_dir elsewhere subset=train"
    found, _ = options(*words.split())
    args = found.training
    assert (args.num_train_epochs, args.max_length, args.logging_steps, args.beta) == (3, 64, 1, 0.3)
    assert (found.model.dtype, args.fp16, args.output_dir) == ("float32", True, "elsewhere/dpo_model")
    given, _ = options("--output_dir", "model", "--dtype", "float32", "--eval_strategy", "no", "bf16=true")
    assert (given.training.output_dir, given.model.dtype, given.training.bf16) == ("model", "float32", True)
    (tmp_path / "options.yaml").write_text(found.to_yaml())
    again, _ = options(config=tmp_path / "options.yaml")
    assert again.values == found.values


@pytest.mark.parametrize(("subset", "n"), [("train", 20), ("train[:10%]", 2), ("train[:5]+train[15:]", 10)])
def test_a_subset_of_a_local_file_is_split(options, subset, n):
    _, more = options("--subset", subset, "--val_ratio", 0.5)
    rows, held_out = more["rows"], more["test_rows"]
    assert (len(rows), len(held_out)) == (n // 2, n // 2)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    _, more = options("--subset", subset, "--val_ratio", 0)
    assert len(more["rows"]) == n and more["test_rows"] is None


def test_messages_need_no_chat_template(options, world, tmp_path):
    _, more = options("--val_ratio=0")
    prompt, chosen = "Prompt: 3 + 3\n", "Response: It is 6.\n"
    assert more["rows"][3] == {"prompt": prompt, "chosen": chosen, "rejected": "Response: No idea.\n"}
    chat = tmp_path / "chat"
    chat.mkdir()
    for file in (world / "policy" / "model").iterdir():
        (chat / file.name).symlink_to(file)
    (chat / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _, more = options("--val_ratio=0", "--policy_name", chat)
    row = more["rows"][3]
    assert [message["role"] for message in (*row["prompt"], *row["chosen"])] == ["system", "user", "assistant"]


def test_another_reference_and_a_mask(run, world):
    run("--ref_name", world / "other" / "model", "batch_size=16", "precision=fp32", "--mount_dir", "a")
    assert margins_of(Path("a/logs/margins"))[0]["std"] > 0
    run("--mask_density", 0.1, "batch_size=8", "epochs=2", "--mount_dir", "b")
    assert Path("b/dpo_model/mask.safetensors").is_file()
    rows = margins_of(Path("b/logs/margins"))
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert rows[0]["std"] == 0
    line = run("--mask_density", 0.1, "--ref_name", world / "other" / "model", code=2)
    assert "under a mask" in line


def test_fsdp_in_one_process(run, tmp_path):
    content = yaml.safe_load(CONFIG.read_text())
    content["dpo_training"]["fsdp"] = True
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(content))
    for words, config in ((), tmp_path / "fsdp.yaml"), (("--fsdp",), CONFIG):
        shown = run("batch_size=16", *words, config=config)
        assert shown.splitlines()[0].startswith("minimal_dpo: fsdp in one process: the model is not sharded")
        assert "trained to step 1" in shown
    assert "not sharded" not in run("batch_size=16", "--fsdp=false", config=tmp_path / "fsdp.yaml")


# accelerate shards models on GPUs only: this takes processes on a CPU for processes on GPUs.
ON_CPU = """
import sys
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from sparse_opt.cli.main import main
init = PartialState.__init__
def as_on_gpus(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU
PartialState.__init__ = as_on_gpus
code = main(sys.argv[1:])
print(AcceleratorState().distributed_type)
sys.exit(code)
"""


@pytest.mark.dist
@pytest.mark.slow
def test_fsdp_in_two_processes(run, world, tmp_path):
    model = world / "policy" / "model"
    (tmp_path / "on_cpu.py").write_text(ON_CPU)
    words = ["train", "minimal_dpo", "--config", CONFIG, "--policy_name", model, "--ref_name", model, "--fsdp"]
    words += ["--dataset_name", world / "orca.jsonl", "batch_size=4", "precision=fp32", "--learning_rate=1e-3"]
    words += ["--mount_dir", tmp_path / "two"]
    script = tmp_path / "on_cpu.py"
    ended = run_command(2, [str(word) for word in words], dict(os.environ), script=script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "DistributedType.FSDP" in ended.stdout
    run("batch_size=8", "precision=fp32", "--learning_rate=1e-3", "--mount_dir", "one")
    two, one = (margins_of(Path(folder, "logs/margins")) for folder in ("two", "one"))
    assert [row["n"] for row in two] == [8, 8]  # of both processes
    assert two[1]["mean"] == pytest.approx(one[1]["mean"], rel=1e-3) and two[1]["mean"] != 0
    states = [AutoModelForCausalLM.from_pretrained(Path(folder, "dpo_model")).state_dict() for folder in ("two", "one")]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-3, atol=1e-4)  # sums in another order, through Adam


def test_wandb_project(options, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT")
    options()
    assert os.environ["WANDB_PROJECT"] == "handwritten-dpo"
    options("--wandb_project", "other")
    assert os.environ["WANDB_PROJECT"] == "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dpo_training: {epoch: 1}", "unknown option 'epoch' (from config file"),
        ("dpo_training: {epochs: 1}\nepochs: 2", "'epochs' is given twice, the second time in 'epochs': give it once"),
        ("dataset: {val_ratio: 1}", "--val_ratio is 1.0, expected a share of at least 0 and below 1"),
        ("dataset: {subset: 'train[:200%]'}", "train[:200%]"),
        ("dataset: {dataset_streaming: true}", "--dataset_streaming: rows cannot be held out"),
    ],
)
def test_a_wrong_file_is_refused_by_name(run, tmp_path, change, message):
    (tmp_path / "config.yaml").write_text(change)
    assert message in run(config=tmp_path / "config.yaml", code=2)


def test_too_few_rows_to_hold_out_are_refused(run):
    assert "--val_ratio 0.1 of 1 rows leaves none" in run("--subset", "train[:1]", code=1)
