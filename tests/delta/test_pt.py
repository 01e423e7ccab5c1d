"""Logs of `.pt` files that other tools have written become delta logs, or are refused in one line."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparse_opt.delta.log import DeltaLog
from sparse_opt.delta.pt import convert_pt
from sparse_opt.errors import DeltaLogError

State = dict[str, Tensor]

SHAPES = {"embed.weight": (64, 48), "layer.0.weight": (8, 8), "layer.0.bias": (8,), "norm.scale": ()}


def walk(n_steps: int, dtype: torch.dtype = torch.bfloat16) -> list[State]:
    """An initial state and `n_steps` later ones; each changes a third of the weights by a few percent."""
    generator = torch.Generator().manual_seed(0)
    states = [{name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}]
    for _ in range(n_steps):
        moved = {}
        for name, tensor in states[-1].items():
            where = torch.rand(tensor.shape, generator=generator) < 0.3
            move = 0.03 * torch.randn(tensor.shape, generator=generator)
            moved[name] = (tensor.float() + where * move).to(dtype)
        states.append(moved)
    return states


def write_as_tools_do(folder: Path, states: Sequence[State], steps: Sequence[int]) -> Path:
    """base_state.pt in fp32, and the fp32 difference of each further state to it."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {name: tensor.detach().float().cpu().clone() for name, tensor in states[0].items()}
    torch.save(base, folder / "base_state.pt")
    for step, state in zip(steps, states[1:], strict=True):
        deltas = {name: tensor.detach().float().cpu() - base[name] for name, tensor in state.items()}
        torch.save(deltas, folder / f"deltas_step_{step}.pt")
    return folder


@dataclass(frozen=True)
class Run:
    """A folder of .pt files, and the run's bf16 weights at each step."""

    folder: Path
    states: dict[int, State]


@pytest.fixture
def run(tmp_path):
    states, steps = walk(3), (5, 10, 100)
    folder = write_as_tools_do(tmp_path / "deltas", states, steps)
    return Run(folder, dict(zip((0, *steps), states, strict=True)))


def converted(folder: Path, **options) -> DeltaLog:
    target = folder.parent / "converted"
    shutil.rmtree(target, ignore_errors=True)
    convert_pt(folder, target, **options)
    return DeltaLog.open(target)


