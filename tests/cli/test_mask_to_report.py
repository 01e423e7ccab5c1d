"""From a delta log to masks by every method, their comparison and the report, as a user calls them one by one."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.mask_finding.log_scores import LOG_METHODS
from sparse_opt.mask_finding.model_scores import CALIBRATION_METHODS
from sparse_opt.trainers import arithmetic


@pytest.fixture
def run(sparse_opt, tmp_path):
    """The quickstart's model and preferences, and the log of a short dense run on them; `tmp_path` holds all."""
    tokenizer = arithmetic.make_tokenizer()
    arithmetic.make_model(tokenizer, 128, 4, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = quickstart_data.preferences(40, random.Random(0))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "pairs.jsonl", "--max_steps", 4)
    words += ("--learning_rate", 1e-3, "--delta_log_dir", tmp_path / "log", "--delta_log_steps", "1-4")
    sparse_opt("train", "dpo", *words, "--output_dir", tmp_path / "dense", "--report_to", "none").done()
    return tmp_path


@pytest.mark.slow
def test_masks_of_every_method_are_found_compared_and_reported(sparse_opt, run):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    log = DeltaLog.open(run / "log")
    assert log.steps == (0, 1, 2, 3, 4)
    model = ("--model_name", run / "model")
    data = ("--dataset", run / "pairs.jsonl", "--n_samples", 4)
    sources = {
        **dict.fromkeys(LOG_METHODS, ("--delta_log_dir", run / "log")),
        **dict.fromkeys(("random", "weight_magnitude"), model),
        **dict.fromkeys(CALIBRATION_METHODS, model + data),
    }
    masks = {}
    for method, source in sources.items():
        words = ("--method", method, *source, "--sparsity_percent", 97.5, "--output", run / "masks", "--json")
        found = json.loads(sparse_opt("mask", "find", *words).done())
        masks[method] = MaskSet.load(found["file"])
        assert masks[method].metadata["method"] == method
        assert masks[method].density == pytest.approx(0.025, abs=1e-4)
    assert masks["oracle"] == masks["magnitude"]
    assert len({mask.digest for mask in masks.values()}) == len(masks) - 1
    # wanda scores no other tensors than linear layers.
    shapes = {method: mask.shapes for method, mask in masks.items() if method != "wanda"}
    assert all(s == shapes["magnitude"] for s in shapes.values())

    files = sorted((run / "masks").iterdir())
    assert len(files) == len(masks)
    out = ("--png", run / "pairs.png", "--csv", run / "pairs.csv")
    compared = json.loads(sparse_opt("mask", "compare", *files, "--common", *out, "--json").done())
    totals = [record for record in compared["overlaps"] if record["level"] == "total"]
    assert len(totals) == len(list(itertools.combinations(files, 2)))
    by_name = {
        mask["name"]: next(m for m in masks.values() if m.digest == mask["digest"]) for mask in compared["masks"]
    }
    for total in totals:
        first, second = by_name[total["first"]], by_name[total["second"]]
        both = sum(len(set(first[n].tolist()) & set(second[n].tolist())) for n in masks["wanda"].names)
        assert total["active_both"] == both
        if "random" in total["first"] + total["second"]:
            assert abs(total["jaccard"] - total["jaccard_chance"]) < 5 * total["jaccard_chance_sd"]
    assert (run / "pairs.png").read_bytes().startswith(b"\x89PNG")
    assert len((run / "pairs.csv").read_text().splitlines()) == 1 + len(compared["overlaps"])

    words = ("--delta_log_dir", run / "log", "--method", "gram", "--output", run / "report.html")
    sparse_opt("analyze", "report", *words).done()
    page = (run / "report.html").read_text()
    for section in ("sparsity", "coverage", "ranks", "shapes"):
        assert f'<section id="{section}">' in page
    assert all(name in page for name in log.layout.names)

    words = ("--model_name_or_path", run / "model", "--dataset_name", run / "pairs.jsonl", "--max_steps", 1)
    fisher = next(file for file in files if "fisher_step4" in file.name)
    sparse_opt("train", "dpo", *words, "--mask", fisher, "--output_dir", run / "sparse", "--report_to", "none").done()
