from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_opt import DeltaLog
from sparse_opt.analysis.coverage import TAUS
from sparse_opt.analysis.ranks import TAU
from sparse_opt.analysis.sparsity import TOLERANCES
from sparse_opt.analysis.spectrum import LOWRANK_K, METHODS
from sparse_opt.cli import analyze

NAMES = ("sparsity", "coverage", "ranks")


def source(files):
    return "--delta_log_dir", files.delta_log


def test_sparsity_says_what_changed(sparse_opt, files):
    words = ("analyze", "sparsity", *source(files), "--tolerance", 1e-3, "--steps", 1, 3)
    found = json.loads(sparse_opt(*words, "--json").done())
    assert found["tolerances"] == [1e-3]
    assert [step["step"] for step in found["steps"]] == [1, 3]
    last, base, names = files.states[3], files.states[0], files.states[0].keys() - {"lm_head.weight"}
    at_last = found["steps"][1]["stored"]
    for name in names:
        moved = (last[name].float() - base[name].float()).abs()
        tensor = at_last["tensors"][name]
        assert tensor["density_bits"] == int((moved != 0).sum()) / moved.numel()
        assert tensor["density"] == [int((moved > 1e-3).sum()) / moved.numel()]
        assert tensor["sparsity"] == [1 - tensor["density"][0]]
    numel = sum(last[name].numel() for name in names)
    changed = sum(int((last[name] != base[name]).sum()) for name in names)
    assert at_last["density_bits"] == changed / numel
    assert set(at_last["layers"]) == {"0", "1", "none"}
    assert "bf16" not in found["steps"][1]  # bf16 is what the log keeps
    text = sparse_opt(*words, "--per_tensor", "--include", "*norm*").done()
    assert "> 0.001" not in text
    assert "> 1e-3" in text
    assert "density of the update" in text
    assert "sparsity of the update" in text
    assert "model.norm.weight" in text
    assert "q_proj" not in text


