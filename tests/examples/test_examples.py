"""The example files: each trains like torch.optim.AdamW, and a resumed run equals an uninterrupted one."""

import importlib.util
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import run_command
from safetensors.torch import load_file
from torch import Tensor, nn

from sparse_opt import MaskSet

pytestmark = pytest.mark.dist

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "examples"
STEPS, LR = 8, 1e-3  # the examples' own
MAX_GRAD_NORM = 0.15  # clips every step at density 0.1
ACCUMULATE = {"bare_loop": 2, "with_accelerate": 4, "with_lightning": 2}  # the examples' own
Main = Callable[[list[str]], nn.Module]


def without(package: str) -> list[pytest.MarkDecorator]:
    missing = importlib.util.find_spec(package) is None
    return [pytest.mark.skipif(missing, reason=f"needs {package}: pip install {package}")]


# How to run each, and where to stop it: after an optimizer step, or an epoch of two.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "bare_loop": ([], ["1", "4", "7"]),
    "with_accelerate": ([], ["1", "4", "7"]),
    "with_lightning": ([], ["1", "3"]),
    "with_lightning, manual": (["--manual"], ["2"]),
}
NEEDS = {"bare_loop": [], "with_accelerate": without("accelerate"), "with_lightning": without("lightning")}
ALL = [pytest.param(name, marks=NEEDS[name.split(",")[0]]) for name in RUNS]


def names_of(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name.split(',')[0]}.py"))


def main_of(name: str) -> Main:
    return names_of(name)["main"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense run that they are compared with is one on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # of other tests, which may have taken a GPU


def start() -> nn.Module:
    """The model that the examples begin with."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))


def dense_run(mask: MaskSet | None, accumulate: int) -> tuple[nn.Module, list[float]]:
    """torch's AdamW over the examples' batches, with gradients, decay and so steps only where the mask is active.

    accumulate: micro-batches in a step.
    """
    model, untrained = start(), start().state_dict()
    active = {} if mask is None else {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters()}
    for name, where in active.items():
        where.view(-1)[mask[name].long()] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    norms = []
    for step in range(STEPS):
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(step * accumulate + micro)
            tokens = torch.randint(256, (4, 32), generator=generator)
            (model(input_ids=tokens, labels=tokens).loss / accumulate).backward()
        for name, where in active.items():
            model.get_parameter(name).grad.mul_(where)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, where in active.items():
                p = model.get_parameter(name)
                p.copy_(torch.where(where, p, untrained[name]))
    return model, norms


def assert_same_weights(found: dict[str, Tensor], dense: nn.Module) -> None:
    for key, q in dense.named_parameters():
        # Two runs that round each weight once or twice a step: 4 standard deviations of a walk of 2 * STEPS errors of
        # up to one unit in the last place. AdamW divides by the gradient's own size, so that a gradient which
        # is small because its summands cancel has an update with a larger relative error: taken as a thousand times.
        # One processor exceeded the bound without this by 15 %.
        largest = q.abs().max().item() + 1000 * LR
        tolerance = 4 * (2 * STEPS) ** 0.5 * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(found[key], q, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize("name", ALL)
def test_equals_torch_adamw(name, density):
    sparse = main_of(name)(["--density", str(density), "--max_grad_norm", str(MAX_GRAD_NORM), *RUNS[name][0]])
    mask = None if density == 1.0 else MaskSet.random(start(), density=density)
    dense, norms = dense_run(mask, ACCUMULATE[name.split(",")[0]])
    assert min(norms) > MAX_GRAD_NORM  # each step was clipped
    assert_same_weights(dict(sparse.named_parameters()), dense)
    untrained = start()
    for key, p in sparse.named_parameters():
        assert not torch.equal(p, untrained.get_parameter(key)) or density < 1.0


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_is_the_run_that_was_not_stopped(name, tmp_path):
    options, stops = RUNS[name]
    mask = MaskSet.random(start(), density=0.05, seed=3)
    mask.save(tmp_path / "mask.safetensors")
    options = [*options, "--mask", str(tmp_path / "mask.safetensors"), "--max_grad_norm", str(MAX_GRAD_NORM)]
    whole, untrained = main_of(name)(options), start()
    for stop in stops:
        saved = str(tmp_path / f"stopped_at_{stop}")
        stopped = main_of(name)([*options, "--stop_at", stop, "--checkpoint", saved])
        resumed = main_of(name)([*options, "--resume", saved])
        for (key, p), q, r in zip(whole.named_parameters(), resumed.parameters(), stopped.parameters(), strict=True):
            assert torch.equal(p, q), f"{key}, stopped at {stop}"
            assert torch.equal(p, r) == (mask[key].numel() == 0), f"{key}, stopped at {stop}"
    changed = 0
    for key, p in whole.named_parameters():
        moved = (p != untrained.get_parameter(key)).view(-1).nonzero().view(-1)
        assert torch.isin(moved, mask[key].long()).all(), key
        changed += moved.numel()
    assert changed > 0.9 * sum(i.numel() for i in mask.indices.values())


WITHOUT_GPUS = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
# What `accelerate launch --multi_gpu` sets besides the variables of torchrun.
OF_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


def run_script(name: str, options: list[str], n: int | None = None) -> str:
    """Run an example as a script, or in `n` processes with the variables of torchrun; return what they print.

    There are no GPUs.
    """
    variables = {**os.environ, **WITHOUT_GPUS, **(OF_ACCELERATE if n and name == "with_accelerate" else {})}
    script = EXAMPLES / f"{name}.py"
    run = run_command(n or 1, options, variables, script=script, launched=n is not None, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    if checkpoint.is_file():
        return torch.load(checkpoint, weights_only=True)["model"]
    if (checkpoint / ".metadata").is_file():
        model = start().state_dict()
        dcp.load({"model": model}, checkpoint_id=checkpoint)
        return model
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_torchrun", "with_fsdp2", "with_accelerate"])
def test_distributed_runs_equal_torch_adamw_and_resume_in_one_process(name, tmp_path):
    options = ["--density", "0.1", "--max_grad_norm", str(MAX_GRAD_NORM)]
    first, last = tmp_path / "first", tmp_path / "last"
    printed = run_script(name, [*options, "--stop_at", "4", "--checkpoint", str(first)], 2)
    alone = None if name == "with_accelerate" else 1  # the others need a process group
    printed += run_script(name, [*options, "--resume", str(first), "--checkpoint", str(last)], alone)
    assert [int(step) for step in re.findall(r"^step (\d+)  loss", printed, re.MULTILINE)] == [*range(1, STEPS + 1)]
    mask = MaskSet.random(start(), density=0.1)
    dense, norms = dense_run(mask, 4)
    assert_same_weights(weights_in(last), dense)
    found = [float(norm) for norm in re.findall(r"grad norm (\S+)", printed)]
    assert found == pytest.approx(norms, abs=6e-4)  # printed with three digits


def test_every_file_is_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in (CHECKOUT / "docs").glob("*.md"))
    assert [file.name for file in EXAMPLES.glob("*.py") if f"examples/{file.name}" not in pages] == []
