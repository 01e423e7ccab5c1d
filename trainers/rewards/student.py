"""The student of RLT: its model, its tokenizer, and its log-probabilities of explanations and solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt.errors import ConfigError

from ..data.encoding import TokenSequence, collate
from ..data.teacher_data import StudentSequence, TeacherExample
from ..policy.logprobs import token_logprobs
from ..policy.pretrained import load_config_from, load_tokenizer_from, max_positions
from ..ranks import ONE_RANK, Ranks


@dataclass(frozen=True)
class StudentLogprobs:
    """Log-probabilities under the student with masks: [R, S] of solution tokens, [R, E] of explanation tokens."""

    solution: Tensor
    solution_mask: Tensor
    explanation: Tensor
    explanation_mask: Tensor


@torch.no_grad()
def student_logprobs(
    model: nn.Module,
    sequences: Sequence[StudentSequence],
    *,
    pad_id: int,
    temperature: float,
    rows_per_pass: int,
    device: torch.device,
    ranks: Ranks = ONE_RANK,
) -> StudentLogprobs:
    """Log-probabilities of the student's sequences at a temperature, `rows_per_pass` sequences per forward pass.

    The ranks share the sequences, and all get all log-probabilities.
    """
    width = max(len(sequence.ids) for sequence in sequences)
    logprobs = torch.zeros(len(sequences), width, dtype=torch.float32, device=device)  # a column a position
    for rows in ranks.passes(0, len(sequences), rows_per_pass):
        part = [TokenSequence(sequence.ids, sequence.explanation.start) for sequence in sequences[rows]]
        batch = collate(part, pad_id).to(device)
        columns = slice(batch.first_trained, batch.input_ids.shape[1])
        logprobs[rows, columns] = token_logprobs(model, batch, temperature)
    ranks.sum(logprobs)

    def cut(positions: list[slice]) -> tuple[Tensor, Tensor]:
        return spans(logprobs, 0, [span.start for span in positions], [span.stop - span.start for span in positions])

    return StudentLogprobs(
        *cut([sequence.solution for sequence in sequences]), *cut([sequence.explanation for sequence in sequences])
    )


def spans(values: Tensor, first: int, starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Left-align one span of each row: values and mask, both [R, N], where N is the longest length and at least 1.

    Args:
        values: [R, P], for positions `first` to first + P - 1.
        starts, lengths: start and length of each row's span, in positions.
    """
    start, length = (
        torch.tensor(numbers, dtype=torch.int64, device=values.device)[:, None] for numbers in (starts, lengths)
    )
    columns = torch.arange(max(1, *lengths), device=values.device)
    mask = columns < length
    index = torch.where(mask, start - first + columns, 0)
    return torch.where(mask, values.gather(1, index), 0.0), mask


def load_student_tokenizer(name: str, tokenizer: Any) -> Any:
    """The student's tokenizer, whose chat template may differ from the policy's.

    Raises:
        ConfigError: its vocabulary differs, so that the student cannot read the teacher's tokens.
        DataError: it cannot be loaded.
    """
    own = load_tokenizer_from(name)
    words, policy_words = own.get_vocab(), tokenizer.get_vocab()
    if words != policy_words:
        different = min(words.items() ^ policy_words.items(), key=lambda item: (item[1], item[0]))[0]
        raise ConfigError(
            f"option 'student_model': {name} has another vocabulary than the policy, {len(words)} tokens against "
            f"{len(policy_words)}; {different!r} has id {words.get(different)} there, {policy_words.get(different)} "
            "here. The student must read the teacher's tokens"
        )
    return own


def require_student_positions(name: str, examples: Sequence[TeacherExample], max_completion_length: int) -> None:
    """Raise ConfigError if the student's longest sequence has more tokens than its model has positions."""
    limit = max_positions(load_config_from(name))
    longest = max(len(example.student_sequence([]).ids) for example in examples)
    if limit is not None and longest + max_completion_length > limit:
        raise ConfigError(
            f"a question with its solution is {longest} tokens to the student, and max_completion_length "
            f"{max_completion_length} makes {longest + max_completion_length}, more than the max_position_embeddings "
            f"of {name}, {limit}"
        )
