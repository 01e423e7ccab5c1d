"""The end-to-end benchmark: its inputs, and one small run."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.bench import dpo_step


def test_pairs_have_exactly_the_length_asked_for():
    tokenizer = dpo_step.word_tokenizer()
    pairs = dpo_step.preference_pairs(5, 64, seed=1)
    assert len({pair["chosen"] for pair in pairs} | {pair["rejected"] for pair in pairs}) == 10
    for pair in pairs:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        for completion in (pair["chosen"], pair["rejected"]):
            ids = tokenizer(pair["prompt"] + completion)["input_ids"]
            assert len(ids) + 1 == 64  # the trainer adds the EOS
            assert ids[: len(prompt)] == prompt
            assert tokenizer.unk_token_id not in ids


@pytest.mark.slow
def test_a_small_run_of_both_modes(tmp_path, capsys):
    pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")
    path = tmp_path / "dpo_step.json"
    arguments = ["--small", "--n_steps", "4", "--n_warmup", "1", "--sequence_length", "32", "--work_dir", str(tmp_path)]
    assert dpo_step.main([*arguments, "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["mode"] for row in report["rows"]] == ["dense", "sparse"]
    assert report["nnz"] == pytest.approx(0.025 * report["numel"], rel=0.02)
    for row in report["rows"]:
        assert row["first_loss"] == pytest.approx(math.log(2), abs=dpo_step.FIRST_LOSS_ATOL)
        assert row["n_tokens"] == 2 * 32
        assert row["p20_s"] <= row["median_s"]["step"] <= row["p80_s"]
    assert "a sparse step takes" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["dpo_step.json"]


def test_a_run_without_timed_steps_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        dpo_step.main(["--small", "--n_steps", "5", "--n_warmup", "5"])
    assert stopped.value.code == 2
    assert "leaves nothing after" in capsys.readouterr().err
