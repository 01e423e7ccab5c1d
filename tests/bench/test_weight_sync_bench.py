"""The benchmark of weight updates: a small run with two processes, and wrong weights."""

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.bench import rows, weight_sync
from sparse_opt.bench.weight_sync import VARIANTS
from sparse_opt.cli.main import main


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd, run_here):
    run_here(weight_sync)
    output = tmp_path / "weight_sync.json"
    words = ["--small", "--n_rounds", "3", "--output", str(output), "--learning_rate", "1e-4"]
    # A bf16 product takes milliseconds on a CPU: the sequences are short.
    code = main(["bench", "weight_sync", *words, "--sequence_length", "8", "--mask_dir", str(tmp_path / "masks")])
    out, err = capfd.readouterr()
    assert code == 0, err
    run = rows.read(output)
    times = [row for row in run.rows if row.metric == "time"]
    assert len(times) == len(VARIANTS)
    assert all(row.p20 <= row.value <= row.p80 and row.n == 3 for row in times)
    each = {
        row.case["sent"]: row.value for row in run.matching(pattern="element") if row.metric == "message an element"
    }
    assert 2 < each["values"] < 2.1 and 0.125 < each["changed"] < 2
    (changed,) = [row.value for row in run.matching(pattern="element") if row.metric == "changed"]
    assert 0 < changed < 1
    (whole,) = [row for row in times if row.case.get("pattern") is None]
    assert all(row is whole or run.peer(row, "all weights") is whole for row in times)
    assert "in 5 of 5 rows" in out and len(list((tmp_path / "masks").iterdir())) == 2


def test_weights_that_differ_are_wrong_and_have_no_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        weight_sync, "run_in_process", lambda *args, **options: [{"variant": "weights", "right": False}]
    )
    assert weight_sync.main(["--small", "--output", str(tmp_path / "o.json")]) == 1
    assert "WRONG RESULT: default, weights: weights differ between the ranks" in capsys.readouterr().err
    assert not (tmp_path / "o.json").exists()
