from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors

from sparse_opt.errors import DataError
from sparse_opt.integrations.trl.records import Example
from sparse_opt.trainers.data.encoding import encode
from sparse_opt.trainers.data.prompts import encode_prompt, load_prompts

USER = {"role": "user", "content": "What is 2 plus 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "It is 4."}


def write(rows: list[dict], folder: Path) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        ({"prompt": "2+2=", "answer": "4"}, "2+2=", {"answer": "4"}),
        ({"prompt": [SYSTEM, USER], "answer": "4"}, [SYSTEM, USER], {"answer": "4"}),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", {"chosen": "4", "rejected": "5"}),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=", {}),
        (
            {"problem": USER["content"], "solution": "2+2=4", "answer": "4", "generations": ["4", "5"]},
            [USER],
            {"problem": USER["content"], "solution": "2+2=4", "answer": "4", "generations": ["4", "5"]},
        ),
        (
            {"question": USER["content"], "system": "Be brief."},
            [SYSTEM, USER],
            {"question": USER["content"], "system": "Be brief."},
        ),
        ({"question": USER["content"], "system": ""}, [USER], {"question": USER["content"], "system": ""}),
    ],
    ids=["text", "messages", "preference", "completion", "openr1", "question", "no-system"],
)
def test_formats(tmp_path, chat_tokenizer, row, prompt, columns):
    examples, report = load_prompts(write([row], tmp_path), "train", chat_tokenizer, max_prompt_length=100)
    assert [example.prompt for example in examples] == [prompt]
    assert examples[0].columns == columns
    assert (report.n_rows, report.n_examples) == (1, 1)


def test_openr1_rows_keep_what_the_rewards_read(tmp_path, chat_tokenizer):
    row = {
        "problem": USER["content"],
        "solution": "2 + 2 = 4",
        "answer": "4",
        "generations": ["<think>a</think>4", "5"],
        "correctness_math_verify": [True, False],
        "messages": [USER, ANSWER],
    }
    ((example,), _) = load_prompts(write([row], tmp_path), "train", chat_tokenizer, max_prompt_length=100)
    assert example.columns == row
    assert example.messages == [USER]


def test_text_is_taken_verbatim(tokenizer):
    example = encode_prompt(tokenizer, "  2 plus 2\n", {"prompt": "  2 plus 2\n", "answer": "4"})
    assert example.ids == tokenizer("  2 plus 2\n")["input_ids"]
    assert (example.text, example.prompt, example.columns) == ("  2 plus 2\n", "  2 plus 2\n", {"answer": "4"})


@pytest.mark.parametrize("prompt", ["What is 2 plus 2?", "<s>What is 2 plus 2?", [USER], [SYSTEM, USER, ANSWER, USER]])
@pytest.mark.parametrize("template", [True, False])
def test_one_bos_no_eos_and_the_tokens_that_sft_trains_after(tokenizer, chat_tokenizer, prompt, template):
    tokenizer = chat_tokenizer if template else tokenizer
    example = encode_prompt(tokenizer, prompt)
    completion = " It is 4." if isinstance(prompt, str) else [ANSWER]
    ((sequence,), moved) = encode(tokenizer, Example(prompt, (completion,)))
    assert not moved
    assert example.ids == sequence.ids[: sequence.prompt_length]
    assert example.ids.count(tokenizer.bos_token_id) == 1 and example.ids[0] == tokenizer.bos_token_id
    assert example.ids[-1] != tokenizer.eos_token_id


def test_template_asks_the_assistant_to_answer(chat_tokenizer):
    example = encode_prompt(chat_tokenizer, [USER])
    assert example.text == "<s><|user|>What is 2 plus 2?</s><|assistant|>"
    assert chat_tokenizer.decode(example.ids) == example.text


def test_a_tokenizer_that_ends_texts_does_not_end_prompts(tokenizer):
    import copy

    ending = copy.deepcopy(tokenizer)
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)],
    )
    assert ending("2 plus 2")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode_prompt(ending, "2 plus 2").ids == tokenizer("2 plus 2")["input_ids"]


def test_long_and_empty_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": text} for text in ("2 plus 2", "", "2 plus 2 " * 20, " \n", "3 plus 3")]
    longest = len(tokenizer("2 plus 2")["input_ids"])
    examples, report = load_prompts(write(rows, tmp_path), "train", tokenizer, max_prompt_length=longest)
    assert [example.text for example in examples] == ["2 plus 2", "3 plus 3"]
    assert str(report) == (
        "2 prompts from 5 rows; 2 dropped as empty; 1 dropped because they are longer than max_prompt_length"
    )
    with pytest.raises(DataError, match="no prompts left; 0 prompts from 5 rows; 2 dropped as empty; 3 dropped"):
        load_prompts(write(rows, tmp_path), "train", tokenizer, max_prompt_length=longest - 1)


def test_subset_is_drawn_with_the_seed(tmp_path, tokenizer):
    path = write([{"prompt": f"{n} plus {n}", "answer": str(2 * n)} for n in range(50)], tmp_path)

    def drawn(seed: int) -> list[str]:
        examples, _ = load_prompts(path, "train", tokenizer, max_prompt_length=30, subset_size=10, seed=seed)
        assert all(example.columns["answer"] == str(2 * int(example.text.split()[0])) for example in examples)
        return [example.text for example in examples]

    assert drawn(1) == drawn(1)
    assert len(set(drawn(1))) == 10
    assert set(drawn(1)) != set(drawn(2))
    with pytest.warns(UserWarning, match="has 50 rows, not subset_size 51"):
        examples, _ = load_prompts(path, "train", tokenizer, max_prompt_length=30, subset_size=51)
    assert len(examples) == 50


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([{"text": "2 plus 2"}], r"found columns \(text\); expected \(prompt\) or \(problem\) or \(question\)"),
        ([{"prompt": [USER]}, {"prompt": [USER, ANSWER]}], "row 1: the prompt's last message is the assistant's"),
        ([{"problem": "2 plus 2"}, {"problem": None}], "row 1: found null"),
    ],
)
def test_rows_that_are_no_prompts(tmp_path, chat_tokenizer, rows, part):
    with pytest.raises(DataError, match=part):
        load_prompts(write(rows, tmp_path), "train", chat_tokenizer, max_prompt_length=100)
