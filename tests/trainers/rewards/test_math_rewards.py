from __future__ import annotations

import sys
import threading

import pytest

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'sparse-opt[math]'")

from trl.rewards import accuracy_reward

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.trainers.rewards.functions import load_rewards
from sparse_opt.trainers.rewards.math import answered, math_reward

# Completion, right answer.
PAIRS = [
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"My answer is \boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"\boxed{0.5}", r"$\frac{1}{2}$"),
    (r"<think>\boxed{3}</think> The answer is $\boxed{4}$.", "So it is $4$."),
    ("The final answer is $x^2 + 1$.", "We find $1 + x^2$"),
    (r"\boxed{42}", "Adding gives 42."),
    ("42", "42"),
    ("The final answer is 42.", "42"),
    (r"\boxed{4", r"\boxed{4}"),
    ("", r"\boxed{4}"),
    (r"\boxed{4}", "It has no solution."),
    (r"\boxed{12000}", r"\boxed{12,000}"),
    (r"\boxed{10\text{ cm}}", r"\boxed{10}"),
    (r"\boxed{(1, 2]}", r"\boxed{(1,2]}"),
    (r"\boxed{\{2, 1\}}", r"\boxed{\{1,2\}}"),
]


def test_solutions_are_judged_as_trl_judges_them():
    texts, solutions = map(list, zip(*PAIRS, strict=True))
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    expected = accuracy_reward(completions, solutions)
    assert {1.0, 0.0, None} == set(expected)
    assert math_reward(completions, solution=solutions) == expected
    assert math_reward(texts, solution=solutions) == expected
    assert math_reward(completions, answer=None, solution=solutions) == expected


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", r"\boxed{2}"),  # bare, math-verify reads 2
        ("x^2+1", r"\boxed{1 + x^2}", r"\boxed{x^2}"),  # bare, it reads nothing
        (r"y = \pm 2", r"\boxed{y = \pm 2}", r"\boxed{y = 2}"),
        ("42", r"\boxed{42}", r"\boxed{24}"),
        (42, r"\boxed{42.0}", r"\boxed{24}"),
        (r"$\frac12$", r"\boxed{0.5}", r"\boxed{2}"),
        (r"\boxed{7}", r"\boxed{7}", r"\boxed{8}"),
        (r"\(7\)", r"\boxed{7}", r"\boxed{8}"),
    ],
)
def test_answers_are_formulas(answer, right, wrong):
    assert math_reward([right, wrong, "7 or 42"], answer=[answer] * 3) == [1.0, 0.0, 0.0]


def test_answer_goes_before_solution():
    assert math_reward([r"\boxed{4}"], answer=["4"], solution=["$5$"]) == [1.0]


def test_no_right_answer_is_none():
    assert math_reward([r"\boxed{4}"] * 2, answer=[None, "4"]) == [None, 1.0]
    assert math_reward([r"\boxed{4}"], solution=["No solution."]) == [None]
    with pytest.raises(DataError, match="needs a column answer or solution"):
        math_reward([r"\boxed{4}"])


def test_answered():
    texts = [r"\boxed{4}", "4", r"The answer is $\frac{1}{2}$.", "I do not know.", r"\boxed{4"]
    assert answered(texts) == [True, False, True, False, False]
    assert load_rewards(["think_format", "math"]).answered(texts) == answered(texts)


def test_another_thread_is_refused():
    errors = []

    def call() -> None:
        for function in (lambda: math_reward([r"\boxed{4}"], answer=["4"]), lambda: answered([r"\boxed{4}"])):
            with pytest.raises(SparseOptError, match="in thread elsewhere.*only the main thread can set") as error:
                function()
            errors.append(error)

    thread = threading.Thread(target=call, name="elsewhere")
    thread.start()
    thread.join()
    assert len(errors) == 2


def test_missing_math_verify_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"needs math-verify.*pip install 'sparse-opt\[math\]'"):
        load_rewards(["think_format", "math"])
    load_rewards(["think_format"])
