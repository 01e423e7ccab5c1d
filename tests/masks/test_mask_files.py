"""Mask files: written masks are read back; damaged, foreign or hostile files are refused by name in one line."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError


@pytest.fixture
def mask() -> MaskSet:
    mask = MaskSet.random(
        {"a.0.weight": (40, 48), "a.0.bias": (48,), "empty": (0, 3), "scalar": ()}, density=0.3, seed=1
    )
    mask.metadata.update(method="magnitude", step="50", model="a/b", note="Grüße \U0001f600")
    return mask


def refusal(path: Path, model: Any = None) -> str:
    with pytest.raises(MaskError) as error:
        MaskSet.load(path, model)
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def loaded_or_refused(path: Path) -> MaskSet | None:
    """None for a refusal that names the file; any other exception passes through."""
    try:
        return MaskSet.load(path)
    except MaskError as refused:
        return None if str(path) in str(refused) else pytest.fail(f"does not name the file: {refused}")


@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
def test_round_trip(tmp_path: Path, pattern: str) -> None:
    mask = MaskSet.random({"b": (130, 200), "a": (7,), "nothing": (0,)}, density=0.4, pattern=pattern, seed=2)
    path = mask.save(tmp_path / "new" / "folder" / "mask.safetensors")
    loaded = MaskSet.load(path)
    assert loaded == mask
    assert (loaded.pattern, loaded.metadata, loaded.digest) == (pattern, mask.metadata, mask.digest)
    assert loaded["b"].dtype == torch.int32


@pytest.mark.parametrize(
    ("indices", "shapes"),
    [
        ({"w": torch.tensor([5, 2**31 + 3])}, {"w": (2**20, 2**12)}),
        ({}, {}),
        # Such a tensor's stride is 0, with which torch refuses to view its bytes.
        ({"w": torch.from_numpy(np.empty(0, dtype=np.int32))}, {"w": (3,)}),
    ],
    ids=["int64", "no_tensor", "empty_numpy_array"],
)
def test_round_trip_of_odd_masks(tmp_path: Path, indices: Any, shapes: Any) -> None:
    mask = MaskSet(indices, shapes)
    loaded = MaskSet.load(mask.save(tmp_path / "m.safetensors"))
    assert loaded == mask
    assert all(loaded[name].dtype == mask[name].dtype for name in mask.names)


def test_what_the_file_says(mask: MaskSet, tmp_path: Path) -> None:
    """Plain safetensors: another tool reads the positions and the strings without this package."""
    with safe_open(mask.save(tmp_path / "m.safetensors"), framework="pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("a.0.weight"), mask["a.0.weight"])
    assert metadata["format"] == "sparse-opt mask"
    assert metadata["format_version"] == "1"
    assert metadata["shapes"] == '{"a.0.bias":[48],"a.0.weight":[40,48],"empty":[0,3],"scalar":[]}'
    assert metadata["digest"] == mask.digest
    assert metadata["pattern"] == "element"
    assert {k: metadata[k] for k in ("method", "sparsity", "step", "model")} == {
        "method": "magnitude",
        "sparsity": "70",
        "step": "50",
        "model": "a/b",
    }


def test_every_flipped_byte_is_noticed(mask: MaskSet, tmp_path: Path) -> None:
    path = mask.save(tmp_path / "m.safetensors")
    content = path.read_bytes()
    source = random.Random(0)
    harmless = 0
    for i in range(0, len(content), 5):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << source.randrange(8)]) + content[i + 1 :])
        loaded = loaded_or_refused(path)
        if loaded is not None:
            # White space between JSON tokens can change without a change of meaning, and then nothing else may.
            assert (loaded, loaded.metadata, loaded.pattern) == (mask, mask.metadata, mask.pattern)
            harmless += 1
    assert harmless < 5


def test_every_truncation_is_noticed(mask: MaskSet, tmp_path: Path) -> None:
    path = mask.save(tmp_path / "m.safetensors")
    content = path.read_bytes()
    for length in [*range(0, len(content), 41), len(content) - 1]:
        path.write_bytes(content[:length])
        refusal(path)
    path.write_bytes(content + b"\0")
    refusal(path)


def test_a_swapped_tensor_is_noticed(tmp_path: Path) -> None:
    """A header that is right, over the positions of another mask."""
    a, b = (MaskSet.random({"w": (30, 30)}, density=0.2, seed=seed) for seed in (1, 2))
    path = a.save(tmp_path / "a.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"w": b["w"]}, path, metadata)
    assert "digest" in refusal(path)
    save_file({"v": a["w"]}, path, metadata)
    assert "tensors and shapes have different names" in refusal(path)


def test_foreign_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert "no such mask file" in refusal(path)
    assert "no such mask file" in refusal(tmp_path)
    save_file({"w": torch.ones(3)}, path)
    assert "format is None, expected 'sparse-opt mask'" in refusal(path)
    save_file({"w": torch.ones(3)}, path, {"format": "sparse-opt mask", "format_version": "2"})
    assert "format version is '2', expected '1'" in refusal(path)
    path.write_text("not a mask")
    assert "not a readable safetensors file" in refusal(path)
    other = tmp_path / "mask.npz"
    other.write_bytes(b"")
    assert "mask files end in .safetensors" in refusal(other)


def test_loading_against_a_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = MaskSet.random(model, density=0.5).save(tmp_path / "m.safetensors")
    assert MaskSet.load(path, torch.compile(model)) == MaskSet.load(path, model)
    assert MaskSet.random(torch.compile(model), density=0.5) == MaskSet.load(path)
    assert MaskSet.load(path, model).names == ("weight", "bias")
    text = refusal(path, nn.Linear(4, 2, bias=False))
    assert "weight is [2, 3] in the mask, [2, 4] in the model" in text
    assert "bias is not a parameter of the model" in text


def test_saving_what_cannot_be_saved(mask: MaskSet, tmp_path: Path) -> None:
    with pytest.raises(MaskError, match=r"m.pt: mask files end in .safetensors, found .pt"):
        mask.save(tmp_path / "m.pt")
    mask.metadata["digest"] = "x"
    with pytest.raises(MaskError, match="metadata key digest is reserved"):
        mask.save(tmp_path / "m.safetensors")
    del mask.metadata["digest"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MaskError, match="cannot write the mask: "):
        mask.save(tmp_path / "file" / "m.safetensors")


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_files_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    positions = torch.tensor([0], dtype=torch.int32)
    mask = MaskSet({name: positions}, {name: (3,)})
    with pytest.raises(MaskError, match=r"^[^\n]*mask\.safetensors: [^\n]*(reserves|UTF-8)[^\n]*$"):
        mask.save(tmp_path / "mask.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken_call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    mask: MaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_call: str
) -> None:
    path = mask.save(tmp_path / "m.safetensors")
    before = path.read_bytes()

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken_call, disk_full)
    with pytest.raises(MaskError, match="No space left on device"):
        MaskSet.random({"w": (3,)}, density=1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def bool_masks(mask: MaskSet) -> dict[str, Any]:
    return {name: mask.bool(name) for name in mask.names}


def test_pt_under_the_key_masks(mask: MaskSet, tmp_path: Path) -> None:
    others = {"metadata": {"method": "fisher", "step": 50}, "sparsity": 97.5, "history": [1, 2], "format": "torch"}
    torch.save({"masks": bool_masks(mask), **others}, tmp_path / "m.pt")
    loaded = MaskSet.load(tmp_path / "m.pt")
    assert loaded == mask
    assert loaded.metadata == {"method": "fisher", "step": "50", "sparsity": "97.5"}


def test_pt_finds_the_pattern(tmp_path: Path) -> None:
    mask = MaskSet.random({"w": (70, 130)}, density=0.5, pattern="tile64", seed=1)
    torch.save(bool_masks(mask), tmp_path / "m.pt")
    assert MaskSet.load(tmp_path / "m.pt").pattern == "tile64"


class Planted:
    """Unpickling this would run a command; it must be refused first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["PLANTED"],)


