"""Tables, ratios, verdicts, comparisons of runs, pictures, and the tables of the documentation."""

import json
from pathlib import Path

import pytest

from sparse_opt.bench import plot, report, rows
from sparse_opt.bench.rows import Row, Run
from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {
    "date": "2026-01-01T",
    "commit": "abc",
    "machine": {"cpu": "C", "logical_cpus": 2, "gpu": {"name": "NVIDIA H200", "driver": "1"}},
    "versions": {"torch": "2", "triton": "3"},
}


def row(work: str, value: float, *, n: int = 20, spread: float = 0.01, unit: str = "ms", **others) -> Row:
    case = {"work": work, "backend": "cuda", "density": 0.025, "numel": 1000} | others.pop("case", {})
    p20, p80 = (value * (1 - spread), value * (1 + spread)) if unit == "ms" else (None, None)
    metric = others.pop("metric", "time")
    return Row(suite="kernels", case=case, metric=metric, unit=unit, value=value, p20=p20, p80=p80, n=n, **others)


FUSED = {"work": "fused", "backend": "torch", "density": None}


@pytest.fixture
def run() -> Run:
    step = row("SparseAdamW.step, dense gradients", 3.0, peers={"bound": 2.0, "fused AdamW": FUSED})
    host = row("SparseAdamW.step, dense gradients", 0.08, metric="host time")
    return Run(ENVIRONMENT, [step, host, row("fused", 16.0, case=FUSED)])


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_a_case_is_a_line_with_bounds_ratios_and_verdicts(run):
    text = report.text(run, markdown=True)
    assert "NVIDIA H200, driver 1" in text and "numel 1,000" in text
    headers, _, step, fused = cells(text)
    found = dict(zip(headers, step, strict=True))
    assert found["work"] == "SparseAdamW.step, dense gradients, density 2.5%" and found["backend"] == "cuda"
    assert (found["time, ms"], found["bound, ms"], found["x bound"]) == ("3.000", "2.000", "1.5")
    assert found["host time, ms"] == "0.080" and found["x fused AdamW"] == "0.188"
    assert "time <= 1.1 x bound: missed; time <= 0.2 x fused AdamW: met" in found["targets"]
    assert dict(zip(headers, fused, strict=True))["targets"] == ""
    missed = [line for line in text.splitlines() if "missed: " in line]
    assert len(missed) == 1 and "1.5, expected <= 1.1 x bound" in missed[0]


def test_verdicts_follow_from_targets_on_their_machine_alone(run):
    met = {verdict.target: verdict.met for verdict in report.judge(run)}
    assert met == {"<= 1.1 x bound": False, "<= 0.2 x fused AdamW": True, "<= 0.100 ms": True}
    assert all(verdict.reason for verdict in report.judge(run))
    run.environment = ENVIRONMENT | {"machine": {"gpu": {"name": "NVIDIA A100"}}}
    assert report.judge(run) == []


@pytest.mark.parametrize("values", [{"n": 2}, {"spread": 0.4}])
def test_few_steps_or_a_busy_machine_give_no_ratio(run, values):
    run.rows[0] = row("SparseAdamW.step, dense gradients", 3.0, peers=run.rows[0].peers, **values)
    assert report.text(run).count(report.UNSTEADY) == 2
    run.rows[2] = row("fused", 16.0, case=FUSED, **values)
    run.rows[0] = row("SparseAdamW.step, dense gradients", 3.0, peers=run.rows[0].peers)
    assert report.text(run).count(report.UNSTEADY) == 1  # the bound is steady


def test_rows_of_other_machines_and_commits_say_so(run):
    run.rows[2] = row("fused", 16.0, case=FUSED, environment={"commit": "def", "machine": {"gpu": {"name": "H100"}}})
    headers, _, *lines = cells(report.text(run, markdown=True))
    assert [line[headers.index("machine")] for line in lines] == ["NVIDIA H200", "H100"]
    assert [line[headers.index("commit")] for line in lines] == ["abc", "def"]


def test_runs_are_compared(run, tmp_path, capsys):
    slower = Run(ENVIRONMENT, [row("fused", 20.0, case=FUSED), row("new", 1.0)])
    for name, found in (("a", run), ("b", slower)):
        rows.write(tmp_path / f"{name}.json", found)
    assert main(["bench", "report", *(str(tmp_path / f"{name}.json") for name in "ab")]) == 0
    out = capsys.readouterr().out
    (line,) = [line.split() for line in out.splitlines() if line.startswith("fused")]
    assert line[-6:] == ["20.00", "19.80", "-", "20.20", "16.00", "1.25"]
    assert "3 rows are not in all runs" in out
    rows.write(tmp_path / "b.json", Run(ENVIRONMENT, [row("new", 1.0)]))
    assert main(["bench", "report", *(str(tmp_path / f"{name}.json") for name in "ab")]) == 2


