"""Tables of the documentation from the kept runs; the plan, its verdicts, and a tiny study from start to end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparse_opt.errors import ConfigError
from studies.learning import report as learning
from studies.smollm2 import run as runner
from studies.smollm2.plan import PLAN, Run, Study
from studies.smollm2.report import RESULTS, TABLES
from studies.subnetwork import run as subnetwork
from studies.training import ROOT, TUNING_SEED, fill_tables

SETTINGS = {
    "tasks": ["sums", "largest"],
    "grpo": {"max_steps": 50},
    "learning_rates": {"grpo": 1e-5, "sft": 1e-5},
    "factors": [0.3, 1, 3],
    "sgd_rate": 0.3,
    "lora": {"percent": 0.25},
}


@pytest.fixture
def study(tmp_path) -> Callable[..., Study]:
    """``study(*entries)``: an empty study of one tier, whose tasks started at an accuracy of 0.2."""

    def make(*entries: dict[str, Any]) -> Study:
        plan = SETTINGS | {"plan": [[{"tasks": SETTINGS["tasks"], **entry} for entry in entries]]}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
        made = Study(tmp_path, tmp_path / "plan.yaml")
        made.starts = {task: {"accuracy": 0.2, "tune_accuracy": 0.2} for task in SETTINGS["tasks"]}
        return made

    return make


def finish(study: Study, accuracy: Callable[[Run], float], **more: Callable[[Run], Any]) -> list[Run]:
    """Add all runs in the order of work; a run at another rate than the middle one is worse in tuning."""
    done = []
    while runs := list(runner.jobs(study, study.parts)):
        run, n_right = runs[0], round(400 * accuracy(runs[0]))
        right = "1" * n_right + "0" * (400 - n_right)
        worse = 0.0 if run.learning_rate == study.first_rates(run.subject)[1] else 0.1
        row = {"accuracy": n_right / 400, "right": right, "n_generations": 1, "tune_accuracy": n_right / 400 - worse}
        row |= {"tune_stderr": 0.01, "jobs": 2, "settings": "digest"} | {name: of(run) for name, of in more.items()}
        study.add(run, row)
        done.append(run)
    return done


@pytest.mark.parametrize("page", ["study", "results"])
def test_the_tables_of_the_documentation_are_those_of_the_kept_runs(page, tmp_path):
    kept = Study(RESULTS)
    loops, patterns = (learning.Results(name) for name in ("learning_h200.json", "learning_patterns_h200.json"))
    tables = {
        "study": {name: table(kept) for name, table in TABLES.items()},
        "results": {
            "learning_loops": learning.loop_table(loops),
            "learning_patterns": learning.pattern_table(patterns),
            "learning_rates": learning.rate_table(patterns),
            "subnetwork": subnetwork.table(json.loads(subnetwork.RESULTS.read_text())["rows"]),
        },
    }[page]
    text = (ROOT / f"docs/{page}.md").read_text()
    assert all(f"<!-- table: {name} -->" in text for name in tables)
    (copy := tmp_path / "page.md").write_text(text)
    fill_tables(copy, tables)
    assert copy.read_text() == text


def test_no_run_of_the_kept_study_is_missing_and_all_are_in_the_plan():
    kept = Study(RESULTS)
    assert len(kept.rows) == 504 and not list(runner.jobs(kept, kept.parts))
    planned = {(part.subject, part.n_steps) for part in kept.parts}
    assert {(run.subject, run.n_steps) for run in kept.rows} == planned


@pytest.mark.parametrize("name", ["small", "large", "tiles"])
def test_the_plans_of_arithmetic_can_begin(name, tmp_path):
    plan = Study(tmp_path, Path(learning.__file__).with_name(f"{name}.yaml"))
    assert {run.seed for run in runner.jobs(plan, plan.parts)} == {TUNING_SEED}
    assert {part.subject.algorithm for part in plan.parts} <= plan.settings.keys()


def test_each_part_is_tuned_and_runs_its_seeds_at_the_best_rate(study):
    plan = study({"trained": ["dense"], "claims": [4]}, {"trained": ["again"], "seeds": [0], "rate_of": "dense"})
    runs = [run for run in finish(plan, lambda run: 0.9) if run.task == "sums"]
    assert [run.seed for run in runs if run.trained == "dense"] == [TUNING_SEED] * 3 + [0, 1, 2]
    (again,) = (run for run in runs if run.trained == "again")
    assert again.learning_rate == 1e-5 and again.seed == 0


def test_results_of_other_settings_are_refused(study, tmp_path):
    plan = study({"trained": ["dense"]})
    runs = finish(plan, lambda run: 0.9)
    file = tmp_path / "results.jsonl"
    other = json.loads(file.read_text().splitlines()[0]) | {"settings": "other"}
    file.write_text(file.read_text() + json.dumps(other) + "\n")
    with pytest.raises(ConfigError, match=f"line {len(runs) + 1} has settings other, expected digest"):
        study({"trained": ["dense"]})


@pytest.mark.slow
def test_a_tiny_study_from_start_to_end(tmp_path, capsys):
    plan = yaml.safe_load((Path(learning.__file__).with_name("small.yaml")).read_text())
    plan["start"]["max_steps"], plan["grpo"]["max_steps"], plan["factors"] = 20, 2, [1]
    plan["plan"] = [[{"tasks": ["sums"], "trained": ["dense", "random:2.5:run16"], "claims": [4], "seeds": []}]]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    words = ["--output_dir", str(tmp_path / "out"), "--plan", str(tmp_path / "plan.yaml")]
    assert runner.main(words) == 0
    dense, sparse = Study(tmp_path / "out", tmp_path / "plan.yaml").rows.values()
    assert 0 < sparse["changed_bf16"] <= 0.026 < dense["changed_bf16"]
    assert sparse["n_trained"] == 1760 and sparse["optimizer_bytes"] < dense["optimizer_bytes"]
    assert sparse["learning_rate"] == pytest.approx(3e-4 * 40**0.75, rel=1e-5)
    capsys.readouterr()
    assert runner.main([*words, "--dry_run"]) == 0 and capsys.readouterr().out.strip() == ""
    file = tmp_path / "out/results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # killed while the second was written
    assert runner.main([*words, "--dry_run"]) == 0
    assert capsys.readouterr().out.split() == [f"grpo_sums_random_2.5_run16_lr{sparse['learning_rate']:g}_seed1000"]
    with pytest.raises(ConfigError, match="choose another --output_dir"):
        runner.main(["--output_dir", str(tmp_path / "out"), "--plan", str(PLAN)])
