from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_opt.errors import DataError
from sparse_opt.integrations.trl.records import Example, demonstration_reader, preference_reader
from sparse_opt.trainers.data.rows import load_records

USER = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = Example([USER], ([RIGHT], [WRONG]))


def light_r1(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


PREFERENCE_ROWS = {
    "trl-text": ({"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}, Example("2 + 2?", (" 4", " 5"))),
    "trl-messages": ({"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, CONVERSATION),
    "trl-implicit": ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, CONVERSATION),
    "text-prompt-repeated": ({"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, CONVERSATION),
    "same-answers": ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, Example([USER], ([RIGHT], [RIGHT]))),
    "orca": (
        {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
        Example([SYSTEM, USER], ([RIGHT], [WRONG])),
    ),
    "orca-empty-system": ({"system": "", "question": "2 + 2?", "chosen": "4", "rejected": "5"}, CONVERSATION),
    "light-r1": (
        {
            "conversations": [light_r1("human", "2 + 2?")],
            "chosen": light_r1("gpt", "4"),
            "rejected": light_r1("gpt", "5"),
        },
        CONVERSATION,
    ),
    "light-r1-lists": (
        {
            "conversations": [light_r1("user", "2 + 2?")],
            "chosen": [light_r1("assistant", "4")],
            "rejected": [light_r1("assistant", "5")],
        },
        CONVERSATION,
    ),
    "light-r1-text": ({"conversations": [light_r1("human", "2 + 2?")], "chosen": "4", "rejected": "5"}, CONVERSATION),
}


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
@pytest.mark.parametrize("name", PREFERENCE_ROWS)
def test_preference_formats_from_files(tmp_path, name, suffix):
    row, expected = PREFERENCE_ROWS[name]
    records = load_records(write([row, row], tmp_path / f"data{suffix}"))
    read = preference_reader(records.column_names, "data")
    assert [read(record) for record in records] == [expected, expected]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?", "completion": " 4"}, Example("2 + 2?", (" 4",))),
        ({"prompt": [USER], "completion": [RIGHT]}, Example([USER], ([RIGHT],))),
        ({"messages": [SYSTEM, USER, RIGHT]}, Example([SYSTEM, USER], ([RIGHT],))),
        (PREFERENCE_ROWS["orca"][0], Example([SYSTEM, USER], ([RIGHT],))),
        ({"problem": "2 + 2?", "solution": "4", "answer": "4"}, Example([USER], ([RIGHT],))),
        (
            {"problem": "2+2", "solution": "5", "generations": ["5"], "messages": [USER, RIGHT]},
            Example([USER], ([RIGHT],)),
        ),
    ],
    ids=["text", "messages", "conversation", "chosen-of-preference", "problem", "openr1"],
)
def test_demonstration_formats(row, expected):
    assert demonstration_reader(row, "data")(row) == expected


@pytest.mark.parametrize(
    ("reader", "columns", "expected"),
    [
        (preference_reader, ["prompt", "chosen"], ["(chosen, prompt)", "(chosen, prompt, rejected)", "question"]),
        (preference_reader, ["prompt", "completion"], ["(completion, prompt)", "(chosen, conversations, rejected)"]),
        (
            demonstration_reader,
            ["text"],
            ["(text)", "(completion, prompt)", "(messages)", "(chosen, prompt, rejected)"],
        ),
    ],
)
def test_missing_column_names_file_found_and_expected(reader, columns, expected):
    with pytest.raises(DataError) as error:
        reader(columns, "my/file.jsonl")
    message = str(error.value)
    assert "my/file.jsonl" in message
    assert [part for part in expected if part not in message] == [], message


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": None, "chosen": "4", "rejected": "5"}, "found null"),
        ({"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}, "'prompt' is missing"),
        ({"chosen": [RIGHT, RIGHT], "rejected": [WRONG, WRONG]}, "share no first message"),
        ({"prompt": [{"role": "wizard", "content": "x"}], "chosen": [RIGHT], "rejected": [WRONG]}, "wizard"),
        ({"prompt": [{"role": "user"}], "chosen": [RIGHT], "rejected": [WRONG]}, "expected role and content"),
        ({"messages": [USER]}, "roles ['user']"),
    ],
)
def test_rows_that_do_not_fit(row, part):
    with pytest.raises(DataError, match="found|missing|share|roles") as error:
        (demonstration_reader if "messages" in row else preference_reader)(row, "data")(row)
    assert part in str(error.value)


def test_files_that_cannot_be_read_give_one_error(tmp_path, caplog, capsys):
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        load_records(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"unknown file type '\.csv', expected \.json"):
        load_records(str(tmp_path / "data.csv"))
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a", "cho')
    with pytest.raises(DataError, match=r"torn\.jsonl: cannot be read"):
        load_records(str(tmp_path / "torn.jsonl"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"torn\.parquet: cannot be read"):
        load_records(str(tmp_path / "torn.parquet"))
    for name, text, problem in (("nothing", "", "the file is empty"), ("none", "[]", "no rows|cannot be read")):
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(DataError, match=rf"{name}\.json: ({problem})"):
            load_records(str(tmp_path / f"{name}.json"))
    assert "Failed to" not in caplog.text + capsys.readouterr().err
