"""Model folders that are damaged, or of another model than their configuration: refused in one line."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparse_opt.errors import DataError
from sparse_opt.trainers.pretrained import load_config_from, load_pretrained, load_tokenizer_from


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def load(folder):
    return load_pretrained(AutoModelForCausalLM, folder, "a causal language model", dtype=torch.float32)


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write(folder, name, content):
    path = folder / name
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def test_a_whole_model_is_loaded_bit_for_bit(folder):
    expected = load_file(folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")),
            "no weights for 1 tensors of a causal language model, among them model.norm.weight",
        ),
        (
            lambda f: edit_weights(f, lambda t: t.update(extra=torch.ones(2))),
            "has 1 tensors that a causal language model of its config.json lacks, among them extra",
        ),
        (lambda f: edit_config(f, num_attention_heads=0), "ZeroDivisionError: "),
        (lambda f: (f / "config.json").unlink(), "the folder has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    ],
)
def test_a_damaged_model_is_refused(folder, harm, message):
    harm(folder)
    with pytest.raises(DataError) as error:
        load(folder)
    assert str(folder) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", bytes(range(256))])
def test_a_damaged_tokenizer_is_refused(folder, file, content):
    write(folder, file, content)
    with pytest.raises(DataError, match=f"^cannot load a tokenizer from {folder}: [^\n]*$"):
        load_tokenizer_from(folder)


def test_a_damaged_configuration_is_refused(folder):
    write(folder, "config.json", b"3")
    with pytest.raises(DataError, match=f"^cannot load the configuration of {folder}: [^\n]*$"):
        load_config_from(folder)
