"""Rows of TRL runs are trained as the file says, or refused by name. Row numbers begin at 1."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, ScriptArguments, SFTConfig, SFTTrainer

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.integrations.trl.console import LogWarnings
from sparse_opt.integrations.trl.data import RowsDigest, load_rows
from sparse_opt.integrations.trl.tokenized_rows import check_tokenized

TURNS = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}<eos>{% endfor %}"
TURNS += "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = TURNS.replace("CONTENT", "m.content")
STRIPS = TURNS.replace("CONTENT", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content")
THINKS_IN_PROMPT = PLAIN.replace("<assistant>{% endif", "<assistant><think>{% endif")
TOOLS = "{{ tools | tojson }}" + TURNS.replace(
    "CONTENT", "m.reasoning_content }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls"
)
ROLES = [f"<{role}>" for role in ("system", "user", "assistant", "tool")]
THOUGHT = "<think>two and two is four</think>4"


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


ASK, ANSWER, WRONG = message("user", "2 + 2?"), message("assistant", "4"), message("assistant", "5")
CALL = {"type": "function", "id": "x1", "function": {"name": "add", "arguments": {"a": 2, "b": 2.5}}}
ADD = {"type": "function", "function": {"name": "add", "description": "sum"}}


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of one token for each character; its templates are set by `trainer`."""
    words = ["<pad>", "<eos>", "?", *ROLES, *sorted(set(string.printable) - {"?"})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=ROLES
    )


@pytest.fixture
def trainer(characters, tiny_llama, tmp_path):
    """`trainer("sft", rows, template)`: TRL's trainer of these rows, not trained."""

    def make(algorithm: str, rows: Any, template: str = PLAIN, **options: Any) -> Any:
        config, trainer_class = {
            "sft": (SFTConfig, SFTTrainer),
            "dpo": (DPOConfig, DPOTrainer),
            "grpo": (GRPOConfig, GRPOTrainer),
        }[algorithm]
        characters.chat_template = template
        model = tiny_llama(vocab_size=len(characters), max_position_embeddings=256, pad_token_id=0, eos_token_id=1)
        model.save_pretrained(tmp_path / "model")
        characters.save_pretrained(tmp_path / "model")
        if algorithm == "grpo":
            options = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 2, **options}
        options = {"max_steps": 2, "save_steps": 1, "logging_steps": 1, "disable_tqdm": True, **options}
        args = config(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to=[], **options)
        reward = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if algorithm == "grpo" else {}
        return trainer_class(
            str(tmp_path / "model"), args=args, train_dataset=rows, processing_class=characters, **reward
        )

    return make


@pytest.fixture
def load(tmp_path):
    """`load("sft", rows)`: load_rows of a file with these rows, or with this text."""

    def read(algorithm: str, content: Any, name: str = "rows.jsonl", **options: Any) -> Dataset:
        if not isinstance(content, str):
            content = "\n".join(map(json.dumps, content))
        (tmp_path / name).write_text(content)
        return load_rows(ScriptArguments(dataset_name=str(tmp_path / name), **options), algorithm)

    return read


def qa(*answers: str) -> str:
    """Lines of JSON with these spellings of `answer`."""
    return "\n".join(f'{{"prompt": "q", "answer": {answer}}}' for answer in answers)


@pytest.mark.parametrize(
    ("answers", "read"),
    [
        (["7", "2.5"], ["7", "2.5"]),
        (["2.50", "1"], ["2.5", "1"]),
        (['"2024-05-01"', '"2024-05-02"'], ["2024-05-01", "2024-05-02"]),
        (["12345678901234567890123", "1"], ["12345678901234567890123", "1"]),
        (["true", '"yes"', "null"], ["true", "yes", None]),
        (["0.5", "null"], [0.5, None]),
        (['["a", 1]', '["b", 2.5]'], [["a", 1], ["b", 2.5]]),
    ],
)
def test_answers_are_what_the_file_says(load, answers, read):
    rows = load("grpo", qa(*answers))
    assert [json.dumps(answer) for answer in rows["answer"]] == [json.dumps(answer) for answer in read]
    assert json.dumps(rows.map(lambda row: {"new": 1})[1]["answer"]) == json.dumps(read[1])


