"""The teacher's reward against plain numpy on ragged batches; the student's log-probabilities against whole rows'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import plain_logprobs

from sparse_opt.trainers.data.encoding import TokenSequence, collate
from sparse_opt.trainers.data.teacher_data import StudentSequence
from sparse_opt.trainers.rewards.student import spans, student_logprobs
from sparse_opt.trainers.rlt import reduce_span, teacher_reward

REDUCE = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def ragged(generator, n_rows, longest, least=0):
    """Rows of log-probabilities of drawn lengths; as a tensor with its mask, where the padding is anything at all."""
    rows = [-generator.exponential(2.0, generator.integers(least, longest + 1)) for _ in range(n_rows)]
    width = max(map(len, rows))
    values = torch.from_numpy(generator.choice([np.inf, -np.inf, np.nan, 7.0], (n_rows, width)))
    mask = torch.zeros(n_rows, width, dtype=torch.bool)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.from_numpy(row)
        mask[index, : len(row)] = True
    return rows, values.float(), mask


def expected_reward(solutions, teachers, students, closed, settings):
    """One completion after another, in float64."""
    rewards = []
    for solution, teacher, student, is_closed in zip(solutions, teachers, students, closed, strict=True):
        reward = 0.0 if is_closed else -settings["format_penalty"]
        for how, weight in zip(settings["solution_reductions"], settings["solution_coefficients"], strict=True):
            reward += weight * REDUCE[how](solution)
        for how, weight in zip(settings["kl_reductions"], settings["kl_coefficients"], strict=True):
            kl = REDUCE[how](teacher - student) if len(teacher) else settings["format_penalty"]
            reward -= weight * kl
        rewards.append(reward)
    return rewards


SETTINGS = [
    {
        "solution_reductions": ["mean", "min"],
        "solution_coefficients": [1.0, 0.01],
        "kl_reductions": ["mean", "max"],
        "kl_coefficients": [3.0, 0.03],
        "format_penalty": 1.0,
    },
    {
        "solution_reductions": ["sum", "max", "mean"],
        "solution_coefficients": [0.5, -2.0, 1.5],
        "kl_reductions": ["min"],
        "kl_coefficients": [0.7],
        "format_penalty": 2.5,
    },
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["the-paper's", "others"])
@pytest.mark.parametrize("seed", range(5))
def test_reward_is_the_formula(settings, seed):
    generator = np.random.default_rng(seed)
    n_rows = 11
    solutions, solution_logprobs, solution_mask = ragged(generator, n_rows, 6, least=1)
    teachers, teacher_logprobs, mask = ragged(generator, n_rows, 9)
    students = [-generator.exponential(2.0, len(row)) for row in teachers]
    student = torch.full_like(teacher_logprobs, torch.nan)
    for index, row in enumerate(students):
        student[index, : len(row)] = torch.from_numpy(row)
    closed = torch.from_numpy(generator.random(n_rows) < 0.5)
    reward = teacher_reward(solution_logprobs, solution_mask, teacher_logprobs, student, mask, closed, **settings)
    expected = expected_reward(solutions, teachers, students, closed.tolist(), settings)
    # Sums of at most 9 differences of about 10, weighted by at most 3: some 20 fp32 roundings of numbers up to 300.
    np.testing.assert_allclose(reward.total.numpy(), expected, rtol=0, atol=20 * 300 * 2**-24)


def test_defaults_are_the_papers():
    generator = np.random.default_rng(7)
    _, solution, solution_mask = ragged(generator, 4, 5, least=1)
    _, teacher, mask = ragged(generator, 4, 5)
    arguments = (solution, solution_mask, teacher, torch.zeros_like(teacher), mask, torch.tensor([True, False] * 2))
    assert torch.equal(teacher_reward(*arguments).total, teacher_reward(*arguments, **SETTINGS[0]).total)


def test_parts_add_up_and_are_named():
    solution = torch.tensor([[-1.0, -3.0]])
    teacher, student = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-2.0, -3.5]])
    every = torch.ones(1, 2, dtype=torch.bool)
    reward = teacher_reward(solution, every, teacher, student, every, torch.tensor([False]))
    found = {name: value.item() for name, value in reward.reduced.items()}
    assert found == {
        "solution_logprob_mean": -2.0,
        "solution_logprob_min": -3.0,
        "explanation_kl_mean": 2.0,
        "explanation_kl_max": 3.0,
    }
    assert reward.solution.item() == pytest.approx(-2.03)
    assert reward.kl.item() == pytest.approx(6.09)
    assert reward.format.item() == -1.0
    assert reward.total.item() == pytest.approx(-2.03 - 6.09 - 1.0)


def test_a_student_that_agrees_with_the_teacher_costs_nothing():
    """The divergence is a plain difference: 0 where both agree, and a reward where the student is surer."""
    solution, every = torch.tensor([[0.0], [0.0]]), torch.ones(2, 1, dtype=torch.bool)
    teacher, student = torch.tensor([[-2.0], [-2.0]]), torch.tensor([[-2.0], [-1.0]])
    reward = teacher_reward(solution, every, teacher, student, every, torch.ones(2, dtype=torch.bool))
    assert reward.kl.tolist() == pytest.approx([0.0, -3.03])


def test_what_the_reward_refuses():
    one, every = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    closed = torch.ones(2, dtype=torch.bool)
    mask = every & torch.tensor([[True], [False]])
    with pytest.raises(ValueError, match=r"1 of 2 solutions have no token"):
        teacher_reward(one, mask, one, one, every, closed)
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        teacher_reward(one, every, torch.zeros(2, 4), one, every, closed)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        teacher_reward(one, every, one, one, every, closed, kl_coefficients=[1.0])
    with pytest.raises(ValueError, match="'median'"):
        reduce_span(one, every, "median", empty=0.0)  # type: ignore[arg-type]


def test_spans_are_what_slicing_gives():
    values = torch.arange(24.0).view(2, 12)  # of positions 3 to 14
    cut, mask = spans(values, 3, [4, 10], [6, 0])
    assert cut.tolist() == [values[0, 1:7].tolist(), [0.0] * 6]
    assert mask.tolist() == [[True] * 6, [False] * 6]
    cut, mask = spans(values, 3, [3, 14], [0, 0])
    assert cut.shape == mask.shape == (2, 1) and not mask.any()


@pytest.mark.parametrize("rows_per_pass", [1, 2, 5])
def test_student_logprobs_are_those_of_the_whole_rows(model, rows_per_pass):
    generator = np.random.default_rng(2)
    sequences = []
    for _ in range(5):
        start, explanation, middle, solution = generator.integers([1, 0, 0, 1], 8)
        ids = generator.integers(6, 300, start + explanation + middle + solution).tolist()
        end = start + explanation
        sequences.append(StudentSequence(ids, slice(start, end), slice(end + middle, len(ids))))
    found = student_logprobs(
        model, sequences, pad_id=0, temperature=0.7, rows_per_pass=rows_per_pass, device=torch.device("cpu")
    )
    for row, sequence in enumerate(sequences):
        with torch.no_grad():
            whole = plain_logprobs(model, collate([TokenSequence(sequence.ids, 1)], 0), 0.7)[0]  # from position 1 on
        for name in ("solution", "explanation"):
            span = getattr(sequence, name)
            values, mask = getattr(found, name), getattr(found, f"{name}_mask")
            assert mask[row].sum() == span.stop - span.start
            # Logits of about 10 by 32 products, divided by 0.7: a few dozen roundings in another order.
            torch.testing.assert_close(
                values[row][mask[row]], whole[span.start - 1 : span.stop - 1], rtol=0, atol=64 * 16 * 2**-24
            )
