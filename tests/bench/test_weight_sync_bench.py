"""The benchmark of weight updates: a small run with two processes, its report, and wrong options."""

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.bench import report, rows, weight_sync
from sparse_opt.bench.rows import Run
from sparse_opt.bench.weight_sync import VARIANTS, result_rows
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
    assert "in 5 of 5 rows" in out and len(list((tmp_path / "masks").iterdir())) == 2


def test_rows_and_their_targets():
    result = {"ms": 4.5, "p20_ms": 4.4, "p80_ms": 4.6, "n_rounds": 20, "nnz": 1000, "stream_ms": 1.0}
    result |= {
        "variant": "element_changed",
        "message_bytes": 150,
        "sent_values": 10,
        "receiver_bytes": {"positions": 2100},
    }
    gpu = {"cpu": "C", "gpu": {"name": "NVIDIA H200"}}
    run = Run({"machine": gpu}, result_rows(result, "default", {"shape": "3b"}))
    whole = {**result, "variant": "weights", "ms": 20.0, "message_bytes": 80000}
    run.rows += result_rows(whole, "default", {"shape": "3b"})
    assert report.ratio(run, run.rows[0], "all weights") == pytest.approx(4.5 / 20)
    met = {verdict.row.metric: verdict.met for verdict in report.judge(run)}
    # 0.15 bytes are more than a bit and 2.1 bytes for each of 1 %.
    assert met == {"time": False, "message an element": False, "receiver's memory an element": True}


def test_weights_that_differ_are_wrong_and_have_no_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        weight_sync, "run_in_process", lambda *args, **options: [{"variant": "weights", "right": False}]
    )
    assert weight_sync.main(["--small", "--output", str(tmp_path / "o.json")]) == 1
    assert "WRONG RESULT: default, weights: weights differ between the ranks" in capsys.readouterr().err
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "element"], "--variants element: expected some of"),
        (["--networks", "sockets"], "--networks sockets: expected some of default"),
    ],
)
def test_wrong_options_end_before_any_work(words, message, tmp_path, capsys):
    assert main(["bench", "weight_sync", "--small", "--output", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err