def test_columns_that_are_trained_are_text(load):
    assert load("sft", '{"prompt": "q", "completion": 4}\n{"prompt": "r", "completion": 5}')[0]["completion"] == "4"
    rows = load("grpo", "prompt,answer\nq,007\nq,NA\nq,2024-05-01\nq,", "rows.csv")
    assert rows["answer"][:] == ["007", "NA", "2024-05-01", ""]
    array = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b", "note": "only here"}]
    assert load("sft", json.dumps(array, indent=1), "rows.json")["note"][:] == [None, "only here"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "rows.jsonl, line 1: .*recursion"),
        ('{"prompt": "a"}\n{"prompt": "b"', "rows.jsonl, line 2: .* expected one JSON object a line"),
        ('{"prompt": "a"}\n{"prompt": [{}]}', "row 2, column 'prompt': message 1 is {}, expected an object"),
        ('{"prompt": "a", "x": [{"y": 3.141592653589793}, "z"]}', "column 'x': `datasets` would change .* in row 1"),
        ('{"prompt": "a", "tools": []}', "GRPOTrainer does not render the column 'tools': remove or rename"),
    ],
)
def test_files_that_cannot_be_trained_are_refused_in_one_line(load, text, error):
    with pytest.raises(DataError, match=error) as caught:
        load("grpo", text)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_splits_and_slices_of_local_files(load, tmp_path):
    lines = [{"prompt": str(i)} for i in range(20)]
    assert load("grpo", lines, dataset_train_split="train[:10%]+train[-1:]")["prompt"][:] == ["0", "1", "19"]
    for split, error in {"test": "has no split 'test', only train", "train[": "train\\["}.items():
        with pytest.raises(ConfigError, match=f"--dataset_train_split {error}|--dataset_train_split test: .* {error}"):
            load("grpo", lines, dataset_train_split=split)
    with pytest.raises(DataError, match=r"has no rows in split train\[5:2\]"):
        load("grpo", lines, dataset_train_split="train[5:2]")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(qa("1.5") + f'\n{{"prompt": "{name}"}}')
    read = load_rows(ScriptArguments(dataset_name=str(folder), dataset_train_split="validation"), "grpo")
    assert (read["prompt"][:], read["answer"][0]) == (["q", "validation"], 1.5)
    read.save_to_disk(tmp_path / "saved")
    saved = load_rows(ScriptArguments(dataset_name=str(tmp_path / "saved"), dataset_train_split="train[1:]"), "grpo")
    assert saved["prompt"][:] == ["validation"]
    for options, error in (
        ({"dataset_name": str(tmp_path / "none.jsonl")}, "none.jsonl: no such file"),
        ({"dataset_name": str(folder), "dataset_streaming": True}, "--dataset_streaming is for datasets of the hub"),
        ({}, "--dataset_name is missing"),
    ):
        with pytest.raises(ConfigError, match=error):
            load_rows(ScriptArguments(**options), "grpo")


def test_datasets_of_the_hub_are_loaded_by_name(monkeypatch):
    asked = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        rows = Dataset.from_list([{"prompt": "a"}])
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    options = {"dataset_name": "org/questions", "dataset_config": "easy", "dataset_train_split": "test[:5]"}
    assert load_rows(ScriptArguments(**options), "grpo")[0] == {"prompt": "a"}
    assert asked == [("org/questions", {"name": "easy", "split": "test[:5]", "streaming": False})]
    assert list(load_rows(ScriptArguments(**options, dataset_streaming=True), "grpo")) == [{"prompt": "a"}]
    monkeypatch.undo()
    with pytest.raises(DataError, match="dataset org/questions cannot be read: .*org/questions"):
        load_rows(ScriptArguments(dataset_name="org/questions"), "grpo")


