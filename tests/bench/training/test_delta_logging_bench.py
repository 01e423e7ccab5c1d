"""The benchmark of a logging loop, on a tiny model."""

import re

import pytest

from sparse_opt import DeltaLog, backends
from sparse_opt.bench import rows
from sparse_opt.bench.training import delta_logging
from sparse_opt.errors import ConfigError

needs_native = pytest.mark.skipif(
    bool(backends.why_unavailable("cpu", "cpu")), reason="needs the native extension, as patches are timed in it alone"
)
SMALL = ["--small", "--n_blocks", "1", "--n_steps", "2", "--sequence_length", "16", "--learning_rate", "1e-4"]


@needs_native
def test_both_modes_are_timed_shown_and_written(tmp_path, capsys):
    path, work = tmp_path / "new" / "logging.json", tmp_path / "work"
    assert delta_logging.main([*SMALL, "--work_dir", str(work), "--output", str(path)]) == 0
    assert list(work.iterdir()) == []
    run = rows.read(path)
    assert run.completed
    for mode in ("dense", "sparse"):
        found = {row.metric: row for row in run.matching(mode=mode)}
        assert found["step"].n == found["logged step"].n == found["append, host"].n == 2
        difference = found["logged step"].value - found["step"].value
        assert found["slower by, median"].value == pytest.approx(difference)
        assert 0 < found["changed"].value <= (1 if mode == "dense" else 0.026)
        assert found["a step in the log"].value > 0 and found["step"].case["file_system"]
    assert "slower by, mean" in capsys.readouterr().out


@needs_native
def test_a_log_that_is_not_the_model_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(DeltaLog, "step_of", lambda self, model: None)
    path = tmp_path / "logging.json"
    assert delta_logging.main([*SMALL, "--modes", "dense", "--work_dir", str(tmp_path), "--output", str(path)]) == 1
    assert "WRONG RESULT: mode dense: the model has the weights of step None, logged " in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "dense,lora"], "--modes dense,lora: expected some of dense, adamw8bit, galore, sparse,"),
    ],
)
@needs_native
def test_a_wrong_call_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        delta_logging.main([*SMALL, *arguments])
