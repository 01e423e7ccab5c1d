from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from trl.rewards import think_format_reward

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers.rewards.functions import (
    Rewards,
    answer_text,
    boxed_format,
    exact_match,
    last_boxed,
    load_rewards,
    think_format,
)

USER = [{"role": "user", "content": "2 + 2?"}]
NONE = float("nan")


def score(rewards: Rewards, completions: list[str], prompts: list | None = None, **columns: list):
    return rewards.score(prompts or ["2+2="] * len(completions), completions, [[7]] * len(completions), columns)


def same(values: torch.Tensor, expected: list[float]) -> bool:
    return torch.equal(values.nan_to_num(nan=-99.0), torch.tensor(expected).nan_to_num(nan=-99.0))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        (" 42\n", "42"),
        ("<think>40+2</think> 42", "42"),
        ("<think>a</think>b</think>42", "42"),
        (r"It is \boxed{41}, no, \boxed{ 42 }.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{42} or \boxed{4", "42"),
        (r"<think>\boxed{41}</think>42", "42"),
        ("<think>40+2 is 42", None),
        ("<think>40+2</think> ", None),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_answer_text(text, answer):
    assert answer_text(text) == answer


def test_last_boxed_wants_closed_braces():
    assert last_boxed(r"\boxed{4") is None
    assert last_boxed(r"\boxed 4") is None
    assert last_boxed(r"\boxed{4\}") is None


THOUGHTS = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "<think>a</think>",
    "<think></think>b",
    " <think>a</think>b",
    "\n<think>a</think>b",
    "b\n<think>a</think>b",
    "<think>a<think>b</think>c",
    "<think>a</think>b<think>c",
    "<think>a</think>b<think>c</think>",
    "<think>a</think>b</think>",
    "</think><think>",
    "a</think>b",
    "",
]


def test_think_format_is_trls():
    completions = [[{"role": "assistant", "content": text}] for text in THOUGHTS]
    expected = think_format_reward(completions)
    assert 0 < sum(expected) < len(expected)
    assert think_format(completions) == expected
    assert think_format(THOUGHTS) == expected


def test_boxed_format():
    texts = [r"so \boxed{4}", r"<think>x</think>\boxed{4}", r"<think>\boxed{4}</think>4", r"\boxed{}", "4"]
    assert boxed_format(texts) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_match():
    assert exact_match(["4", " 4 ", "4.0", "", r"\boxed{4}", "4"], [4, "4", "4", "4", " 4", None]) == [
        *(1.0, 1.0, 0.0, 0.0, 1.0),
        None,
    ]


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """`user_module(source)`: a module `my_rewards` in the current folder, as a user has one."""
    monkeypatch.chdir(tmp_path)

    def make(source: str) -> None:
        (tmp_path / "my_rewards.py").write_text(source)

    yield make
    sys.modules.pop("my_rewards", None)


