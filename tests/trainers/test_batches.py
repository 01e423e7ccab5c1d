"""From rows to batches: files, formats, the rules of encoding, prompts, the order of examples."""

import copy
import json
from pathlib import Path

import pytest
from tokenizers import processors

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.integrations.trl.records import Example, demonstration_reader, preference_reader
from sparse_opt.trainers.batches import (
    TokenSequence,
    collate,
    encode,
    encode_prompt,
    load_examples,
    load_prompts,
    load_rows,
    shuffled,
)

USER = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(rows: list[dict], path: Path) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files(tmp_path, suffix):
    rows = [{"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}] * 2
    assert load_rows(write(rows, tmp_path / f"data{suffix}")) == rows


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv2", b"a,b\n", ConfigError),
        ("torn.jsonl", b'{"prompt": "a", "cho', DataError),
        ("none.json", b"", DataError),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name):
        load_rows(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"dataset nothing\.jsonl: no such file"):
        load_rows("nothing.jsonl")


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": None, "chosen": "4", "rejected": "5"}, "found null"),
        ({"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}, "'prompt' is missing"),
        ({"chosen": [RIGHT, RIGHT], "rejected": [WRONG, WRONG]}, "share no first message"),
        ({"prompt": [{"role": "user"}], "chosen": [RIGHT], "rejected": [WRONG]}, "expected role and content"),
        ({"prompt": "2 + 2?", "chosen": "4"}, r"found columns \(chosen, prompt\); expected \(chosen, prompt, rejected"),
    ],
)
def test_rows_that_do_not_fit(tmp_path, chat_tokenizer, row, part):
    dataset = write([row], tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=rf"rows\.jsonl.*{part}"):
        load_examples("preference", dataset, "train", chat_tokenizer, max_length=64)


# Encoding

CHAT = Example(
    [SYSTEM, {"role": "user", "content": "What is 2 plus 2?"}],
    ([{"role": "assistant", "content": "It is 4."}], [{"role": "assistant", "content": "Maybe 5, or not."}]),
)
TEXT = Example("What is 2 plus 2?", (" It is 4.", " Maybe 5, or not."))


def test_chat_template_is_applied_once(chat_tokenizer):
    for sequence, completion in zip(encode(chat_tokenizer, CHAT), CHAT.completions, strict=True):
        assert sequence.ids.count(chat_tokenizer.bos_token_id) == 1
        assert chat_tokenizer.decode(sequence.ids[sequence.prompt_length :]) == completion[0]["content"] + "</s>"
        prompt = chat_tokenizer.decode(sequence.ids[: sequence.prompt_length])
        assert prompt == "<s><|system|>Be brief.</s><|user|>What is 2 plus 2?</s><|assistant|>"


def test_text_gets_one_bos_and_one_eos_also_with_a_chat_template(tokenizer, chat_tokenizer):
    for prompt in (TEXT.prompt, "<s>" + TEXT.prompt):
        for completion in (TEXT.completions[0], TEXT.completions[0] + "</s>"):
            (sequence,) = encode(tokenizer, Example(prompt, (completion,)))
            assert sequence.ids.count(tokenizer.bos_token_id) == 1
            assert sequence.ids.count(tokenizer.eos_token_id) == 1
            assert tokenizer.decode(sequence.ids) == "<s>What is 2 plus 2? It is 4.</s>"
    assert encode(chat_tokenizer, TEXT) == encode(tokenizer, TEXT)


def test_messages_without_a_template_are_joined_by_newlines(tokenizer):
    sequence = encode(tokenizer, CHAT)[0]
    assert tokenizer.decode(sequence.ids) == "<s>Be brief.\nWhat is 2 plus 2?\nIt is 4.</s>"
    assert tokenizer.decode(sequence.ids[: sequence.prompt_length]) == "<s>Be brief.\nWhat is 2 plus 2?\n"


def test_tokens_merged_across_the_border_count_as_completion(tokenizer):
    # " plus" is one token of this tokenizer: the prompt's " pl" is none of its beginnings.
    (sequence,) = encode(tokenizer, Example("What is 2 pl", ("us 2?",)))
    assert tokenizer.decode(sequence.ids[sequence.prompt_length :]).endswith("plus 2?</s>")
    assert tokenizer.decode(sequence.ids) == "<s>What is 2 plus 2?</s>"
    # The two completions of a pair have the same prompt, also where only one of them moves its end.
    merged, apart = encode(tokenizer, Example("What is 2 pl", ("us 2?", "ot?")))
    assert merged == sequence
    assert apart.ids[: apart.prompt_length] == merged.ids[: merged.prompt_length]


def test_eos_is_trained_and_padding_is_not_even_when_they_share_an_id(tokenizer):
    eos = tokenizer.eos_token_id
    sequences = encode(tokenizer, TEXT)
    batch = collate(sequences, pad_id=eos)
    for row, sequence in enumerate(sequences):
        end = len(sequence.ids)
        assert batch.completion_mask[row].nonzero()[:, 0].tolist() == list(range(sequence.prompt_length, end))
        assert batch.input_ids[row, end - 1] == eos
        assert (batch.input_ids[row, end:] == eos).all()
        assert batch.attention_mask[row].tolist() == [1] * end + [0] * (batch.input_ids.shape[1] - end)
    assert min(len(sequence.ids) for sequence in sequences) < batch.input_ids.shape[1]
    assert batch.n_tokens == batch.attention_mask.sum()
    assert batch.n_trained == batch.completion_mask.sum()
    assert batch.first_trained == batch.completion_mask.any(0).nonzero()[0, 0]


def test_batches_are_padded_to_a_multiple():
    sequences = [TokenSequence([5] * length, 9) for length in (11, 19)]
    batch = collate(sequences, pad_id=0, multiple=8)
    assert batch.input_ids.shape == (2, 24)
    assert (batch.first_trained, batch.n_tokens, batch.n_trained) == (8, 30, 12)
    assert batch.completion_mask.sum(dim=1).tolist() == [2, 10]


def test_rows_without_a_trained_token_are_dropped_with_a_count(tokenizer, tmp_path):
    fine = {"prompt": "What is 2?", "chosen": " It is 2.", "rejected": " Maybe 3."}
    rows = [fine, {**fine, "chosen": " "}, {**fine, "rejected": ""}, {**fine, "prompt": "What is 2? " * 20}]
    with pytest.warns(UserWarning, match="3 of 4 rows dropped as empty, or without a completion token within max_len"):
        examples = load_examples("preference", write(rows, tmp_path / "rows.jsonl"), "train", tokenizer, max_length=40)
    assert len(examples) == 1
    short = load_examples("preference", write([fine], tmp_path / "one.jsonl"), "train", tokenizer, max_length=10)
    assert [sequence.ids for sequence in short[0]] == [sequence.ids[:10] for sequence in examples[0]]


def test_a_template_that_refuses_and_a_tokenizer_without_eos(tokenizer):
    refusing, endless = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(DataError, match="no system role here"):
        encode(refusing, CHAT)
    endless.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        encode(endless, TEXT)


# Prompts


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "2+2=", "answer": "4"}, "2+2="),
        ({"prompt": [SYSTEM, USER], "answer": "4"}, [SYSTEM, USER]),
        ({"problem": "2 + 2?", "solution": "2+2=4", "answer": "4"}, [USER]),
        ({"question": "2 + 2?", "system": "Be brief."}, [SYSTEM, USER]),
    ],
    ids=["text", "messages", "openr1", "question"],
)
def test_prompts_keep_their_form_and_the_columns_of_their_row(tmp_path, chat_tokenizer, row, text):
    dataset = write([row], tmp_path / "data.jsonl")
    (prompt,) = load_prompts(dataset, "train", chat_tokenizer, max_length=100)
    assert (prompt.text, prompt.row) == (text, row)


