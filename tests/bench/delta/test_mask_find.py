"""The benchmark of mask finding, at a size that takes no time."""

from __future__ import annotations

import json

from sparse_opt import DeltaLog
from sparse_opt.bench.delta import mask_find
from sparse_opt.mask_finding.find import find_from_log


def test_findings_are_measured_printed_and_written(tmp_path, capsys, monkeypatch):
    # Of a model's layers, one: each tensor takes milliseconds, however small it is.
    shapes = {name: shape for name, shape in mask_find.LLAMA_3_2_3B.items() if ".layers." not in name or ".0." in name}
    monkeypatch.setattr(mask_find, "LLAMA_3_2_3B", shapes)
    log, path = tmp_path / "log", tmp_path / "new" / "mask_find.json"
    words = [str(log), "--numel", "1e5", "--n_steps", "2", "--methods", "fisher", "--patterns", "run16"]
    words += ["--sparsity", "90", "--json", str(path)]
    assert mask_find.main(words) == 0
    report = json.loads(path.read_text())
    assert report["steps"] == [0, 1, 2]
    (row,) = report["rows"]
    found = find_from_log(DeltaLog.open(log), method="fisher", pattern="run16", sparsity=90)
    assert (row["digest"], row["nnz"]) == (found.mask.digest, found.mask.nnz)
    assert found.capture is not None
    assert row["captured_score"] == found.capture.share
    assert 0 < row["seconds"]
    assert 0 <= row["anonymous_bytes"] <= row["limit_bytes"]
    assert row["digest"] in capsys.readouterr().out

    # A log that is there is used again; what holds more than it may is an error.
    monkeypatch.setattr(mask_find, "measured", lambda *args: row | {"anonymous_bytes": row["limit_bytes"] + 1})
    assert mask_find.main([*words[:-1], str(tmp_path / "again.json")]) == 1
    assert "TOO MUCH MEMORY: fisher run16 held" in capsys.readouterr().err
