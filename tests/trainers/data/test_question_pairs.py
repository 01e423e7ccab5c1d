"""Questions with answers as prompts and demonstrations, and the reward that verifies numbers."""

from __future__ import annotations

import json

import pytest

from sparse_opt.integrations.trl.records import demonstration_reader, prompt_reader
from sparse_opt.trainers.data import question_pairs
from sparse_opt.trainers.rewards.functions import load_rewards


@pytest.fixture
def convert(tmp_path):
    def run(rows, *words, name="rows.json"):
        lines = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (tmp_path / name).write_text(lines, encoding="utf-8")
        output = tmp_path / "out.jsonl"
        output.unlink(missing_ok=True)
        assert question_pairs.main(["--input", str(tmp_path / name), "--output", str(output), *words]) == 0
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]

    return run


def test_prompts_and_demonstrations(convert):
    (plain,) = convert([["How long is 2 m in cm? ", 200.0]])
    assert plain == {"prompt": "How long is 2 m in cm? ", "question": "How long is 2 m in cm?", "answer": "200.0"}
    assert prompt_reader(plain, "d")(plain) == "How long is 2 m in cm? "
    (answered,) = convert([["q", 2.5]], "--answer_as_completion")
    assert demonstration_reader(answered, "d")(answered).completions == ("<answer>2.5</answer>",)
    (chat,) = convert([["q", 1]], "--style", "chat", "--system", "Be brief.")
    assert [m["role"] for m in chat["prompt"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (chat["prompt"][0]["content"], chat["prompt"][-1]["content"]) == ("Be brief.", "q")
    (reasoned,) = convert([["q", 3, "1 + 2 = <answer>3</answer>"]], "--style", "chat")
    assert reasoned["completion"] == [{"role": "assistant", "content": "1 + 2 = <answer>3</answer>"}]


def test_kept_completions_become_demonstrations_of_the_plain_question(convert):
    kept = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    kept |= {"completion": [{"role": "assistant", "content": "c"}], "reward": 1.0}
    assert convert([kept], name="kept.jsonl") == [{"prompt": "q ", "question": "q", "completion": "c"}]


@pytest.mark.parametrize("rows", [{}, [], [["q"]], [["q", 1, "r", 2]], [3], [{"prompt": "q"}]], ids=json.dumps)
def test_rows_of_other_forms_are_refused(tmp_path, capsys, rows):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    call = ["--input", str(tmp_path / "rows.json"), "--output", str(tmp_path / "out.jsonl")]
    assert question_pairs.main(call) == 1
    assert "rows.json" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("60 * 4 = <answer>240</answer>", "240.0", 1.0),
        ("<answer>251</answer>", 240, 1.0),
        ("<answer>252</answer>", 240, 0.0),  # 5 % away
        ("240, so <answer>24 h", 240, 0.0),  # without the closing tag
        ("it is 1,200.5 m", "1200", 1.0),
        ("-2e3", -2000.0, 1.0),
        ("no number", 1, 0.0),
        ("<answer>0</answer>", 0, 0.0),
        ("<answer>1</answer>", "unknown", None),
    ],
)
def test_the_reward_of_numbers(completion, answer, reward):
    rewards = load_rewards(["number"])
    scores = rewards.score(["q"], [completion], [[1]], {"answer": [answer]})
    assert scores.total.isnan().item() if reward is None else scores.total.item() == reward
    assert rewards.answered([completion]) == ["no number" not in completion]
