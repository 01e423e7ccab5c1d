from __future__ import annotations

import copy
import json

import pytest

from sparse_opt.errors import DataError
from sparse_opt.integrations.trl.records import Example
from sparse_opt.trainers.data.encoding import TokenSequence, collate, encode, load_examples

CHAT = Example(
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 2?"}],
    ([{"role": "assistant", "content": "It is 4."}], [{"role": "assistant", "content": "Maybe 5, or not."}]),
)
TEXT = Example("What is 2 plus 2?", (" It is 4.", " Maybe 5, or not."))


def test_chat_template_is_applied_once(chat_tokenizer):
    sequences, moved = encode(chat_tokenizer, CHAT)
    assert not moved
    for sequence, completion in zip(sequences, CHAT.completions, strict=True):
        assert sequence.ids.count(chat_tokenizer.bos_token_id) == 1
        assert chat_tokenizer.decode(sequence.ids[sequence.prompt_length :]) == completion[0]["content"] + "</s>"
        prompt = chat_tokenizer.decode(sequence.ids[: sequence.prompt_length])
        assert prompt == "<s><|system|>Be brief.</s><|user|>What is 2 plus 2?</s><|assistant|>"


def test_text_gets_one_bos_and_one_eos(tokenizer):
    for prompt in (TEXT.prompt, "<s>" + TEXT.prompt):
        for completion in (TEXT.completions[0], TEXT.completions[0] + "</s>"):
            (sequence,), _ = encode(tokenizer, Example(prompt, (completion,)))
            assert sequence.ids.count(tokenizer.bos_token_id) == 1
            assert sequence.ids.count(tokenizer.eos_token_id) == 1
            assert tokenizer.decode(sequence.ids) == "<s>What is 2 plus 2? It is 4.</s>"


def test_text_is_verbatim_also_with_a_chat_template(tokenizer, chat_tokenizer):
    assert encode(chat_tokenizer, TEXT) == encode(tokenizer, TEXT)


def test_messages_without_a_template_are_joined_by_newlines(tokenizer):
    sequences, _ = encode(tokenizer, CHAT)
    assert tokenizer.decode(sequences[0].ids) == "<s>Be brief.\nWhat is 2 plus 2?\nIt is 4.</s>"
    assert tokenizer.decode(sequences[0].ids[: sequences[0].prompt_length]) == "<s>Be brief.\nWhat is 2 plus 2?\n"


def test_tokens_merged_across_the_border_count_as_completion(tokenizer):
    # " plus" is one token of this tokenizer: the prompt's " pl" is none of its beginnings.
    (sequence,), moved = encode(tokenizer, Example("What is 2 pl", ("us 2?",)))
    assert moved
    assert tokenizer.decode(sequence.ids[sequence.prompt_length :]).endswith("plus 2?</s>")
    assert tokenizer.decode(sequence.ids) == "<s>What is 2 plus 2?</s>"
    # The two completions of a pair have the same prompt, also where only one of them moves its end.
    (merged, apart), moved = encode(tokenizer, Example("What is 2 pl", ("us 2?", "ot?")))
    assert moved
    assert merged == sequence
    assert apart.ids[: apart.prompt_length] == merged.ids[: merged.prompt_length]


def test_truncation_keeps_the_asked_end():
    sequence = TokenSequence([0, 1, 2, 3, 4, 5], prompt_length=3)
    assert sequence.truncated(6, "keep_start") is sequence
    assert sequence.truncated(4, "keep_start") == TokenSequence([0, 1, 2, 3], 3)
    assert sequence.truncated(4, "keep_end") == TokenSequence([2, 3, 4, 5], 1)
    assert sequence.truncated(2, "keep_end") == TokenSequence([4, 5], 0)
    # Position 0 has no token before it to be predicted from.
    assert [sequence.truncated(n, "keep_end").n_trained for n in (6, 4, 2)] == [3, 3, 1]


def test_eos_is_trained_and_padding_is_not_even_when_they_share_an_id(tokenizer):
    eos = tokenizer.eos_token_id
    sequences, _ = encode(tokenizer, TEXT)
    batch = collate(sequences, pad_id=eos)
    for row, sequence in enumerate(sequences):
        end = len(sequence.ids)
        trained = batch.completion_mask[row].nonzero()[:, 0].tolist()
        assert trained == list(range(sequence.prompt_length, end))
        assert batch.input_ids[row, end - 1] == eos
        assert (batch.input_ids[row, end:] == eos).all()
        assert batch.attention_mask[row].tolist() == [1] * end + [0] * (batch.input_ids.shape[1] - end)
    assert min(len(sequence.ids) for sequence in sequences) < batch.input_ids.shape[1]
    assert batch.n_tokens == batch.attention_mask.sum()
    assert batch.n_trained == batch.completion_mask.sum()
    assert batch.first_trained == batch.completion_mask.any(0).nonzero()[0, 0]


@pytest.fixture
def rows_file(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_dropped_rows_are_counted(tokenizer, rows_file):
    fine = {"prompt": "What is 2?", "chosen": " It is 2.", "rejected": " Maybe 3."}
    rows = [fine, {**fine, "chosen": " "}, {**fine, "rejected": ""}, {**fine, "prompt": "What is 2? " * 20}]
    dataset = rows_file(rows)
    examples, report = load_examples("preference", dataset, "train", tokenizer, max_length=40)
    assert (report.n_rows, report.n_examples, report.n_dropped_empty, report.n_dropped_too_long) == (4, 1, 2, 1)
    assert str(report).startswith(
        "1 examples from 4 rows; 2 dropped for an empty completion; 1 dropped because max_length"
    )
    examples, report = load_examples(
        "preference", dataset, "train", tokenizer, max_length=40, truncation_mode="keep_end"
    )
    assert report.n_dropped_too_long == 0
    assert [len(sequence.ids) for sequence in examples[1]] == [40, 40]
    assert all(sequence.ids[-1] == tokenizer.eos_token_id for sequence in examples[1])


def test_subset_depends_on_the_seed_alone(tokenizer, pairs_file):
    def subset(seed):
        return load_examples(
            "preference", str(pairs_file), "train", tokenizer, max_length=64, subset_size=5, seed=seed
        )[0]

    assert len(subset(0)) == 5
    assert subset(0) == subset(0) != subset(1)


def test_errors_name_the_row(tokenizer, rows_file):
    fine = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: found null"):
        load_examples("preference", rows_file([fine, {**fine, "chosen": None}]), "train", tokenizer, max_length=64)
    with pytest.raises(DataError, match=r"rows\.jsonl: no examples left; 0 examples from 1 rows; 1 dropped"):
        load_examples("preference", rows_file([{**fine, "chosen": ""}]), "train", tokenizer, max_length=64)


def test_a_template_that_refuses_and_a_tokenizer_without_eos(tokenizer):
    refusing, endless = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(DataError, match="no system role here"):
        encode(refusing, CHAT)
    endless.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        encode(endless, TEXT)