def test_files_are_written(sparse_opt, files, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    out = tmp_path / "new" / "out"
    for name in NAMES:
        text = sparse_opt("analyze", name, *source(files), "--output", out).done()
        assert f"wrote {out / name}.csv" in text
        shown = sparse_opt("analyze", name, *source(files), "--json").done()
        assert json.loads((out / f"{name}.json").read_text()) == json.loads(shown)
    sparse_opt("analyze", "shapes", files.model, "--output", out).done()
    assert sorted(path.name for path in out.iterdir()) == [
        "coverage.csv",
        "coverage.json",
        "coverage_combined.png",
        "density_by_step.png",
        "density_combined.png",
        "ranks.csv",
        "ranks.json",
        "ranks_by_layer.png",
        "shapes.csv",
        "shapes.json",
        "shapes.png",
        "sparsity.csv",
        "sparsity.json",
        "sparsity_by_layer.png",
    ]
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    with (out / "sparsity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (len(files.states[0]) - 1)
    assert all(float(row["density_bits"]) + float(row["sparsity_bits"]) == pytest.approx(1) for row in rows)
    with (out / "ranks.csv").open() as file:
        rows = {row["matrix"]: row for row in csv.DictReader(file)}
    name = "model.layers.0.mlp.up_proj.weight"
    delta = files.states[3][name].float() - files.states[0][name].float()
    assert int(rows[name]["rank"]) == torch.linalg.matrix_rank(delta)
    assert float(rows[name]["frobenius_norm"]) == pytest.approx(float(delta.double().norm()))
    assert (rows[name]["layer"], rows[name]["component"], rows[name]["shape"]) == ("0", "MLP up", "32x16")


def test_ranks_by_step(sparse_opt, files, tmp_path):
    words = ("analyze", "ranks", *source(files), "--include", "*mlp*")
    found = json.loads(sparse_opt(*words, "--steps", 1, 3, "--json").done())
    assert [step["step"] for step in found["steps"]] == [1, 3]
    for step in found["steps"]:
        alone = json.loads(sparse_opt(*words, "--step", step["step"], "--json").done())
        assert step["matrices"] == alone["matrices"]
    assert found["matrices"] == found["steps"][1]["matrices"] != found["steps"][0]["matrices"]
    with_plots = ("--output", tmp_path) if importlib.util.find_spec("matplotlib") else ("--no_plots",)
    text = sparse_opt(*words, "--all_steps", *with_plots).done()
    assert "ranks of the update by step and component" in text
    if with_plots != ("--no_plots",):
        with (tmp_path / "ranks.csv").open() as file:
            assert {row["step"] for row in csv.DictReader(file)} == {"1", "2", "3"}
        assert (tmp_path / "ranks_by_step.png").read_bytes().startswith(b"\x89PNG")


def test_tied_tensors_are_named(sparse_opt, files):
    note = "tied: lm_head.weight is the same tensor as model.embed_tokens.weight, and counts once"
    for name in NAMES:
        words = ("analyze", name, *source(files), "--include", "*lm_head*")
        assert note in sparse_opt(*words).done()
        assert json.loads(sparse_opt(*words, "--json").done())["tied"] == {
            "lm_head.weight": "model.embed_tokens.weight"
        }
    for words in (("delta", "info", *source(files)), ("delta", "info", "--step", 2, *source(files))):
        assert note in sparse_opt(*words).done()


def test_two_checkpoints_are_compared(sparse_opt, files, tmp_path):
    state = load_file(files.model / "model.safetensors")
    with torch.no_grad():
        state["model.norm.weight"][:4] += 1
    (tmp_path / "tuned").mkdir()
    save_file(state, tmp_path / "tuned" / "model.safetensors")
    pair = ("--base_model", files.model, "--model_name", tmp_path / "tuned")
    found = json.loads(sparse_opt("analyze", "sparsity", *pair, "--json").done())
    tensors = found["steps"][0]["stored"]["tensors"]
    assert {name: t["density_bits"] for name, t in tensors.items() if t["density_bits"]} == {"model.norm.weight": 0.25}
    assert found["steps"][0]["bf16"]["tensors"]["model.norm.weight"]["density_bits"] == 0.25
    ranks = json.loads(sparse_opt("analyze", "ranks", *pair, "--json").done())
    assert {m["rank"]["value"] for m in ranks["matrices"].values()} == {0}


def test_shapes_come_from_the_configuration_alone(sparse_opt, files, tmp_path):
    (tmp_path / "config.json").write_text((files.model / "config.json").read_text())
    found = json.loads(sparse_opt("analyze", "shapes", tmp_path, "--json").done())
    shapes = {w["weight"]: w["shape"] for w in found["weights"]}
    state = {name: list(t.shape) for name, t in files.states[0].items() if name != "lm_head.weight"}
    assert shapes == state
    assert found["numel"] == sum(t.numel() for name, t in files.states[0].items() if name != "lm_head.weight")
    weights = {w["weight"]: w for w in found["weights"]}
    up, norm = weights["model.layers.0.mlp.up_proj.weight"], weights["model.norm.weight"]
    assert (up["layer"], up["component"], up["in_out_features"]) == (0, "MLP up", [16, 32])
    assert (norm["layer"], norm["component"], norm["in_out_features"]) == (None, "norms", None)
    text = sparse_opt("analyze", "shapes", tmp_path).done()
    assert "16 -> 32" in text
    assert "weights by component" in text


def test_report_is_one_page(sparse_opt, files, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    words = ("analyze", "report", *source(files), "--method", "gram", "--output")
    assert sparse_opt(*words, tmp_path).done() == f"wrote {tmp_path / 'report.html'}\n"
    said = json.loads(sparse_opt(*words, tmp_path / "page.html", "--skip", "ranks", "--json").done())
    assert said["bytes"] == (tmp_path / "page.html").stat().st_size
    text = (tmp_path / "report.html").read_text()
    assert all(f'<section id="{name}">' in text for name in (*NAMES, "shapes"))
    assert '<th scope="col">share</th><th scope="col" class="text">in -&gt; out</th>' in re.sub(r">\s+<", "><", text)
    assert '<section id="ranks">' not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("sparsity", "--steps", 9), 1, "step 9 is not logged"),
        (("sparsity", "--steps", 0), 1, "step 0 is the base"),
        (("sparsity", "--tolerance", -1), 2, "'tolerance' is -1"),
        (("sparsity", "--tolerance", "nan"), 2, "'tolerance' is nan: expected at least 0"),
        (("sparsity", "--include", "nothing*"), 1, "no tensor"),
        (("sparsity", "--by", "head"), 2, "invalid choice: 'head' (choose from 'component'"),
        (("sparsity", "--base_model", "x"), 2, "either --delta_log_dir, or both"),
        (("sparsity", "--device", "gpu"), 2, "'device' is 'gpu'"),
        (("coverage", "--tau", -1), 2, "'tau' is -1"),
        (("coverage", "--steps", 2, 7), 1, "step 7 is not logged"),
        (("ranks", "--step", 9), 1, "step 9 is not logged"),
        (("ranks", "--tau", -1), 2, "'tau' is -1"),
        (("ranks", "--method", "svd"), 2, "invalid choice: 'svd' (choose from 'exact'"),
        (("ranks", "--k", 0), 2, "'k' is 0"),
        (("ranks", "--include", "*norm*"), 1, "no weight matrix"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_refuses_in_one_line(sparse_opt, files, words, code, said):
    assert said in sparse_opt("analyze", *words, *source(files)).failed_in_one_line(code)


@pytest.mark.parametrize("action", [*NAMES, "shapes", "report"])
def test_examples_are_calls_that_are_understood(sparse_opt, action):
    text = sparse_opt("analyze", action, "--help").done()
    examples = [shlex.split(line) for line in re.findall(r"^  sparse-opt analyze (.*)$", text, re.MULTILINE)]
    assert examples
    for words in examples:
        assert analyze._parser().parse_words(words).action == action


def test_defaults_are_those_of_the_library():
    assert analyze.TOLERANCES == TOLERANCES
    assert analyze.TAUS == TAUS
    assert (analyze.TAU, analyze.METHODS, analyze.LOWRANK_K) == (TAU, METHODS, LOWRANK_K)


def test_a_page_must_end_in_html(sparse_opt, files, tmp_path):
    call = ("analyze", "report", *source(files), "--output", tmp_path / "report.pdf")
    assert "report.pdf: expected a file that ends in .html" in sparse_opt(*call).failed_in_one_line(2)


def test_sources_that_are_not_there_are_named_in_one_line(sparse_opt, files, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with DeltaLog.create(tmp_path / "one", {"w.weight": torch.zeros(2, 2)}):
        pass
    for name in (*NAMES, "report"):
        output = ("--output", tmp_path / "r.html") if name == "report" else ()
        for log, said in (("empty", "holds no"), ("one", "no step after 0"), ("missing", "missing")):
            call = ("analyze", name, "--delta_log_dir", tmp_path / log, *output)
            assert said in sparse_opt(*call).failed_in_one_line(1)
    assert not (tmp_path / "r.html").exists()
    call = ("analyze", "sparsity", "--base_model", files.model, "--model_name")
    assert "holds no model.safetensors" in sparse_opt(*call, tmp_path / "empty").failed_in_one_line(1)
    assert "different" not in (said := sparse_opt(*call, files.wider_model).failed_in_one_line(1))
    assert "is [" in said
    assert "cannot load the configuration of" in sparse_opt("analyze", "shapes", tmp_path / "empty").failed_in_one_line(
        1
    )
    assert "expected a folder" in sparse_opt(
        "analyze", "coverage", *source(files), "--output", tmp_path / "file"
    ).failed_in_one_line(2)


def test_plots_without_matplotlib_are_refused_before_the_work(sparse_opt, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in (*NAMES, "report"):
        said = sparse_opt("analyze", name, *source(files), "--output", tmp_path / "out").failed_in_one_line(2)
        assert "matplotlib" in said
        assert "sparse-opt[plot]" in said
    assert not (tmp_path / "out").exists()
    sparse_opt("analyze", "sparsity", *source(files), "--output", tmp_path / "out", "--no_plots").done()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sparsity.csv", "sparsity.json"]


def test_a_folder_of_checkpoints_instead_of_a_log(sparse_opt, files, tmp_path):
    """The same statistics as from the log; the folder has two of its steps."""
    for step in (0, 3):
        state = {n: t for n, t in files.states[step].items() if n != "lm_head.weight"}
        torch.save(state, tmp_path / f"step_{step:03d}.pt")
    for words in (("sparsity", "--steps", 3), ("coverage", "--steps", 3), ("ranks",)):
        of_log, of_folder = (
            json.loads(sparse_opt("analyze", *words, *where, "--json").done())
            for where in (source(files), ("--checkpoints", tmp_path))
        )
        assert of_log.pop("tied") == {"lm_head.weight": "model.embed_tokens.weight"}
        assert of_folder.pop("source") != of_log.pop("source") and of_folder == of_log
    assert "or --checkpoints" in sparse_opt("analyze", "coverage").failed_in_one_line(2)
