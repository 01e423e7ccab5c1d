"""Tables of the documentation from the kept runs; the plan, its verdicts, and a tiny study from start to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparse_opt.errors import ConfigError
from studies.learning import report as learning
from studies.smollm2 import run as runner
from studies.smollm2.plan import PLAN, Run, Study, Subject
from studies.smollm2.report import RESULTS, TABLES
from studies.smollm2.verdicts import verdict
from studies.subnetwork import run as subnetwork
from studies.training import ROOT, TUNING_SEED, Trained, beyond, fill_tables

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


def test_tuning_goes_beyond_an_end_that_is_the_best(study):
    plan = study({"trained": ["dense"], "seeds": []})
    dense = Subject("grpo", "sums", "dense")
    finish(plan, lambda run: min(0.9, 3e4 * run.learning_rate))
    assert [row["learning_rate"] for row in plan.of(dense, [TUNING_SEED])] == [3e-6, 1e-5, 3e-5, 1e-4]
    assert beyond([1e-5], 1e-5) == [] and beyond([1e-5, 3e-5], 1e-5) == [3e-6]


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


@pytest.mark.parametrize(
    ("claim", "trained", "of", "expected"),
    [
        (4, "random:2.5", {"random": 0.88}, "holds"),
        (4, "random:2.5", {"random": 0.5}, "does not hold"),
        (4, "random:10", {"random": 0.95}, "not shown"),  # not cheap
        (4, "random:2.5", {"random": 0.25, "dense": 0.25}, "not shown"),  # dense runs learn nothing
        (6, "sgd", {"sgd": 0.9}, "holds"),
        (6, "sgd", {"sgd": 0.84}, "not shown"),
    ],
)
def test_verdicts_from_scores(study, claim, trained, of, expected):
    plan = study({"trained": ["dense", trained], "claims": [claim]})
    assert verdict(plan, claim, plan.tasks) == "not shown"  # without runs
    finish(plan, lambda run: of.get(run.trained.partition(":")[0], 0.9))
    assert verdict(plan, claim, plan.tasks) == expected


@pytest.mark.parametrize(("n_mask", "expected"), [(1040, "holds"), (2000, "not shown")])
def test_lora_is_compared_with_the_mask_of_its_size(study, n_mask, expected):
    plan = study({"trained": ["dense", "lora:4", "random:1:tile64"], "claims": [5]})
    finish(plan, lambda run: 0.9, n_trained=lambda run: 1000 if run.trained == "lora:4" else n_mask)
    assert verdict(plan, 5, plan.tasks) == expected


@pytest.mark.parametrize(
    ("again", "within", "expected"), [(1.0, 1.0, "holds"), (1.0, 0.9, "does not hold"), (0.9, 0.9, "not shown")]
)
def test_a_subnetwork_is_compared_with_the_dense_runs_weights(study, again, within, expected):
    entries = ({"trained": ["again"], "seeds": [0]}, {"trained": ["subnetwork"]})
    plan = study(
        {"trained": ["dense"], "claims": [3]}, *({**entry, "claims": [3], "rate_of": "dense"} for entry in entries)
    )
    finish(plan, lambda run: 0.9, closeness=lambda run: {"within_1e-4": again if run.trained == "again" else within})
    assert verdict(plan, 3, plan.tasks) == expected


def test_the_law_of_the_learning_rate(study):
    plan = study({"trained": ["random:10:tile64", "random:1:tile64", "random:0.1:tile64"], "claims": [7], "seeds": []})
    finish(plan, lambda run: 0.9, n_trained=lambda run: int(1e6 * (Trained.parse(run.trained).amount or 0)))
    assert verdict(plan, 7, plan.tasks) == "holds"  # the first rates rise as density^-0.75
    assert verdict(plan, 7, ["sums"]) == "not shown"


@pytest.mark.parametrize("word", ["none", "dense:1", "lora", "lora:8:tile64", "random", "random:x", "random:1:square"])
def test_unknown_words_are_refused(word):
    with pytest.raises(ConfigError, match=f"trained {word}: expected"):
        Trained.parse(word)


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
