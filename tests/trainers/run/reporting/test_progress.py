from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from sparse_opt.trainers import dpo
from sparse_opt.trainers.run.reporting import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when it is set."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_off_a_terminal_a_line_every_half_minute(clock, capsys):
    with progress.Progress("dpo dense", 100) as shown:
        for step in range(1, 101):
            clock.now += 0.9
            shown.advance(step, {"loss": f"{1 / step:.4g}", "accuracy": "0.5", "tokens_per_s": "1200"})
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        f"dpo dense: step {step} of 100, loss {1 / step:.4g}, accuracy 0.5, tokens_per_s 1200" for step in (34, 68)
    ]


def test_on_a_terminal_a_bar(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.Progress("dpo dense", 2) as shown:
        for step in (1, 2):
            clock.now += 100
            shown.advance(step, {"loss": "0.7"})
    assert "dpo dense: 100%" in terminal.getvalue()
    assert "2/2" in terminal.getvalue() and "loss=0.7" in terminal.getvalue()
    assert "step 1 of 2" not in terminal.getvalue()


def test_a_run_shows_its_loss_accuracy_and_speed(dpo_options, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    dpo.train(dpo_options(n_steps=2))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dpo dense: ")]
    assert len(lines) == 2
    assert lines[0].startswith("dpo dense: step 1 of 2, loss 0.6931, accuracy 0, tokens_per_s ")
