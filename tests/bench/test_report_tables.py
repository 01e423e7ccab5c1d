"""The document's tables are what the committed results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_opt.bench import report_tables
from sparse_opt.bench.common import spread
from sparse_opt.bench.kernels import bounds
from sparse_opt.bench.kernels.table import targets
from sparse_opt.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]
DOCUMENT, RESULTS = CHECKOUT / report_tables.DOCUMENT, CHECKOUT / report_tables.RESULTS


def test_the_tables_of_the_documents_are_those_of_the_results():
    texts = [(CHECKOUT / document).read_text() for document in report_tables.DOCUMENTS]
    assert {name for text in texts for name, _ in report_tables.SPAN.findall(text)} == set(report_tables.TABLES)
    for text in texts:
        assert report_tables.filled(text, RESULTS) == text, "run `make performance-tables`"


def test_the_committed_verdicts_are_those_of_the_targets():
    found = json.loads((RESULTS / "gpu_check.json").read_text())["kernels"]
    assert found["targets"] == [verdict.as_dict() for verdict in targets.judge(found["rows"])]


def test_what_each_mode_holds_is_shown_once_shira_was_measured(tmp_path):
    report = json.loads((RESULTS / "baseline_dpo.json").read_text())
    rows = {row["mode"]: row for row in report["rows"]}
    report["rows"] = [rows["dense"], rows["sparse"]]
    path = tmp_path / "baseline_dpo.json"
    path.write_text(json.dumps(report))
    assert "Not measured" in report_tables.modes_table(tmp_path)
    report["rows"].append({**rows["lora"], "mode": "shira", "n_trained": 1_500_000})
    report["settings"] |= {"modes": ["dense", "sparse", "shira"], "shira_rank": 7}
    path.write_text(json.dumps(report))
    found = report_tables.modes_table(tmp_path)
    assert "SHiRA of rank 7" in found
    held = next(line for line in found.splitlines() if line.startswith("| held, GiB | weights | "))
    assert held.endswith(" | activations and scratch at the peak | values trained |")
    assert found.splitlines()[-1].startswith("| shira | ") and found.splitlines()[-1].endswith(" | 1.5 M |")


def test_weight_gradients_have_a_table_of_their_own_once_there_are_any(tmp_path):
    report = json.loads((RESULTS / "gpu_check.json").read_text())
    others = [row for row in report["kernels"]["rows"] if not targets.is_weight_gradient(row)]
    path = tmp_path / "gpu_check.json"
    path.write_text(json.dumps({**report, "kernels": {**report["kernels"], "rows": others}}))
    without = report_tables.kernel_table(tmp_path)
    assert len(report_tables.tile_table(tmp_path).splitlines()) == 2  # no row
    names = targets.dense_gradient(8192), targets.tile_gradient("tile64", 8192)
    new = [
        {**others[0], "work": name, "backend": backend, "is_auto": True, "density": density, "ms": ms, "floor_ms": 4.0}
        for name, backend, density, ms in zip(names, ("torch", "cuda"), (None, 0.025), (60.0, 9.0), strict=True)
    ]
    path.write_text(json.dumps({**report, "kernels": {**report["kernels"], "rows": [*others, *new]}}))
    assert report_tables.kernel_table(tmp_path) == without
    *_, dense, tiles, _, missed = report_tables.tile_table(tmp_path).splitlines()
    assert [cell.strip() for cell in dense.split("|")[5:9]] == [
        f"{others[0]['p20_ms']:.3f} - {others[0]['p80_ms']:.3f}",
        "1.000",
        "4.000",
        "15.00",
    ]
    assert [cell.strip() for cell in tiles.split("|")[6:11]] == ["0.150", "4.000", "2.25", "missed", "<= 8 ms"]
    assert missed == "- missed: tile_weight_grad_, tile64, 8192 tokens at 2.5% (cuda): 9 ms, expected <= 8 ms"


def test_runs_of_mode_tiles_have_a_table_of_their_own(tmp_path):
    for name in ("baseline_dpo", "baseline_dpo_tiles", "baseline_dpo_tiles_8x1024"):
        assert (report_tables.tile_baseline_table(tmp_path) == "") == (name != "baseline_dpo_tiles_8x1024")
        report = json.loads((RESULTS / "baseline_dpo.json").read_text())
        if name != "baseline_dpo":
            dense, sparse, *_ = report["rows"]
            report["rows"] = [dense, sparse, {**sparse, "mode": "tiles", "n_tiled": 196}]
            report["settings"] |= {"modes": ["dense", "sparse", "tiles"], "pattern": None, "tile_pattern": "tile64"}
            report |= {"tile_mask": {"nnz": report["mask"]["nnz"] // 2, "pattern": "tile64"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    found = report_tables.tile_baseline_table(tmp_path)
    heading = (
        "2.50% active in mode sparse, 1.25% active in tile64 in mode tiles (196 weight gradients by tiles); 1 pair"
    )
    assert found.count(heading) == 2
    assert found.count("\n| tiles | ") == 2
    assert "| tiles |" not in report_tables.baseline_table(tmp_path)


def words(document: Path, results: Path = RESULTS) -> list[str]:
    return ["--document", str(document), "--results", str(results)]


def test_a_changed_figure_is_found_and_put_right(tmp_path, capsys):
    document = tmp_path / "performance.md"
    text = DOCUMENT.read_text()
    document.write_text(text.replace("| copy | torch |", "| copied | torch |", 1))
    assert document.read_text() != text
    assert report_tables.main([*words(document), "--check"]) == 1
    assert "differs from" in capsys.readouterr().err
    assert report_tables.main(words(document)) == 0
    assert document.read_text() == text
    assert report_tables.main([*words(document), "--check"]) == 0


@pytest.mark.parametrize("text", ["no table", "<!-- table: kernel -->\n<!-- end -->\n"])
def test_a_document_without_known_tables_is_an_error(text, tmp_path, capsys):
    document = tmp_path / "performance.md"
    document.write_text(text)
    assert report_tables.main(words(document)) == 1
    assert (
        "expected tables of kernels, baselines, modes, trl_memory, dram_bytes, pytest_cpu, pytest_spread"
        in capsys.readouterr().err
    )
    assert document.read_text() == text


def test_missing_results_are_named(tmp_path, capsys):
    document = tmp_path / "performance.md"
    document.write_text("<!-- table: kernels -->\n<!-- end -->\n")
    assert report_tables.main(words(document, tmp_path)) == 1
    assert "gpu_check.json" in capsys.readouterr().err


def test_rows_are_judged_only_by_bounds_that_are_counted_as_now(tmp_path):
    report = json.loads((RESULTS / "gpu_check.json").read_text())
    for row in report["kernels"]["rows"]:
        row |= {"is_auto": row["backend"] == "cuda", "bytes_per_active": None}
    report["kernels"] |= {"floor_counting": bounds.COUNTING, "left_out": {"FlashAdamW.step": "not installed"}}
    path = tmp_path / "gpu_check.json"
    path.write_text(json.dumps(report))
    judged = report_tables.kernel_table(tmp_path)
    # Those of weight gradients have a table of their own.
    verdicts = targets.judge([row for row in report["kernels"]["rows"] if not targets.is_weight_gradient(row)])
    n_met = sum(verdict.met for verdict in verdicts)
    assert 0 < n_met < len(verdicts)
    assert f"{len(verdicts)} targets: {n_met} met, {len(verdicts) - n_met} missed." in judged
    assert "- not timed: FlashAdamW.step: not installed" in judged
    report["kernels"] |= {"floor_counting": bounds.COUNTING_WITHOUT_RATES, "write_rates": "not measured: no nvcc"}
    path.write_text(json.dumps(report))
    assert "\n\nwrite_rates: not measured: no nvcc.\n\n| work |" in report_tables.kernel_table(tmp_path)
    report["kernels"]["write_rates"] = [{"unit_bytes": 32, "share": 0.1, "write_gb_per_s": 900.0}]
    path.write_text(json.dumps(report))
    assert "\n\nscattered writes, GB/s: 32 bytes 900 to 900.\n\n| work |" in report_tables.kernel_table(tmp_path)
    report["kernels"]["floor_counting"] = "by the page"
    path.write_text(json.dumps(report))
    unjudged = report_tables.kernel_table(tmp_path)
    assert "counted its bounds in another way" in unjudged
    assert "missed" not in unjudged


def test_counted_bytes_are_shown_once_there_are_any(tmp_path):
    assert "Not counted yet" in report_tables.dram_table(tmp_path)
    environment = json.loads((RESULTS / "gpu_check.json").read_text())["environment"]
    row = {
        "op": "indexed_swap_",
        "backend": "cuda",
        "density": 0.1,
        "n_kernels": 1,
        "bytes_read": 6e9,
        "bytes_written": 5e9,
        "floor_bytes": 10e9,
        "ms": 3.0,
    }
    (tmp_path / "dram_bytes.json").write_text(json.dumps({"environment": environment, "rows": [row]}))
    line = "| indexed_swap_ | cuda | 10.0% | 1 | 6.000 | 5.000 | 11.000 | 10.000 | 1.10 | 3.000 |"
    assert line in report_tables.dram_table(tmp_path)


def run_of(**medians: float) -> dict:
    return {
        "machine_info": {"sparse_opt": {"machine": {}}},
        "benchmarks": [{"fullname": n, "stats": {"median": m, "min": m / 2}} for n, m in medians.items()],
    }


def test_the_spread_of_runs(tmp_path, capsys):
    found = spread.spread([run_of(a=1.0, b=2.0), run_of(a=1.5, b=2.0)])
    assert found["n_cases"] == 2
    assert found["median"] == {"half": 0.5, "nine_in_ten": 0.5, "all": 0.5}
    assert spread.rows(found)[1] == ["by their fastest calls", "50%", "50%", "50%"]
    with pytest.raises(ConfigError, match="different cases: c and 0 more"):
        spread.spread([run_of(a=1.0), run_of(a=1.0, c=1.0)])

    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        path.write_text(json.dumps(run_of(a=1.0)))
    output = tmp_path / "spread.json"
    assert spread.main([*map(str, paths), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["n_runs"] == 2
    with pytest.raises(SystemExit):
        spread.main([str(paths[0])])
    assert "expected two or more" in capsys.readouterr().err


def test_the_threshold_of_make_is_above_the_measured_spread():
    makefile = (CHECKOUT / "Makefile").read_text()
    threshold = next(line for line in makefile.splitlines() if line.startswith("BENCH_THRESHOLD"))
    statistic, percent = threshold.partition("?=")[2].strip().rstrip("%").split(":")
    measured = json.loads((RESULTS / "pytest_spread.json").read_text())
    assert float(percent) / 100 > measured[statistic]["all"]
