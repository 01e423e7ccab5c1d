"""Invalid files and options: an error of one line that names them, exit code 2 or 1, and never a traceback.

A wrong call ends with 2, a file that cannot be used with 1.
"""

from __future__ import annotations

import io
import json
import struct
import sys

import pytest
import torch

from sparse_opt.tensors import metadata_digest

DEEP = b"[" * 100_000
LARGE = "1" + "0" * 23
PAIR = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PAIR) + "\n")
    return file


@pytest.fixture
def train(sparse_opt, files, rows, tmp_path):
    """`train("sft", *words)`: a run of a step of TRL's trainer on the tiny model into tmp_path/out."""

    def call(algorithm, *words, model=files.model):
        where = ("--model_name_or_path", model, "--dataset_name", rows, "--output_dir", tmp_path / "out")
        shape = ("--max_steps", 1, "--per_device_train_batch_size", 2, "--report_to", "none")
        rollout = ("--num_generations", 2, "--max_completion_length", 4) if algorithm == "grpo" else ()
        return sparse_opt("train", algorithm, *where, *shape, *rollout, *words)

    return call


# Options


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("option", ["learning_rate", "adam_beta1", "max_grad_norm", "mask_density"])
def test_a_float_that_is_none_to_compute_with(train, option, value):
    assert f"--{option} is " in train("sft", f"--{option}={value}").failed_in_one_line(2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("quickstart", ("--seed", LARGE)),
        ("quickstart", ("--device", "meta")),
        ("mask", ("random", "--density", "nan", "--seed", LARGE)),
        ("bench", ("baseline", "dpo", "--small", "--seed", LARGE)),
        ("bench", ("baseline", "dpo", "--small", "--learning_rate", "nan")),
        ("bench", ("baseline", "dpo", "--device", "meta")),
        ("bench", ("baseline", "dpo", "--device", "gpu")),
    ],
)
def test_numbers_and_devices_of_other_commands(sparse_opt, files, tmp_path, command, words):
    rest = ("--model_name", files.model, "--output", tmp_path / "x.safetensors") if command == "mask" else ()
    sparse_opt(command, *words, *rest).failed_in_one_line(2)


# Configuration files

# Each key is a list of nine times the one before: a few hundred bytes for 9^8 values.
ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b",".join([b"*%c" % (letter - 1)] * 9)) for letter in b"bcdefghi"
)


@pytest.mark.parametrize(
    "content",
    [
        b"text", b"- 1\n", b"3", bytes(range(256)), b"\0" * 100, "seed: é".encode("latin-1"), DEEP, b"{a: " * 20_000,
        b"seed: &a [*a]\n", b"seed: *x\n", b"run_name: 2020-99-99\n", b"seed: " + b"9" * 5000, b"seed: !x 1\n",
        b"num_train_epochs: x\n",
        b"seed: true\n", b"seed: 1\nseed: 2\n", b"3: 4\n", b"? [a, b]\n: 1\n", b"seed: 1\n---\nseed: 2\n",
        ALIASES,
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_a_config_file_that_is_none(train, tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    line = train("sft", "--config", file).failed_in_one_line(2)
    assert str(file) in line and len(line) < 1000


def test_a_folder_in_place_of_a_config_file(train, tmp_path):
    assert f"config file {tmp_path}: Is a directory" in train("sft", "--config", tmp_path).failed_in_one_line(2)


# Rewards


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("f = 3", 2, "own_rewards has no function f"),
        ("import nowhere", 2, "cannot import own_rewards: No module named 'nowhere'"),
        ("def f(**columns): return None", 1, "'f' returned None, expected a list of numbers"),
        (
            "def f(completions, **columns): return [10**400] * len(completions)",
            1,
            "completion 0: returned 1000000",
        ),
        ("def f(completions, **columns): return ['x'] * len(completions)", 1, "returned 'x', expected a finite number"),
        ("def f(completions, **columns): return [1.0]", 1, "'f' returned 1 rewards for 2 completions"),
        ("def f(completions, nope, **columns): return [1.0, 1.0]", 1, "'f': missing a required argument: 'nope'"),
        (
            "import torch\ndef f(completions, **columns):\n    torch.set_grad_enabled(not torch.is_grad_enabled())\n"
            "    return [1.0] * len(completions)",
            1,
            "'f' leaves torch.is_grad_enabled() ",
        ),
    ],
)
def test_a_reward_function_that_fails(train, tmp_path, monkeypatch, source, code, said):
    (tmp_path / "own_rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    assert said in train("grpo", "--reward_funcs", "own_rewards.f").error_line(code)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["nope", ".f", "os.nope", "os.path", "nowhere.f"])
def test_a_reward_function_that_is_not_there(train, name):
    assert "reward function" in train("grpo", f"--reward_funcs={name}").failed_in_one_line(2)


# Masks


def safetensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def mask_file(shapes, positions=b"\0\0\0\0", dtype="I32", **changes):
    """A mask of one position whose metadata have their digest."""
    metadata = {
        "format": "sparse-opt mask",
        "format_version": "1",
        "shapes": shapes if isinstance(shapes, str) else json.dumps(shapes),
        "pattern": "element",
        "sparsity": "90",
        "digest": "0" * 32,
        **changes,
    }
    metadata["metadata_digest"] = metadata_digest(metadata)
    tensor = {"dtype": dtype, "shape": [1], "data_offsets": [0, len(positions)]}
    return safetensors_file({"__metadata__": metadata, "w": tensor}, positions)


def pt_file(content):
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


ONE = torch.zeros(1, dtype=torch.bool)
SAFETENSORS_MASKS = {
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "deep shapes": mask_file(DEEP.decode()),
    "negative position": mask_file({"w": [4]}, struct.pack("<i", -1)),
    "no text": mask_file({"w": [4]}, method="\ud800"),
}
# Others are read by the same function as delta logs of `.pt` files: tests/delta/test_pt.py.
PT_MASKS = {
    "cut": pt_file({"w": ONE})[:-30],
    "expanded": pt_file({"w": ONE.expand(800, 10**9)}),
    "meta": pt_file({"w": torch.zeros(10**12, dtype=torch.bool, device="meta")}),
    "list": pt_file([1]),
    "name that is no text": pt_file({"\ud800": ONE}),
}


@pytest.mark.parametrize(
    ("suffix", "name"),
    [*((".safetensors", name) for name in SAFETENSORS_MASKS), *((".pt", name) for name in PT_MASKS)],
)
def test_a_mask_that_is_none(sparse_opt, train, tmp_path, suffix, name):
    file = tmp_path / f"mask{suffix}"
    file.write_bytes((SAFETENSORS_MASKS if suffix == ".safetensors" else PT_MASKS)[name])
    assert str(file) in sparse_opt("mask", "info", file).failed_in_one_line(1)


def test_a_mask_that_is_none_to_train_under(train, tmp_path):
    file = tmp_path / "mask.pt"
    file.write_bytes(PT_MASKS["expanded"])
    line = train("sft", "--mask", file).failed_in_one_line(1)
    assert "w is [800, 1000000000] with strides [0, 0] over 1 stored bytes, expected 800000000000" in line
    assert not (tmp_path / "out").exists()