def test_functions_get_what_trl_passes(user_module):
    user_module(
        "seen = []\n"
        "def length(prompts, completions, completion_ids, answer, **kwargs):\n"
        "    seen.append((prompts, completions, completion_ids, answer, kwargs))\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    rewards = load_rewards(["my_rewards:length"])
    columns = {"answer": ("4", "5", "6"), "level": [1, 2, 3]}
    total = rewards.score(["2+2=", USER, USER], ["4", "5", "6"], [(1,), (1, 2), (1, 2, 3)], columns).total
    assert total.dtype == torch.float32 and total.tolist() == [1.0, 2.0, 3.0]
    ((prompts, completions, completion_ids, answer, others),) = sys.modules["my_rewards"].seen
    assert prompts == ["2+2=", USER, USER]
    assert completions == ["4", *([{"role": "assistant", "content": text}] for text in "56")]
    assert completion_ids == [[1], [1, 2], [1, 2, 3]]
    assert (answer, others) == (["4", "5", "6"], {"level": [1, 2, 3]})


def test_importing_leaves_the_search_path(user_module):
    user_module("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    before = list(sys.path)
    load_rewards(["my_rewards:one"])
    assert sys.path == before


def test_weights_and_rows_that_functions_do_not_apply_to():
    functions = {
        "a": lambda **kwargs: [1, None, 0.5, None],
        "b": lambda **kwargs: [np.float32(2), torch.tensor(4.0), None, None],
    }
    scores = score(Rewards(functions, (2.0, -1.0)), ["x"] * 4)
    assert same(scores.by_function["a"], [1.0, NONE, 0.5, NONE])
    assert same(scores.total, [0.0, -4.0, 1.0, NONE])
    assert scores.means() == {"a": 0.75, "b": 3.0}


def test_sum_is_trls():
    """TRL 1.16's lines: weighted nansum, then NaN where no function applies."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 3, generator=generator)
    values[torch.rand(40, 3, generator=generator) < 0.5] = math.nan
    weights = torch.tensor([0.3, -1.7, 2.0])
    expected = (values * weights.unsqueeze(0)).nansum(dim=1)
    expected[torch.isnan(values).all(dim=1)] = math.nan
    assert expected.isnan().any()

    def column(index: int):
        returned = [None if math.isnan(value) else value for value in values[:, index].tolist()]
        return lambda **kwargs: returned

    rewards = Rewards({str(index): column(index) for index in range(3)}, tuple(weights.tolist()))
    assert same(score(rewards, ["x"] * 40).total, expected.tolist())


def test_a_function_that_applies_to_nothing_has_no_mean():
    scores = score(Rewards({"a": lambda **kwargs: [None], "b": lambda **kwargs: [1]}, (1.0, 1.0)), ["x"])
    assert scores.means() == {"b": 1.0}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "1.0", "good", [1.0, 2.0], object(), np.float64("nan")]
)
def test_no_number_is_refused_with_function_and_row(value):
    rewards = Rewards({"mine": lambda **kwargs: [1.0, None, value]}, (1.0,))
    with pytest.raises(DataError, match="reward function 'mine', row 2: returned .*expected a finite number, or None"):
        score(rewards, ["x"] * 3)


def test_wrong_number_of_rewards_is_refused():
    with pytest.raises(DataError, match="'mine' returned 2 rewards for 3 completions"):
        score(Rewards({"mine": lambda **kwargs: [1.0, 2.0]}, (1.0,)), ["x"] * 3)


def test_missing_argument_is_named():
    def wants_state(completions, trainer_state, **kwargs):
        return [0.0] * len(completions)

    def wants_no_columns(completions):
        return [0.0] * len(completions)

    for function, part in ((wants_state, "'trainer_state'.*completion_ids, answer"), (wants_no_columns, "kwargs")):
        with pytest.raises(DataError, match=part):
            score(Rewards({"mine": function}, (1.0,)), ["x"], answer=["4"])
    with pytest.raises(DataError, match="reward function 'exact_match'.*'answer'"):
        score(load_rewards(["exact_match"]), ["x"])


def test_errors_inside_a_function_are_its_own():
    def broken(completions, **kwargs):
        raise TypeError("mine")

    with pytest.raises(DataError, match=r"'broken' failed: TypeError: mine \(test_rewards.py:\d+\)$") as raised:
        score(Rewards({"broken": broken}, (1.0,)), ["x"])
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("names", "weights", "part"),
    [
        ([], None, "is empty: expected math, exact_match"),
        (["exact_mach"], None, "unknown reward function 'exact_mach': the nearest is 'exact_match'"),
        (["think_format", "think_format"], None, "'think_format' twice"),
        (["think_format"], [1.0, 2.0], "has 2 values, reward_functions 1"),
        (["think_format"], [math.nan], "nan: expected finite"),
        (["no_such_module_here:f"], None, "cannot import no_such_module_here: No module named"),
        (["my_rewards:f"], None, "my_rewards has no function f"),
        (["my_rewards:one"], None, "my_rewards has no function one"),
        (["my_rewards:slow"], None, "is a coroutine"),
        (["my_rewards:slow_object"], None, "is a coroutine"),
    ],
)
def test_names_that_cannot_be_loaded(user_module, names, weights, part):
    user_module(
        "one = 1\nasync def slow(**kwargs):\n    return []\n"
        "class Slow:\n    async def __call__(self, **kwargs):\n        return []\n"
        "slow_object = Slow()\n"
    )
    with pytest.raises(ConfigError, match=part):
        load_rewards(names, weights)


def test_names_of_modules_are_short_where_that_is_clear(user_module):
    user_module("def one(**kwargs): return []\ndef think_format(**kwargs): return []\n")
    rewards = load_rewards(["think_format", "my_rewards:think_format", "my_rewards:one"], [1, 2, 3])
    assert list(rewards.functions) == ["think_format", "my_rewards:think_format", "one"]
    assert rewards.weights == (1, 2, 3)


def test_answered_without_math():
    rewards = load_rewards(["exact_match"])
    assert rewards.answered(["42", "<think>so</think>", "<think>so", r"\boxed{4}"]) == [True, False, False, True]