@pytest.mark.parametrize("prompt", ["What is 2 plus 2?", "<s>What is 2 plus 2?", [USER], [SYSTEM, USER, RIGHT, USER]])
@pytest.mark.parametrize("template", [True, False])
def test_a_prompt_has_the_tokens_that_sft_trains_after(tokenizer, chat_tokenizer, prompt, template):
    tokenizer = chat_tokenizer if template else tokenizer
    ids = encode_prompt(tokenizer, prompt)
    (sequence,) = encode(tokenizer, Example(prompt, (" It is 4." if isinstance(prompt, str) else [RIGHT],)))
    assert ids == sequence.ids[: sequence.prompt_length]
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids[-1] != tokenizer.eos_token_id


def test_a_tokenizer_that_ends_texts_does_not_end_prompts(tokenizer):
    ending = copy.deepcopy(tokenizer)
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)],
    )
    assert ending("2 plus 2")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode_prompt(ending, "2 plus 2") == tokenizer("2 plus 2")["input_ids"]


def test_long_and_empty_prompts_are_dropped(tmp_path, tokenizer):
    rows = [{"prompt": text} for text in ("2 plus 2", "", "2 plus 2 " * 20, " \n", "3 plus 3")]
    longest = len(tokenizer("2 plus 2")["input_ids"])
    with pytest.warns(UserWarning, match="3 of 5 rows dropped as empty, or longer than"):
        found = load_prompts(write(rows, tmp_path / "a.jsonl"), "train", tokenizer, max_length=longest)
    assert [prompt.text for prompt in found] == ["2 plus 2", "3 plus 3"]


