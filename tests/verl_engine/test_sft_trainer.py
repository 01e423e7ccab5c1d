"""verl's own SFT trainer with the engine, configured by Hydra overrides under torchrun."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("verl", reason="needs verl: make test-verl")

import verl_lab  # noqa: F401  # the environment of the processes
from launch import BACKENDS
from verl_launch import ENVIRONMENTS

from sparse_opt import MaskSet
from sparse_opt.trainers.arithmetic import make_arithmetic

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a model, its mask, and sums as messages."""
    folder = make_arithmetic(tmp_path_factory.mktemp("world") / "arithmetic", hidden_size=64, n_layers=2, n_train=64)
    settings = folder / "model/tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    rows = [json.loads(line) for line in (folder / "data/demonstrations.jsonl").read_text().splitlines()[:64]]
    messages = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    pandas.DataFrame({"messages": messages}).to_parquet(folder / "train.parquet")
    MaskSet.random(load_file(folder / "model/model.safetensors"), density=0.1).save(folder / "mask.safetensors")
    return folder


def train(world: Path, output: Path, processes: int, steps: int, backend: str) -> str:
    words = [
        f"data.train_files={world}/train.parquet",
        "data.train_batch_size=8",
        "data.use_dynamic_bsz=False",
        "data.micro_batch_size_per_gpu=2",
        "data.num_workers=0",
        f"model.path={world}/model",
        "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=eager",
        "engine._target_=sparse_opt.integrations.verl.SparseFSDPEngineConfig",
        "engine.strategy=sparse_fsdp2",
        "engine.use_torch_compile=False",
        "optim.lr=1e-3",
        f"+optim.override_optimizer_config.mask={world}/mask.safetensors",
        "trainer.logger=[console]",
        f"trainer.device={'cuda' if backend == 'nccl' else 'cpu'}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={output}",
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]
    here = Path(__file__).parent
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command.append(f"--nproc_per_node={processes}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "nccl":
        command += ["-m", "verl.trainer.sft_trainer", *words]
        environment |= ENVIRONMENTS["cuda"]
    else:
        command += [str(here / "sft_on_cpu.py"), *words]
    environment["PYTHONPATH"] = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, cwd=output.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@BACKENDS
def test_trains_saves_and_continues_on_another_number_of_processes(world, tmp_path, backend):
    def steps(printed: str) -> list[int]:
        return [int(number) for number in re.findall(r"step:(\d+) -", printed)]

    output = tmp_path / "checkpoints"
    assert steps(train(world, output, 2, 2, backend)) == [1, 2]
    assert steps(train(world, output, 1, 4, backend)) == [3, 4]

    start = load_file(world / "model/model.safetensors")
    mask = MaskSet.load(world / "mask.safetensors")
    saved = [load_file(output / f"global_step_{step}/huggingface/model.safetensors") for step in (2, 4)]
    for name in mask.names:
        changed = [tensor[name].float() != start[name] for tensor in saved]
        assert not (changed[0] & ~mask.bool(name)).any() and not (changed[1] & ~mask.bool(name)).any()
    assert any(bool((saved[1][name] != saved[0][name]).any()) for name in mask.names)
    assert saved[1].keys() >= set(mask.names) and torch.isfinite(saved[1][mask.names[0]]).all()