def test_conversations_that_repeat_the_prompt_are_rendered_once(load, trainer, characters):
    for prompt in ([ASK], ASK["content"]):
        rows = load("dpo", [{"prompt": prompt, "chosen": [ASK, ANSWER], "rejected": [ASK, WRONG]}])
        dpo = trainer("dpo", rows)
        row = dpo.train_dataset[0]
        assert characters.decode(row["prompt_ids"]) == "<user>2 + 2?<eos><assistant>"
        assert [characters.decode(row[name]) for name in ("chosen_ids", "rejected_ids")] == ["4<eos>", "5<eos>"]
        check_tokenized(dpo)
    later = message("user", "and 3 + 3?")
    for bad, error in (
        ({"prompt": [ASK], "completion": [later, ANSWER]}, "'completion' begins with the user's message"),
        ({"prompt": [ASK], "completion": "4"}, "of 'prompt' and 'completion', one is text"),
    ):
        with pytest.raises(DataError, match=error):
            load("sft", [bad])
    with pytest.raises(DataError, match="row 1: chosen and rejected begin with different messages"):
        load("dpo", [{"chosen": [ASK, ANSWER], "rejected": [later, WRONG]}])


def test_empty_completions_and_equal_pairs_are_reported(load):
    row = {"prompt": "a", "completion": "b"}
    with pytest.warns(UserWarning, match="a completion is empty in 1 of 2 rows, the first is row 2"):
        load("sft", [row, {**row, "completion": " "}])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.warns(UserWarning, match="chosen equals rejected in 1 of 2 rows, the first is row 2"):
        load("dpo", [pair, {**pair, "rejected": "b"}])
    with pytest.raises(DataError, match="chosen equals rejected in 1 of 1 rows"):
        load("dpo", [{**pair, "rejected": "b"}])


def completions(algorithm: str, text: str) -> dict[str, Any]:
    """A row of messages whose completion is this text."""
    answer = [message("assistant", text)]
    if algorithm == "sft":
        return {"prompt": [ASK], "completion": answer}
    return {"prompt": [ASK], "chosen": answer, "rejected": [WRONG]}


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_template_that_strips_what_is_trained_is_refused(load, trainer, algorithm):
    rows = load(algorithm, [completions(algorithm, text) for text in ("4", THOUGHT, THOUGHT)])
    column = "completion" if algorithm == "sft" else "chosen"
    error = f"2 of the rows .* \\(3 of 3 compared\\); row 2: content .*two and two.* is not in the labels of '{column}'"
    with pytest.raises(ConfigError, match=error):
        check_tokenized(trainer(algorithm, rows, STRIPS), rows)
    check_tokenized(trainer(algorithm, rows, PLAIN), rows)
    check_tokenized(trainer(algorithm, rows, THINKS_IN_PROMPT), rows)


@pytest.mark.parametrize("options", [{"max_length": 24}, {"max_length": 24, "packing": True}])
def test_truncation_and_packing_do_not_count(load, trainer, options):
    for template in (PLAIN, STRIPS):
        rows = load("sft", [completions("sft", THOUGHT + "4" * 40)])
        sft = trainer("sft", rows, template, **options)
        assert max(map(len, sft.train_dataset["input_ids"])) == 24
        if template == PLAIN:
            check_tokenized(sft, rows)
        else:
            with pytest.raises(ConfigError, match="1 of the rows"):
                check_tokenized(sft, rows)
    if "packing" in options:
        with pytest.warns(UserWarning, match="packed or tokenized rows are not compared"):
            check_tokenized(sft)


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (message("assistant", "", tool_calls=[CALL]), 'tool_calls "add" of the assistant is not in the labels'),
        (message("assistant", "4", reasoning_content="two and two"), 'reasoning_content "two and two"'),
        (message("assistant", "4"), 'the tool "add" is not in its tokens'),
    ],
)
def test_fields_that_the_template_drops_are_named(load, trainer, answer, missing):
    rows = load("sft", [{"messages": [ASK, answer], "tools": [ADD] if "tool " in missing else []}])
    with pytest.raises(ConfigError, match=missing):
        check_tokenized(trainer("sft", rows, PLAIN), rows)
    check_tokenized(trainer("sft", rows, TOOLS), rows)