def test_files_of_pytest_benchmark_are_runs_too():
    (path,) = sorted((CHECKOUT / "bench/results/pytest").glob("*/*_cpu.json"))[-1:]
    run = rows.read(path)
    data = json.loads(path.read_text())
    assert len(run.rows) == len(data["benchmarks"])
    (swap,) = run.matching(work="indexed_swap_", backend="cpu", dtype="bf16", density=0.025)
    (bench,) = [one for one in data["benchmarks"] if "test_op[cpu-indexed_swap_-0.025-bf16]" in one["fullname"]]
    assert swap.value == pytest.approx(1e3 * bench["stats"]["median"])
    assert report.ratio(run, swap, "bound") == pytest.approx(1 / bench["extra_info"]["share_of_floor"])


def test_words_choose_rows(run):
    assert [found.case["work"] for found in report.chosen(run, ["backend=torch"]).rows] == ["fused"]
    assert len(report.chosen(run, ["backend!=torch", "density=0.025|0.1"]).rows) == 2
    assert len(report.chosen(run, ["density="]).rows) == 1
    left = report.chosen(run, ["backend=cuda"], ["time"])
    assert "0.188" in report.text(left)  # a peer may be among the rows that were left out
    for words in (["backend"], ["backend=x"]):
        with pytest.raises(ConfigError, match=r"cannot read 'backend'|no row is left"):
            report.chosen(run, words)


def test_tables_and_values_of_a_page(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    rows.write(tmp_path / "bench/results/r.json", run)
    page = tmp_path / "docs/page.md"
    value = "<!-- bench value r.json work=fused time -->?<!-- end -->"
    page.write_text(
        f"A\n\n<!-- bench report r.json backend=torch --metrics time -->\nold\n<!-- end -->\n\n{value} each\n"
    )
    assert main(["bench", "report", "--docs", "--check"]) == 1
    assert f"{Path('docs/page.md')} differs" in capsys.readouterr().err
    assert main(["bench", "report", "--docs"]) == 0
    text = page.read_text()
    assert "-->16.0 ms<!-- end --> each" in text and "| fused" in text and "old" not in text
    assert main(["bench", "report", "--docs", "--check"]) == 0
    page.write_text("<!-- bench value r.json time -->?<!-- end -->")
    assert main(["bench", "report", "--docs"]) == 2
    assert "expected one row, found 2" in capsys.readouterr().err


def test_the_documentation_has_the_committed_results(monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    assert main(["bench", "report", "--docs", "--check"]) == 0, capsys.readouterr().err


def test_every_target_has_a_reason_and_judges_a_committed_row(monkeypatch):
    runs = [rows.read(path) for path in (CHECKOUT / "bench/results").glob("*.json")]
    for suite, of_suite in report.targets().items():
        for target in of_suite:
            monkeypatch.setattr(report, "targets", lambda suite=suite, target=target: {suite: [target]})
            assert target["reason"] and any(report.judge(run) for run in runs), (suite, target)


def test_pictures_of_bars_parts_and_lines(run, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = tmp_path / "run.json"
    sizes = [row("step", 1.0 * n, case={"size": n, "mode": mode}) for n in (1, 2) for mode in ("dense", "sparse")]
    for name, found, words in (
        ("bars", run.rows, []),
        ("parts", [row("a", 1.0), row("a", 2.0, metric="host time")], []),
        ("lines", sizes, ["--x", "size"]),
    ):
        rows.write(path, Run(ENVIRONMENT, list(found)))
        picture = tmp_path / f"{name}.png"
        assert main(["bench", "report", str(path), "--plot", str(picture), *words]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_bars_have_their_values_and_bounds(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    drawn = []
    monkeypatch.setattr(plot, "save_png", lambda figure, path: drawn.append(figure))
    plot.draw([run.rows[0], run.rows[2]], tmp_path / "x.png")
    plot.draw([row("a", 1.0), row("a", 2.0, metric="host time")], tmp_path / "x.png")
    (parts,) = drawn[1].axes
    assert [(bar.get_x(), bar.get_width()) for bar in parts.patches] == [(0.0, 1.0), (1.0, 2.0)]
    (axes,) = drawn[0].axes
    assert [bar.get_width() for bar in axes.patches] == [3.0, 16.0]
    assert [text.get_text().strip() for text in axes.texts] == ["3.000", "16.00"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[2.0, 2.0]]
