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
from studies.smollm2.report import RESULTS, TABLES, wall_time_table
from studies.smollm2.verdicts import verdict
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


@pytest.mark.parametrize("name", ["learning/small", "learning/large", "learning/tiles", "smollm2/quantised"])
def test_the_other_plans_can_begin(name, tmp_path):
    plan = Study(tmp_path, ROOT / f"studies/{name}.yaml")
    assert {run.seed for run in runner.jobs(plan, plan.parts)} == {TUNING_SEED}
    assert {part.subject.algorithm for part in plan.parts} <= plan.settings.keys()


def test_each_part_is_tuned_and_runs_its_seeds_at_the_best_rate(study):
    plan = study({"trained": ["dense"], "claims": [4]}, {"trained": ["again"], "seeds": [0], "rate_of": "dense"})
    runs = [run for run in finish(plan, lambda run: 0.9) if run.task == "sums"]
    assert [run.seed for run in runs if run.trained == "dense"] == [TUNING_SEED] * 3 + [0, 1, 2]
    (again,) = (run for run in runs if run.trained == "again")
    assert again.learning_rate == 1e-5 and again.seed == 0


@pytest.mark.parametrize(("lower", "expected"), [("", "holds"), ("nf4", "does not hold"), ("qlora", "holds")])
def test_a_base_in_nf4_is_compared_with_bf16_and_qlora(study, lower, expected):
    plan = study({"trained": ["lean:2.5:tile64", "nf4:2.5:tile64", "qlora:16"], "claims": [9]})
    finish(plan, lambda run: 0.7 if run.trained.startswith(lower or "none") else 0.9)
    assert verdict(plan, 9, plan.tasks) == expected


def test_rewards_are_compared_after_equal_times(study):
    made = study({"trained": ["dense", "lean:2.5:tile64"], "claims": [10]})
    finish(
        made,
        lambda run: 0.5,
        rewards=lambda run: {str(step): step / 100 for step in range(5, 55, 5)},
        step_time_s=lambda run: 2.0 if run.subject.trained == "dense" else 1.0,
        jobs=lambda run: 1,
    )
    made = Study(made.folder, made.folder / "plan.yaml")
    lines = wall_time_table(made).splitlines()
    assert [line.split("|")[4:-1] for line in lines if "largest" in line] == [
        [" 0.050 ", " 0.100 ", " 0.150 ", " 0.250 "],
        [" 0.100 ", " 0.250 ", " 0.350 ", " 0.500 "],
        [" 12 s ", " 25 s ", " 38 s ", " 50 s "],
    ]


def test_results_survive_a_kill_and_are_not_mixed(study, tmp_path):
    plan = study({"trained": ["dense"]})
    runs = finish(plan, lambda run: 0.9)
    file = tmp_path / "results.jsonl"
    complete = file.read_bytes()
    file.write_bytes(complete + b'{"algorithm": "gr')
    assert list(study({"trained": ["dense"]}).rows) == runs
    assert file.read_bytes() == complete
    other = json.loads(complete.splitlines()[0]) | {"settings": "other"}
    file.write_text(file.read_text() + json.dumps(other) + "\n")
    with pytest.raises(ConfigError, match=f"line {len(runs) + 1} has settings other, expected digest"):
        study({"trained": ["dense"]})


@pytest.mark.slow
def test_a_tiny_study_from_start_to_end(tmp_path, capsys):
    for package in ("bitsandbytes", "peft"):
        pytest.importorskip(package, reason="needs bitsandbytes and peft: pip install 'sparse-opt[test]'")
    plan = yaml.safe_load((Path(learning.__file__).with_name("small.yaml")).read_text())
    plan["start"]["max_steps"], plan["grpo"]["max_steps"], plan["factors"] = 20, 2, [1]
    trained = ["dense", "random:2.5:run16", "nf4:2.5:run16", "qlora:4"]
    plan["plan"] = [[{"tasks": ["sums"], "trained": trained, "claims": [4], "seeds": []}]]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    words = ["--output_dir", str(tmp_path / "out"), "--plan", str(tmp_path / "plan.yaml")]
    assert runner.main(words) == 0
    finished = Study(tmp_path / "out", tmp_path / "plan.yaml")
    dense, sparse, over_nf4, adapters = finished.rows.values()
    assert 0 < sparse["changed_bf16"] <= 0.026 < dense["changed_bf16"]
    assert 0 < over_nf4["changed_fp32"] <= 0.026 < adapters["changed_fp32"]  # from the dequantised base
    assert over_nf4["n_trained"] == sparse["n_trained"] and finished.starts.keys() == {"sums", "sums:nf4"}
    assert sparse["n_trained"] == 1760 and sparse["optimizer_bytes"] < dense["optimizer_bytes"]
    assert sparse["learning_rate"] == pytest.approx(3e-4 * 40**0.75, rel=1e-5)
    capsys.readouterr()
    assert runner.main([*words, "--dry_run"]) == 0 and capsys.readouterr().out.strip() == ""
    file = tmp_path / "out/results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # killed while the last was written
    assert runner.main([*words, "--dry_run"]) == 0
    assert capsys.readouterr().out.split() == [f"grpo_sums_qlora_4_lr{adapters['learning_rate']:g}_seed1000"]
    with pytest.raises(ConfigError, match="choose another --output_dir"):
        runner.main(["--output_dir", str(tmp_path / "out"), "--plan", str(PLAN)])
