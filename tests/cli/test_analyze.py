import csv
import json
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from sparse_opt import DeltaLog
from sparse_opt.analysis import changes, ranks
from sparse_opt.cli import analyze

NAMES = ("sparsity", "coverage", "ranks")


def source(files):
    return "--delta_log_dir", files.delta_log


def by(key, records):
    return {record[key]: record for record in records}


def test_sparsity_counts_what_changed(sparse_opt, files):
    words = ("analyze", "sparsity", *source(files), "--tolerance", 1e-3, "--steps", 1, 3)
    found = json.loads(sparse_opt(*words, "--json").done())
    assert found["tolerances"] == [1e-3]
    assert [(total["step"], total["precision"]) for total in found["total"]] == [(1, "stored"), (3, "stored")]
    last, base, names = files.states[3], files.states[0], files.states[0].keys() - {"lm_head.weight"}
    assert {record["tensor"] for record in found["tensor"]} == names
    changed = sum(int((last[name] != base[name]).sum()) for name in names)
    assert found["total"][1]["density_bits"] == changed / sum(last[name].numel() for name in names)
    assert {record["layer"] for record in found["layer"]} == {"0", "1", "none"}
    text = sparse_opt(*words, "--by", "tensor", "--include", "*norm*").done()
    assert "model.norm.weight" in text and "q_proj" not in text