def test_a_subset_is_drawn_with_the_seed(tmp_path, tokenizer):
    path = write([{"prompt": f"{n}", "completion": " plus"} for n in range(50)], tmp_path / "b.jsonl")

    def drawn(seed: int, size: int = 10) -> list[list[int]]:
        return [
            row.ids for (row,) in load_examples("demonstration", path, "train", tokenizer, size, seed, max_length=9)
        ]

    assert drawn(1) == drawn(1) and sorted(drawn(1)) != sorted(drawn(2)) and len(set(map(tuple, drawn(1)))) == 10
    with pytest.warns(UserWarning, match="has 50 rows, not subset_size 51"):
        assert len(drawn(1, 51)) == 50


def test_order_visits_every_example_once_an_epoch_and_can_start_anywhere():
    visited = shuffled(7, 1, 0, 21)
    epochs = [visited[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert shuffled(7, 1, 9, 5) == visited[9:14]
    assert shuffled(7, 2, 0, 21) != visited


CONVERSATION = Example([USER], ([RIGHT], [WRONG]))
LIGHT_R1 = [{"from": "human", "value": "2 + 2?"}]

PREFERENCE_ROWS = {
    "trl-text": ({"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}, Example("2 + 2?", (" 4", " 5"))),
    "trl-messages": ({"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, CONVERSATION),
    "trl-implicit": ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, CONVERSATION),
    "orca": (
        {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
        Example([SYSTEM, USER], ([RIGHT], [WRONG])),
    ),
    "light-r1": (
        {
            "conversations": LIGHT_R1,
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": [{"from": "assistant", "value": "5"}],
        },
        CONVERSATION,
    ),
}


@pytest.mark.parametrize("name", PREFERENCE_ROWS)
def test_preference_formats(name):
    row, expected = PREFERENCE_ROWS[name]
    assert preference_reader(row, "data")(row) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?", "completion": " 4"}, Example("2 + 2?", (" 4",))),
        ({"prompt": [USER], "completion": [RIGHT]}, Example([USER], ([RIGHT],))),
        ({"messages": [SYSTEM, USER, RIGHT]}, Example([SYSTEM, USER], ([RIGHT],))),
        (PREFERENCE_ROWS["orca"][0], Example([SYSTEM, USER], ([RIGHT],))),
        ({"problem": "2 + 2?", "solution": "4", "answer": "4"}, Example([USER], ([RIGHT],))),
    ],
    ids=["text", "messages", "conversation", "chosen-of-preference", "problem"],
)
def test_demonstration_formats(row, expected):
    assert demonstration_reader(row, "data")(row) == expected