def refused(folder: Path, message: str, **options) -> None:
    """The conversion is refused in one line, and leaves nothing."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(DeltaLogError, match=message) as caught:
        convert_pt(folder, folder.parent / "refused", **options)
    assert "\n" not in str(caught.value)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize("delta_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_16_bit_base_is_added_in_fp32_and_rounded_to_it(tmp_path, delta_dtype, same_bits):
    base, folder = walk(0)[0], tmp_path / "deltas"
    deltas = {name: (0.01 * torch.randn(shape)).to(delta_dtype) for name, shape in SHAPES.items()}
    folder.mkdir()
    torch.save(base, folder / "base_state.pt")
    torch.save(deltas, folder / "deltas_step_1.pt")
    wide = torch.promote_types(delta_dtype, torch.float32)
    expected = {name: (base[name].to(wide) + deltas[name].to(wide)).bfloat16() for name in base}
    same_bits(converted(folder).load(1), expected)


def test_values_that_a_difference_cannot_express_are_changed(tmp_path):
    # The docstring's two cases: a new negative zero, and a weight that shrank by more than 2**16.
    old = {"w": torch.tensor([1.0, 1.0, 0.0]).bfloat16()}
    new = {"w": torch.tensor([-0.0, 1.0078125 * 2.0**-20, 1.5]).bfloat16()}
    found = converted(write_as_tools_do(tmp_path / "log", [old, new], [1])).load(1)["w"]
    assert found.tolist() == [0.0, 2.0**-20, 1.5]
    assert not found.signbit().any()


def test_integers_are_added_as_integers(run):
    torch.save({"count": torch.tensor([2**60 + 1])}, run.folder / "base_state.pt")
    for step in (5, 10, 100):
        torch.save({"count": torch.tensor([step])}, run.folder / f"deltas_step_{step}.pt")
    assert converted(run.folder).load(5)["count"].tolist() == [2**60 + 6]


def test_metadata_names_the_model(run):
    path = run.folder / "run_metadata.json"
    path.write_text(json.dumps({"model_name": "M", "learning_rate": 1e-6, "checkpoint_schedule": [5, 10]}))
    assert converted(run.folder).metadata == {"model": "M", "model_name": "M", "learning_rate": "1e-06"}
    path.write_text("[1]")
    refused(run.folder, r"run_metadata\.json: holds a list, expected a JSON object")


def test_names_of_one_storage_are_tied(tmp_path):
    embed, move, folder = torch.randn(4, 4), torch.randn(4, 4), tmp_path / "deltas"
    folder.mkdir()
    torch.save({"embed": embed, "head": embed}, folder / "base_state.pt")
    torch.save({"embed": move, "head": move.clone()}, folder / "deltas_step_1.pt")
    log = converted(folder)
    assert dict(log.layout.aliases) == {"head": "embed"}
    assert torch.equal(log.load(1)["head"], embed + move)
    for other in (move + 1, move.double()):
        torch.save({"embed": move, "head": other}, folder / "deltas_step_1.pt")
        refused(folder, r"deltas_step_1\.pt: step 1: head and embed are tied .* differ here")


def test_files_that_are_missing_or_twice_there(run):
    base = run.folder / "base_state.pt"
    elsewhere = base.rename(run.folder.parent / "base_state.pt")
    refused(run.folder, r"base_state\.pt: file not found, expected the base state of .*deltas")
    refused(run.folder.parent, r"holds no deltas_step_\*\.pt file, expected at least one")
    elsewhere.rename(base)
    (again,) = (shutil.copy(run.folder / "deltas_step_5.pt", run.folder / "deltas_step_05.pt"),)
    refused(run.folder, r"deltas_step_05\.pt and deltas_step_5\.pt are both of step 5")
    Path(again).rename(run.folder / "deltas_step_0.pt")
    refused(run.folder, r"deltas_step_0\.pt: is of step 0, expected a later step: .*base_state\.pt")


def test_a_tensor_that_a_step_lacks_keeps_its_values_and_is_named(run, same_bits):
    path = run.folder / "deltas_step_100.pt"
    deltas = torch.load(path, weights_only=True)
    del deltas["layer.0.bias"]
    torch.save(deltas, path)
    with pytest.warns(UserWarning, match=r"step 100: holds no difference for 1 of 4 tensors .* layer\.0\.bias"):
        found = converted(run.folder, dtype=torch.bfloat16).load(100)
    same_bits(found, run.states[100] | {"layer.0.bias": run.states[0]["layer.0.bias"]})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"other": torch.zeros(2)}, r"step 100: holds other, which the base does not"),
        ({"layer.0.bias": torch.zeros(9)}, r"layer\.0\.bias is float32 \[9\], in the base it is float32 \[8\]"),
        ({"layer.0.bias": torch.zeros(8, dtype=torch.int64)}, r"layer\.0\.bias is int64 \[8\], in the base it is"),
        ({"layer.0.bias": torch.zeros(8).to_sparse()}, r"layer\.0\.bias is torch.sparse_coo on cpu, expected a dense"),
        ({"deltas": {"layer.0.bias": torch.zeros(8)}}, r"entry 'deltas' is dict, expected tensors by name"),
    ],
    ids=["unknown", "shape", "dtype", "sparse", "nested"],
)
def test_contents_that_do_not_fit(run, entry, message):
    path = run.folder / "deltas_step_100.pt"
    torch.save(torch.load(path, weights_only=True) | entry, path)
    refused(run.folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Allocated, it would be 4 TB.
        ({"w": torch.zeros(1).expand(2**40)}, r"w is float32 \[1099511627776\], more than the file has bytes for"),
        ({"w": torch.zeros(2, dtype=torch.bool)}, "w is bool: it has no difference"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "w is complex64: it has no difference"),
        ([torch.zeros(2)], "holds a list, expected a dictionary of tensors by name"),
    ],
    ids=["vast", "bool", "complex", "list"],
)
def test_bases_without_differences(run, content, message):
    torch.save(content, run.folder / "base_state.pt")
    refused(run.folder, rf"base_state\.pt: step 0: {message}")


def test_a_dtype_that_does_not_hold_the_values(tmp_path):
    states = walk(1)
    states[1]["embed.weight"] = states[1]["embed.weight"].float() + 2.0**-20
    folder = write_as_tools_do(tmp_path / "log", states, [7])
    count = int((states[1]["embed.weight"].bfloat16() != states[1]["embed.weight"]).sum())
    message = rf"deltas_step_7\.pt: step 7: embed\.weight: {count} of 3072 values have no exact bfloat16 form"
    refused(folder, message, dtype=torch.bfloat16)


class Payload:
    """Unpickled without `weights_only`, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run(run, tmp_path):
    torch.save({"w": Payload(tmp_path / "ran")}, run.folder / "deltas_step_100.pt")
    refused(run.folder, r"deltas_step_100\.pt: step 100: damaged: it is not a file that torch\.save wrote: .*")
    assert not (tmp_path / "ran").exists()


def test_archives_that_torch_does_not_write(run):
    path = run.folder / "deltas_step_100.pt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    for content in (pickle.dumps({"w": 1}, 2), b"garbage"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, record in records.items():
                archive.writestr(name, content if name.endswith(".pkl") else record)
        refused(run.folder, r"deltas_step_100\.pt: step 100: ")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, record in records.items():
            archive.writestr(name, record + bytes(10_000_000) if name.endswith(".pkl") else record)
    refused(run.folder, r"its record deltas_step_100/data\.pkl is not as torch\.save writes one")
    torch.save(run.states[100], path, _use_new_zipfile_serialization=False)  # before torch 1.6: without checksums
    refused(run.folder, r"step 100: damaged: it is not a file that torch\.save wrote")