def test_files_are_written(sparse_opt, files, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    out = tmp_path / "new" / "out"
    for name in NAMES:
        text = sparse_opt("analyze", name, *source(files), "--output", out).done()
        assert f"wrote {out / name}.csv" in text
        shown = sparse_opt("analyze", name, *source(files), "--json").done()
        assert json.loads((out / f"{name}.json").read_text()) == json.loads(shown)
    sparse_opt("analyze", "ranks", *source(files), "--all_steps", "--output", out).done()
    pictures = ["coverage", "density_by_step", "ranks_by_layer", "ranks_by_step", "sparsity_by_layer"]
    assert sorted(path.stem for path in out.glob("*.png")) == pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    tables = {path.stem: list(csv.DictReader(path.open())) for path in out.glob("*.csv")}
    assert tables.keys() == {*NAMES} == {path.stem for path in out.glob("*.json")}
    assert len(tables["sparsity"]) == 3 * (len(files.states[0]) - 1)
    name = "model.layers.0.mlp.up_proj.weight"
    row = by("matrix", (row for row in tables["ranks"] if row["step"] == "3"))[name]
    delta = files.states[3][name].float() - files.states[0][name].float()
    assert int(row["rank"]) == torch.linalg.matrix_rank(delta)
    assert float(row["frobenius_norm"]) == pytest.approx(float(delta.double().norm()))
    assert (row["layer"], row["component"], row["shape"]) == ("0", "MLP up", "32x16")


def test_tied_tensors_are_named(sparse_opt, files):
    note = "tied: lm_head.weight is the same tensor as model.embed_tokens.weight, and counts once"
    words = ("analyze", "ranks", *source(files), "--include", "*lm_head*")
    assert note in sparse_opt(*words).done()
    assert json.loads(sparse_opt(*words, "--json").done())["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_two_checkpoints_are_compared(sparse_opt, files, tmp_path):
    tuned = LlamaForCausalLM.from_pretrained(files.model)
    with torch.no_grad():
        tuned.model.norm.weight[:4] += 1
    tuned.save_pretrained(tmp_path / "tuned")
    pair = ("--base_model", files.model, "--model_name", tmp_path / "tuned")
    found = json.loads(sparse_opt("analyze", "sparsity", *pair, "--json").done())
    assert {r["tensor"]: r["density_bits"] for r in found["tensor"] if r["density_bits"]} == {"model.norm.weight": 0.25}


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


def test_report_is_one_page(sparse_opt, files, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    words = ("analyze", "report", *source(files), "--output")
    assert sparse_opt(*words, tmp_path / "report.html").done() == f"wrote {tmp_path / 'report.html'}\n"
    sparse_opt(*words, tmp_path / "page.html", "--skip", "ranks").done()
    text = (tmp_path / "report.html").read_text()
    assert all(f'<section id="{name}">' in text for name in (*NAMES, "shapes"))
    assert '<section id="ranks">' not in (tmp_path / "page.html").read_text()
    for path in (tmp_path / "report.pdf", tmp_path):
        assert f"{path}: expected a file that ends in .html" in sparse_opt(*words, path).failed_in_one_line(2)


def test_defaults_are_those_of_the_library():
    assert (analyze.TOLERANCES, analyze.TAUS) == (changes.TOLERANCES, changes.TAUS)
    assert analyze.TAU == ranks.TAU


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("sparsity", "--steps", 9), 1, "step 9 is not logged"),
        (("sparsity", "--include", "nothing*"), 1, "no tensor"),
        (("sparsity", "--base_model", "x"), 2, "either --delta_log_dir, or both"),
        (("ranks", "--include", "*norm*"), 1, "no weight matrix"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_refuses_in_one_line(sparse_opt, files, words, code, said):
    assert said in sparse_opt("analyze", *words, *source(files)).failed_in_one_line(code)


def test_sources_that_are_not_there_are_named_in_one_line(sparse_opt, files, tmp_path):
    (tmp_path / "empty").mkdir()
    with DeltaLog.create(tmp_path / "one", {"w.weight": torch.zeros(2, 2)}):
        pass
    for log, said in (("empty", "holds no"), ("one", "no step after 0"), ("missing", "missing")):
        call = ("analyze", "report", "--delta_log_dir", tmp_path / log, "--output", tmp_path / "r.html")
        assert said in sparse_opt(*call).failed_in_one_line(1)
    assert not (tmp_path / "r.html").exists()
    call = ("analyze", "sparsity", "--base_model", files.model, "--model_name")
    assert "holds no model.safetensors" in sparse_opt(*call, tmp_path / "empty").failed_in_one_line(1)


def test_plots_without_matplotlib_are_refused_before_the_work(sparse_opt, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name, output in (("sparsity", "out"), ("report", "out.html")):
        said = sparse_opt("analyze", name, *source(files), "--output", tmp_path / output).failed_in_one_line(2)
        assert "matplotlib" in said and "sparse-opt[plot]" in said
    assert list(tmp_path.iterdir()) == []
    sparse_opt("analyze", "sparsity", *source(files), "--output", tmp_path / "out", "--no_plots").done()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sparsity.csv", "sparsity.json"]


def test_sparsity_by_expert(sparse_opt, tmp_path):
    names = {"layers.0.mlp.experts.down_proj": (3, 4, 6), "layers.2.mlp.experts.down_proj": (2, 4, 6)}
    base = {**{name: torch.ones(shape) for name, shape in names.items()}, "norm.weight": torch.ones(6)}
    with DeltaLog.create(tmp_path / "log", base) as log:
        changed = {name: tensor.clone() for name, tensor in base.items()}
        changed["layers.0.mlp.experts.down_proj"][1, 2:] = 2.0
        log.append(1, changed)
    words = ("analyze", "sparsity", "--delta_log_dir", tmp_path / "log", "--by", "expert")
    found = json.loads(sparse_opt(*words, "--json", "--output", tmp_path / "out").done())["expert"]
    assert [(r["layer"], r["expert"]) for r in found] == [("0", 0), ("0", 1), ("0", 2), ("2", 0), ("2", 1)]
    assert [r["density_bits"] for r in found] == [0.0, 0.5, 0.0, 0.0, 0.0]
    assert (tmp_path / "out" / "sparsity_by_expert.png").is_file()
    assert "density of the update by expert" in sparse_opt(*words).done()
    error = sparse_opt(*words, "--include", "norm.weight").failed_in_one_line(2)
    assert "no chosen tensor" in error and "is of experts" in error
