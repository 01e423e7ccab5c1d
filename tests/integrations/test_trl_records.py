"""The formats of rows that are read as prompts with completions."""

from __future__ import annotations

import pytest

from sparse_opt.integrations.trl.records import Example, demonstration_reader, preference_reader

USER = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
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