@pytest.mark.parametrize("under_masks", [False, True])
def test_pt_with_any_other_object_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_masks: bool
) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    content = {"w": torch.ones(2, dtype=torch.bool), "x": Planted()}
    torch.save({"masks": content} if under_masks else content, tmp_path / "m.pt")
    assert "not a readable .pt dictionary of bool tensors" in refusal(tmp_path / "m.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2, dtype=torch.bool)], "holds a list, expected a dictionary"),
        ({"masks": {"w": torch.ones(2, dtype=torch.int8)}}, "mask of w is torch.int8, expected a bool tensor"),
        ({3: torch.ones(2, dtype=torch.bool)}, "holds the key 3, expected parameter names"),
        ({}, "holds no masks"),
        (
            {"masks": {"w": torch.ones(2, dtype=torch.bool)}, "b": torch.ones(7, dtype=torch.bool)},
            "holds a tensor 'b' next to 'masks', expected all masks under that key",
        ),
    ],
    ids=["list", "int8", "number_as_name", "nothing", "next_to_masks"],
)
def test_pt_of_other_content(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "m.pt")
    assert message in refusal(tmp_path / "m.pt")


def test_pt_of_the_old_form_is_refused(mask: MaskSet, tmp_path: Path) -> None:
    torch.save(bool_masks(mask), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    assert "it is not a file that torch.save wrote" in refusal(tmp_path / "m.pt")


def test_pt_damage_gives_the_right_mask_or_a_refusal(mask: MaskSet, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(bool_masks(mask), path)
    content = path.read_bytes()
    source = random.Random(1)
    for _ in range(250):
        damaged = bytearray(content)
        damaged[source.randrange(len(content))] ^= 1 << source.randrange(8)
        path.write_bytes(bytes(damaged))
        loaded = loaded_or_refused(path)
        # Padding, dates and the like carry no meaning.
        assert loaded is None or loaded == mask
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        refusal(path)
