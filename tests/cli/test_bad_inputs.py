"""Invalid files and options: an error of one line that names them, exit code 2 or 1, and never a traceback.

A wrong call ends with 2, a file that cannot be used with 1.
"""

import struct
import sys

import pytest
import torch

DEEP = b"[" * 100_000

# Options


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
@pytest.mark.parametrize("option", ["learning_rate", "mask_density"])
def test_a_float_that_is_none_to_compute_with(train, option, value):
    assert f"--{option} is " in train("sft", f"--{option}={value}").failed_in_one_line(2)


# Configuration files

# Each key is a list of nine times the one before: a few hundred bytes for 9^8 values.
ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b",".join([b"*%c" % (letter - 1)] * 9)) for letter in b"bcdefghi"
)


@pytest.mark.parametrize(
    "content",
    [
        b"text", b"- 1\n", bytes(range(256)), "seed: é".encode("latin-1"), DEEP, b"seed: &a [*a]\n",
        b"run_name: 2020-99-99\n", b"seed: " + b"9" * 5000, b"seed: !x 1\n", b"seed: true\n", b"3: 4\n",
        b"seed: 1\n---\nseed: 2\n", ALIASES,
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_a_config_file_that_is_none(train, tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    line = train("sft", "--config", file).failed_in_one_line(2)
    assert str(file) in line and len(line) < 1000


# Rewards


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import nowhere", 2, "cannot import own_rewards: No module named 'nowhere'"),
        ("def f(**columns): return None", 1, "'f' returned None, expected a list of numbers"),
        ("def f(completions, **columns): return ['x'] * len(completions)", 1, "returned 'x', expected a finite number"),
        ("def f(completions, **columns): return [1.0]", 1, "'f' returned 1 rewards for 2 completions"),
        ("import torch\ndef f(**columns): torch.set_grad_enabled(False)", 1, "'f' leaves torch.is_grad_enabled() "),
    ],
)
def test_a_reward_function_that_fails(train, tmp_path, monkeypatch, source, code, said):
    (tmp_path / "own_rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    assert said in train("grpo", "--reward_funcs", "own_rewards.f").error_line(code)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["nope", "os.nope", "os.path", "nowhere.f"])
def test_a_reward_function_that_is_not_there(train, name):
    assert "reward function" in train("grpo", f"--reward_funcs={name}").failed_in_one_line(2)


# Masks


def test_a_mask_file_that_is_none(sparse_opt, train, tmp_path):
    """tests/masks has all that a mask file may not be."""
    file = tmp_path / "mask.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert str(file) in sparse_opt("mask", "info", file).failed_in_one_line(1)
    file = tmp_path / "mask.pt"
    torch.save({"w": torch.zeros(1, dtype=torch.bool).expand(800, 10**9)}, file)
    line = train("sft", "--mask", file).failed_in_one_line(1)
    assert "w is [800, 1000000000] with strides [0, 0] over 1 stored bytes, expected 800000000000" in line
    assert not (tmp_path / "out").exists()