def test_arguments_of_tools_keep_their_keys_and_numbers(load, trainer, characters):
    calls = [{"name": "add", "arguments": {"a": 2}}, {"name": "at", "arguments": {"x": 2.5, "y": None}}]
    lines = [{"messages": [ASK, message("assistant", "", tool_calls=[{"function": call}])]} for call in calls]
    rows = load("sft", lines)
    sft = trainer("sft", rows, TOOLS)
    check_tokenized(sft, rows)
    for row, call in zip(sft.train_dataset, calls, strict=True):
        assert json.dumps([{"function": call}]) in characters.decode(row["input_ids"])


def test_a_text_of_another_turn_is_not_the_answer(load, trainer):
    drops = TURNS.replace("CONTENT", "m.content if m.role == 'user'")
    rows = load("sft", [{"messages": [ASK, message("assistant", "2"), message("user", "and 4?")]}])
    with pytest.raises(ConfigError, match=r'row 1: content "2" of the assistant is not'):
        check_tokenized(trainer("sft", rows, drops), rows)


def test_prompts_of_grpo_are_compared(load, trainer):
    lines = [{"prompt": [message("system", "be brief"), ASK]}]
    rows = load("grpo", lines)
    check_tokenized(trainer("grpo", rows))
    with pytest.raises(ConfigError, match='row 1: content "be brief" of the system is not in its'):
        check_tokenized(trainer("grpo", rows, PLAIN.replace("in messages", "in messages if m.role != 'system'")))


def test_many_rows_are_sampled_and_streams_begin_at_their_start(trainer):
    rows = Dataset.from_list([completions("sft", THOUGHT) for _ in range(300)])
    sft = trainer("sft", rows, STRIPS)
    with pytest.raises(ConfigError, match=r"256 of the rows .*\(256 of 300 compared\)"):
        check_tokenized(sft, rows)
    with pytest.raises(ConfigError, match=r"\(the first 256 compared\)"):
        check_tokenized(sft, rows.to_iterable_dataset())


def test_resuming_after_the_rows_changed_is_refused(load, trainer, tmp_path):
    lines = [{"prompt": f"{i}", "completion": "a"} for i in range(4)]

    def run(lines: list[Any], callback: Any = RowsDigest, **resume: Any) -> None:
        rows = load("sft", lines)
        sft = trainer("sft", rows)
        sft.add_callback(callback(rows))
        sft.train(**resume)

    run(lines)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    run(lines, resume_from_checkpoint=checkpoint)
    for edited in ([*lines[:3], {"prompt": "3", "completion": "b"}], lines[::-1], lines[:3]):
        with pytest.raises(DataError, match="not those of the checkpoint of step 1"):
            run(edited, resume_from_checkpoint=checkpoint)
    state = Path(checkpoint) / "trainer_state.json"
    content = json.loads(state.read_text())
    del content["stateful_callbacks"]["rows_digest"]
    state.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="the checkpoint has no digest"):
        run(lines, resume_from_checkpoint=checkpoint)


def test_a_run_without_a_signal_warns_once(load, trainer):
    grpo = trainer("grpo", load("grpo", [{"prompt": "a"}, {"prompt": "b"}]))
    grpo.add_callback(LogWarnings())
    with pytest.warns(UserWarning, match="rewards of each prompt are all equal") as caught:
        grpo.train()
    texts = [str(warning.message) for warning in caught]
    assert [text.partition(":")[0] for text in texts if "rewards of each prompt" in text] == ["step 1"]
    with pytest.warns(UserWarning, match="all completions are empty"):
        LogWarnings().on_log(grpo.args, grpo.state, grpo.control, logs={"completions/max_length": 1.0})
    dpo = trainer("dpo", load("dpo", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2))
    dpo.add_callback(LogWarnings())
    with pytest.warns(UserWarning, match="step 1: rewards/accuracies is 0 because all margins are 0"):
        dpo.train()
