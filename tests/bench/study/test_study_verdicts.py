"""The study's verdicts and page, on made-up results."""

from __future__ import annotations

import math

import pytest

from sparse_opt.bench.study.law import best_of, law
from sparse_opt.bench.study.plan import SOURCES, TUNING_SEED, Choice, Part, Run, Subject, Trained, first_rates, plan
from sparse_opt.bench.study.plot import _densities, _on_every_task, _tuning, plot
from sparse_opt.bench.study.plot_updates import plot_updates
from sparse_opt.bench.study.report import report
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.schedule import runs_left
from sparse_opt.bench.study.tables import score_table
from sparse_opt.bench.study.verdicts import Score, difference, score_of, verdict

DENSE = Subject("grpo", "sums", "dense")
SEEDS = (0, 1, 2)
BEFORE = {task: {"accuracy": 0.2, "tune_accuracy": 0.2} for task in ("sums", "largest")}


def first_of(subjects):
    return subjects[0]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (Score(0.50, 0.00, 3), True),
        (Score(0.46, 0.01, 3), None),  # 0.04 below, known up to 0.012
        (Score(0.40, 0.02, 3), False),
        (Score(0.50, 0.10, 3), None),
        (Score(0.60, float("nan"), 1), None),
    ],
)
def test_not_below(first, expected):
    assert difference(first, Score(0.50, 0.0, 3)).not_below is expected


def test_several_comparisons_need_more():
    second = Score(0.5, 0.0, 3)
    assert difference(Score(0.461, 0.009, 3), second).not_below is True
    assert difference(Score(0.461, 0.009, 3), second, n_comparisons=3).not_below is None


def test_few_questions_show_little():
    """Of 100 questions, two runs answer 50 alike, 24 the one alone and 26 the other alone."""
    both, first, second = "1" * 25 + "0" * 25, "1" * 24 + "0" * 26, "0" * 24 + "1" * 26
    rows = [
        [{"accuracy": accuracy, "right": both + own, "n_generations": 1}] * 2
        for accuracy, own in ((0.49, first), (0.51, second))
    ]
    scores = [score_of(of) for of in rows]
    assert len(scores[0].questions) == 100 and scores[0].spread == 0
    assert difference(*scores).not_below is None  # 0.02 below, known up to 0.14
    assert difference(*(score._replace(questions=()) for score in scores)).not_below is True


def scored(accuracy):
    """Rows by `accuracy(trained)`, which differ a little between seeds."""
    return lambda run: {"accuracy": accuracy(run.trained) + run.seed / 10**4 * (run.seed in SEEDS)}


def test_the_verdict_on_cheap_masks(tmp_path, finish, settings):
    parts = plan([4], ["sums"], SEEDS, first_of, settings["lora"])

    def verdict_with(name, accuracy):
        found = Results(tmp_path / name, {"settings": ""})
        finish(found, parts, scored(accuracy))
        return verdict(4, found, parts, ["sums"], BEFORE, settings)

    good = ("dense", "random:2.5:tile64")
    assert verdict_with("a", lambda trained: 0.7 if trained in good else 0.1) == "holds"
    assert verdict_with("c", lambda trained: 0.25) == "not shown"  # nothing was learned
    # A mask of a whole dense run is not cheap, and 10 % is not little.
    dear = ("dense", "found:2.5:tile64", "random:10:tile64", "random:10")
    assert verdict_with("b", lambda trained: 0.7 if trained in dear else 0.1) == "does not hold"


@pytest.mark.parametrize("claim", [4, 5, 8])
def test_no_verdict_before_the_last_planned_run(claim, results, measured, finish, settings):
    """Every run but one says that the claim holds."""
    parts = plan([claim], ["sums"], SEEDS, first_of, settings["lora"])
    last = next(
        part for part in parts if part.subject.trained == {4: "random:1", 5: "lora:64", 8: "lean:2.5:tile64"}[claim]
    )

    def row(run):
        return {**scored(lambda trained: 0.7)(run), **sized(run.trained)}

    finish(results, [part for part in parts if part != last], row)
    while len(runs := runs_left(settings, last, results)) > 1 or runs[0].seed == TUNING_SEED:
        results.add(runs[0], measured(**row(runs[0])))
    assert verdict(claim, results, parts, ["sums"], BEFORE, settings) == "not shown"
    finish(results, parts, row)
    assert verdict(claim, results, parts, ["sums"], BEFORE, settings) == "holds"


def sized(word):
    """LoRA's values of a million weights, of which rank 1 has 2269, and those of masks with part of a tile less."""
    trained = Trained.parse(word)
    per_rank = 2269 if trained.source in ("lora", "shira", "supertuning") else 9900
    return {"n_trained": int(per_rank * (trained.amount or 0)), "perplexity": 2.0, "others": {}}


def test_the_verdict_on_lora_compares_as_many_values(tmp_path, finish, settings):
    """The masks of another size than LoRA's are much worse, or much better."""
    parts = plan([5], ["sums"], SEEDS, first_of, settings["lora"])
    masks = [part.subject.trained for part in parts if part.subject.trained.startswith("random")]
    assert masks == ["random:1.815:tile64", "random:0.2269:tile64", "random:14.52:tile64"]
    larger = Subject("grpo", "sums", "random:20:tile64")
    parts.append(Part(larger, larger, SEEDS, (5,)))

    def verdict_with(name, worse, sizes=sized):
        results = Results(tmp_path / name, {"settings": ""})
        finish(
            results,
            parts,
            lambda run: {**scored(lambda word: 0.3 if word in worse else 0.7)(run), **sizes(run.trained)},
        )
        return verdict(5, results, parts, ["sums"], BEFORE, settings)

    assert verdict_with("a", ["random:20:tile64"]) == "holds"
    assert verdict_with("b", ["random:14.52:tile64"]) == "does not hold"
    fewer = {"random:14.52:tile64": {**sized("random:13:tile64")}}
    assert verdict_with("c", ["random:14.52:tile64"], lambda word: fewer.get(word, sized(word))) == "not shown"


def test_the_page_says_what_is_missing(results, measured, settings):
    """One run of a part of one seed is missing, all of a part that is only tuned, and one of two seeds."""
    words = ("dense", "random:1:tile64", "random:2.5:tile64", "random:10:tile64")
    subjects = [Subject("grpo", "sums", word) for word in words]
    seeds = ((0, 1), (0,), (), ())
    parts = [Part(subject, subject, of, (1,)) for subject, of in zip(subjects, seeds, strict=True)]
    for subject in subjects[:3]:
        for i, rate in enumerate(first_rates(settings, subject)[: 2 if subject == subjects[2] else 3]):
            run = Run("grpo", "sums", subject.trained, rate, TUNING_SEED)
            results.add(run, measured(0.5 + 0.1 * (i == 1)))
    results.add(Run("grpo", "sums", "dense", 1e-5, 0), measured(0.75))
    page = report(results, parts, Choice([1], ["sums"], [0, 1]), {"sums": {"accuracy": 0.25}}, settings)
    assert "**not shown**" in page and "4 of 4 rows are not finished" in page
    assert "    sparse-opt bench study --claims 1 --tasks sums --seeds 0 1" in page.splitlines()
    row = "| sums | grpo | dense | 1e-05 | 0.250 | 0.750 | 0.750 |  | 1 of 2 | 20.0% | 3.00 | 5.0 | 0.500 | 2 |"
    assert row in page.splitlines()
    by_rate = page[page.index("| task | algorithm | learning rate | runs |") :].splitlines()
    assert by_rate[0].split(" | ")[4:6] == ["bf16 changed", "fp32 changed"]
    assert by_rate[2].startswith("| sums | grpo | 3e-06 | 1 | 20.0% | 90.0% | 30.0% |")
    table = page[page.index("| changed by layer") :].splitlines()
    assert table[2:4] == ["| 0 | 25.0% | 25.0% | 25.0% |", "| none | 12.5% | 12.5% | 12.5% |"]


def test_scores_by_source_and_size(results, measured, settings):
    """Two seeds have a spread; a tuning run alone is not shown."""
    words = {"random:1:tile64": (0, 1), "random:10": (0,), "snip:1:tile64": (0,), "fisher:1:tile64": ()}
    parts = [Part(subject, subject, seeds, (4,)) for word, seeds in words.items()
             for subject in [Subject("grpo", "sums", word)]]  # fmt: skip
    for part in parts:
        rate = first_rates(settings, part.subject)[0]
        for seed, accuracy in ((TUNING_SEED, 0.25), *((seed, 0.5 + seed / 10) for seed in part.seeds)):
            results.add(Run("grpo", "sums", part.subject.trained, rate, seed), measured(accuracy))
    page = report(results, parts, Choice([4], ["sums"], [0, 1]), {}, settings)
    table = page[page.index("| sums, masks of |") :].splitlines()
    assert table[:4] == [
        "| sums, masks of | 1 %, tile64 | 10 %, element |",
        "| --- | ---: | ---: |",
        "| random | 0.550 ± 0.071 | 0.500 |",
        "| snip | 0.500 |  |",
    ]
    page = report(results, parts[:2], Choice([4], ["sums"], [0, 1]), {}, settings)
    assert "masks of" not in page  # one source


def test_scores_in_the_time_of_dense_training(results, measured, settings):
    """Steps of the mask take half as long, by times measured alone."""
    mask = Subject("grpo", "sums", "random:1:tile64")
    parts = [Part(subject, subject, (0, 1), (4,)) for subject in (DENSE, mask)]
    for part in parts:
        rate = first_rates(settings, part.subject)[0]
        for seed, accuracy in ((TUNING_SEED, 0.5), (0, 0.5), (1, 0.6)):
            results.add(Run("grpo", "sums", part.subject.trained, rate, seed), measured(accuracy))
    times = {("grpo", "dense"): {"step_time_s": 2.0}, ("grpo", "random:1:tile64"): {"step_time_s": 1.0}}
    choice = Choice([4], ["sums"], [0, 1])
    assert "dense's time" not in report(results, parts, choice, {}, settings, times)  # no run of this length
    rate = first_rates(settings, mask)[0]
    for seed, accuracy in ((0, 0.7), (1, 0.8)):
        results.add(Run("grpo", "sums", mask.trained, rate, seed, 100), measured(accuracy))
    page = report(results, parts, choice, {}, settings, times)
    assert "| sums | dense | 2.00 | 50 | 0.550 | 0.500 0.600 | 0.550 |  |  |" in page
    # The standard error of each mean is 0.05.
    assert "| sums | random:1:tile64 | 1.00 | 100 | 0.750 | 0.700 0.800 | 0.550 | +0.200 | 0.141 |" in page
    assert "dense's time" not in report(results, parts, choice, {}, settings)


def test_scores_and_what_is_forgotten(results, measured):
    """A run of two seeds, the tuning run of one that has none, and one whose perplexity is not finite."""
    words = ("dense", "random:1:tile64", "sgd")
    parts = [
        Part(subject, subject, (0, 1) if subject.trained == "dense" else (), (5,))
        for subject in (Subject("grpo", "sums", word) for word in words)
    ]
    for seed, accuracy in ((TUNING_SEED, 0.5), (0, 0.6), (1, 0.7)):
        found = measured(accuracy, perplexity=2.0 + seed, others={"largest": 0.25, "products": 0.5})
        results.add(Run("grpo", "sums", "dense", 1e-5, seed), found)
    mask = measured(0.8, n_trained=1234, perplexity=3.0, others={"largest": 0.25})
    results.add(Run("grpo", "sums", "random:1:tile64", 3e-4, TUNING_SEED), mask)
    results.add(Run("grpo", "sums", "sgd", 0.1, TUNING_SEED), measured(0.0, perplexity=None, others={}))
    before = {"sums": {"accuracy": 0.125, "perplexity": 1.5, "others": {"largest": 0.75}}}
    assert score_table(results, parts, before, {("grpo", "dense"): {"step_time_s": 2.0}}).splitlines()[2:] == [
        "| sums | nothing |  |  | 0.125 |  |  |  | 1.500 | 0.750 |  |",
        "| sums | dense | all | 1e-05 | 0.650 | 0.600 0.700 | 20.0% | 5.0 | 2.500 | 0.375 | 2.00 |",
        "| sums | random:1:tile64 | 1,234 | 0.0003 | 0.800 | tuning | 20.0% | 5.0 | 3.000 | 0.250 | 0.50 |",
        "| sums | sgd | all | 0.1 | 0.000 | tuning | 20.0% | 5.0 | not finite |  | 0.50 |",
    ]


def common(n_both, stderr):
    counts = {"n": 30, "n_other": 40, "n_both": n_both, "n_both_stderr": stderr}
    return {**counts, "expected": 20.0, "expected_by_tensor": 15.0}


def test_the_verdicts_on_common_weights_and_on_the_subnetwork(tmp_path, finish, settings):
    seeds = (0, 1)
    words = ("dense", "again", "subnetwork")
    parts = [Part(Subject("grpo", "sums", word), DENSE, seeds, (2, 3)) for word in words]

    def verdicts(name, n_both, again, subnetwork, stderr=0.1):
        def row(run):
            found = scored(lambda trained: 0.5)(run)
            if run.trained == "dense" and run.seed in seeds:
                other = Run("grpo", "sums", "dense", 1e-5, 1 - run.seed).name
                found["overlaps"] = {} if n_both is None else {other: common(n_both, stderr)}
            elif run.trained != "dense":
                within = again if run.trained == "again" else subnetwork
                found["closeness"] = {"within_1e-5": 0.0, "within_1e-4": within, "distance": 1.0, "cosine": 0.5}
            return found

        results = Results(tmp_path / name, {"settings": ""})
        finish(results, parts, row)
        if n_both is not None:
            page = report(results, parts, Choice([2, 3], ["sums"], seeds), {}, settings)
            ratio = f"{n_both / 20:.2f} to {n_both / 20:.2f} | {stderr / 20:.3f}"
            assert f"| seed | 1 | {n_both / 30:.1%} | 50.0% | 66.7% | {ratio} |" in page  # one pair, counted by both
        return tuple(
            verdict(claim, results, parts[: 1 if claim == 2 else 3], ["sums"], BEFORE, settings) for claim in (2, 3)
        )

    assert verdicts("a", 25, again=1.0, subnetwork=1.0) == ("holds", "holds")
    assert verdicts("b", 21, again=1.0, subnetwork=0.9) == ("does not hold", "does not hold")
    assert verdicts("c", 25, again=0.9, subnetwork=0.9) == ("holds", "not shown")
    assert verdicts("d", 25, again=1.0, subnetwork=1.0, stderr=2.0)[0] == "not shown"  # 1.25 +- 0.2
    assert verdicts("e", None, again=1.0, subnetwork=1.0)[0] == "not shown"


@pytest.mark.parametrize("claim", [3, 5, 6, 8])
def test_a_claim_must_hold_on_every_task(claim, results, finish, settings):
    """On the second task alone the first is much worse than what it is compared with."""
    first, second = {
        3: ("subnetwork", "dense"),
        5: ("random:1.815:tile64", "lora:8"),
        6: ("sgd", "dense"),
        8: ("lean:2.5:tile64", "random:2.5:tile64"),
    }[claim]
    tasks = ("sums", "largest")
    parts = plan([claim], tasks, (0, 1), first_of, settings["lora"])

    def row(run):
        worse = run.task == "largest" and run.trained == first
        found = {**scored(lambda trained: 0.4 if worse else 0.7)(run), **sized(run.trained)}
        return {**found, "closeness": {"within_1e-5": 1.0, "within_1e-4": 1.0, "distance": 0.0, "cosine": 1.0}}

    finish(results, parts, row)
    before = {task: {**of_task, "others": {}, "perplexity": 2.0} for task, of_task in BEFORE.items()}
    page = report(results, parts, Choice([claim], tasks, (0, 1)), before, settings)
    assert page.splitlines()[0] == "| claim | verdict | sums | largest | unfinished rows |"
    assert page.splitlines()[2].endswith(" | does not hold | holds | does not hold | 0 |")
    assert f"| sums | {first} | {second} | +0.000 | 0.000 | yes |" in page
    assert f"| largest | {first} | {second} | -0.300 | 0.000 | no |" in page


def test_a_pair_that_was_not_compared_shows_nothing(results, finish, settings):
    """Of three runs, the last has found the file of the first only."""
    part = Part(DENSE, DENSE, SEEDS, (2,))
    names = [Run("grpo", "sums", "dense", 1e-5, seed).name for seed in SEEDS]

    def row(run):
        others = {1: [names[0]], 2: [names[0]]}.get(run.seed, [])
        return {"accuracy": 0.5, "overlaps": {name: common(25, 0.1) for name in others}}

    finish(results, [part], row)
    assert verdict(2, results, [part], ["sums"], BEFORE, settings) == "not shown"


def law_parts(tasks=("sums",)):
    subjects = [Subject("grpo", task, f"random:{percent}:tile64") for task in tasks for percent in ("10", "1", "0.1")]
    return [Part(subject, subject, (), (7,)) for subject in subjects]


def tuned(results, measured, settings, part, accuracies, stderr=0.01, factor=1.0):
    """Add tuning runs of the part until it is finished; `accuracies` by their number from the middle rate."""
    middle = first_rates(settings, part.subject)[1] * factor
    while runs := runs_left(settings, part, results):
        for run in runs:
            place = round(2 * math.log10(run.learning_rate / middle))
            values = int(1e6 * Trained.parse(run.trained).amount / 100)
            accuracy = accuracies.get(place, 0.3)
            results.add(run, measured(accuracy, tune_stderr=stderr, n_trained=values))


def test_the_law_of_peaked_tuning(results, measured, settings):
    parts = law_parts()
    for part in parts:
        tuned(results, measured, settings, part, {0: 0.8})
    found = law(settings, results, parts, "sums", BEFORE["sums"])
    # Rates grow as density^-0.75, three densities a decade apart; each optimum is known to half a step of sqrt(10), a
    # quarter of a decade, of which the outer two count, each a quarter / 2 decades.
    assert found.n == 3 and found.p == pytest.approx(0.75, abs=0.01)
    assert (found.low, found.high) == (pytest.approx(0.5, abs=0.02), pytest.approx(1, abs=0.02))


def test_the_law_is_that_of_the_trained_values(results, measured, settings):
    """A mask of 0.1 % that has 0.01 % of the weights."""
    parts = law_parts()
    for part in parts:
        tuned(results, measured, settings, part, {0: 0.8})
    for row in results.rows.values():
        row["n_trained"] = {1e3: 1e2}.get(row["n_trained"], row["n_trained"])
    # log10 of values 5, 4, 2 and of rates -4.25, -3.5, -2.75: p = 0.75 * (5 - 2) / (4.667), the sum of squares.
    assert law(settings, results, parts, "sums", BEFORE["sums"]).p == pytest.approx(0.75 * 3 / (14 / 3), abs=0.01)


@pytest.mark.parametrize(
    ("accuracies", "stderr", "reason"),
    [
        (dict.fromkeys(range(-9, 10), 0.8), 0.01, "flat: the lowest of equal rates is an end"),
        ({place: 0.5 + place / 50 for place in range(-9, 10)}, 0.001, "still rising at the highest"),
        ({0: 0.29}, 0.01, "nothing learned"),
    ],
)
def test_no_best_rate(results, measured, settings, accuracies, stderr, reason):
    part = law_parts()[0]
    tuned(results, measured, settings, part, {**dict.fromkeys(range(-9, 10), 0.2), **accuracies}, stderr)
    assert best_of(settings, results, part.subject, BEFORE["sums"]) is None, reason


def test_a_best_rate_that_noise_may_have_chosen_has_no_bound(results, measured, settings):
    part = law_parts()[0]
    tuned(results, measured, settings, part, {-1: 0.79, 0: 0.8, 1: 0.7})
    best = best_of(settings, results, part.subject, BEFORE["sums"])
    assert best.low == 0 and best.rate < best.high < math.inf


def test_the_verdict_on_the_law(tmp_path, measured, settings):
    tasks = ("sums", "largest")
    parts = law_parts(tasks)

    def verdict_with(name, accuracies, factors=None, skip=()):
        found = Results(tmp_path / name, {"settings": ""})
        for part in parts:
            if part.subject not in skip:
                factor = (factors or {}).get((part.subject.task, part.subject.trained), 1.0)
                tuned(found, measured, settings, part, accuracies, factor=factor)
        if name == "peaked":
            page = report(found, parts, Choice([7], tasks, SEEDS), BEFORE, settings)
            assert "p = 0.75 over 3 densities, p between 0.50 and 1.00" in page
        if name == "level":
            assert law(settings, found, parts, "sums", BEFORE["sums"]).p == pytest.approx(0, abs=0.02)
        return verdict(7, found, parts, tasks, BEFORE, settings)

    assert verdict_with("peaked", {0: 0.8}) == "holds"
    assert verdict_with("flat", dict.fromkeys(range(-9, 10), 0.8)) == "not shown"
    assert verdict_with("unfinished", {0: 0.8}, skip=[parts[-1].subject]) == "not shown"
    # Hardly another rate for every density: 10 times more at 10 %, 10 ** 0.5 less at 0.1 %.
    ends = {"random:10:tile64": 10, "random:0.1:tile64": 10**-0.5}
    same = {(task, word): factor for task in tasks for word, factor in ends.items()}
    peaked = {place: 0.8 - abs(place) / 10 for place in range(-5, 6)}
    assert verdict_with("level", peaked, same) == "not shown"  # p between -0.25 and 0.25
    steep = {("sums", word): 1 / f for (task, word), f in same.items() if task == "sums"}
    level = {key: f for key, f in same.items() if key[0] == "largest"}
    assert verdict_with("different", peaked, steep | level) == "does not hold"


def test_one_unfinished_tuning_run_shows_nothing(results, measured, settings):
    tasks = ("sums", "largest")
    parts = law_parts(tasks)
    for part in parts:
        run = runs_left(settings, part, results)[0]
        results.add(run, measured(0.8, n_trained=1000))
    assert verdict(7, results, parts, tasks, BEFORE, settings) == "not shown"


def test_the_figure_has_a_line_for_all_that_is_trained(results, finish, settings, tmp_path):
    """More than there are colours; in grey what is not compared on every task."""
    from matplotlib.figure import Figure

    words = ("dense", "sgd", *(f"lora:{rank}" for rank in range(1, 12)))
    subjects = [Subject("grpo", "sums", word) for word in (*words, "shira:8", "supertuning:8")]
    parts = [Part(subject, subject, SEEDS if subject.trained in words else (), (4,)) for subject in subjects]
    finish(results, parts, lambda run: {"accuracy": 0.5})
    axes = Figure().subplots()
    _tuning(axes, results, parts, _on_every_task(parts, ["sums"]), "sums")
    lines = [line for line in axes.lines if line.get_label() in words]
    assert [line.get_label() for line in lines] == list(words) and len(axes.lines) == len(words) + 2
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(words)
    assert len(axes.get_legend().get_texts()) == len(words) + 1
    choice = Choice([4], ["sums"], SEEDS, "smollm2")
    plot(results, parts, choice, BEFORE, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("element", {"random": [[1, 0.5], [10, 0.9]], "snip": [[1, 0.5], [10, 0.5]]}),
        ("tile64", {"random": [[1, 0.5], [10, 0.5]]}),
    ],
)
def test_the_figure_has_scores_by_density(results, finish, settings, pattern, expected):
    """A line for each source that has several sizes; what has one seed has a hollow point."""
    from matplotlib.figure import Figure

    words = (
        "dense",
        "random:1",
        "random:10",
        "random:1:tile64",
        "random:10:tile64",
        "snip:1",
        "snip:10",
        "snip:10:tile64",
        "lean:1:tile64",
        "lean:10:tile64",
    )
    subjects = [Subject("grpo", "sums", word) for word in words]
    finish(
        results,
        parts := [
            Part(subject, subject, SEEDS[:1] if subject.trained == "snip:10" else SEEDS, (4,)) for subject in subjects
        ],
        lambda run: {"accuracy": 0.9 if run.trained == "random:10" else 0.5},
    )
    axes = Figure().subplots()
    _densities(axes, results, parts, BEFORE["sums"], "sums", pattern)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines if len(line.get_xydata()) > 1}
    assert {"dense", "before training"} <= set(lines)
    assert {name: points for name, points in lines.items() if name in SOURCES} == expected
    hollow = [line.get_xydata().tolist() for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert hollow == ([[[10, 0.5]]] if pattern == "element" else [])
    assert len(axes.containers) == sum(map(len, expected.values())) - len(hollow)


def test_the_figure_of_updates(results, finish, settings, tmp_path, monkeypatch):
    """The points of each panel, from runs of two seeds; a perplexity far to the right is counted."""
    from matplotlib import figure

    figures = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: figures.append(self))
    seeds, mask = (0, 1), Subject("grpo", "sums", "random:1:tile64")
    subnetwork = Subject("grpo", "sums", "subnetwork")
    parts = [
        Part(DENSE, DENSE, seeds, (1, 2, 3)),
        Part(subnetwork, DENSE, seeds, (3,)),
        Part(mask, mask, seeds, (4,)),
    ]

    def row(run):
        found = {"accuracy": 0.5, "perplexity": 100.0 if run.trained == mask.trained else 2.0}
        if run.trained == "dense" and run.seed == 1:
            found["overlaps"] = {Run("grpo", "sums", "dense", 1e-5, 0).name: common(30.0, 0.1)}
        elif run.trained == "subnetwork":
            found["closeness"] = {"within_1e-5": 0.25, "within_1e-4": 0.75, "distance": 1.0, "cosine": 0.5}
        return found

    finish(results, parts, row)
    plot_updates(results, parts, Choice([1, 2, 3, 4], ["sums"], seeds), tmp_path / "updates.png")
    rates, layers, components, pairs, close, forgotten = figures[0].axes
    lines = [axes.lines[0] for axes in (rates, layers, components)]
    assert lines[0].get_xydata().tolist() == [[3e-6, 20.0], [1e-5, 20.0], [3e-5, 20.0]]
    assert [list(line.get_ydata()) for line in lines[1:]] == [[25.0], [10.0]]  # weights of no layer are left out
    assert pairs.lines[0].get_xydata().tolist() == [[1.5, 0.0]]
    assert [label.get_text() for label in pairs.get_yticklabels()] == ["differ in seed"]
    assert [list(line.get_xdata()) for line in close.lines] == [[0.25, 0.25], [0.75, 0.75], [0.5, 0.5]]
    assert [line.get_label() for line in forgotten.lines] == ["dense", "random masks, tiles", "subnetwork"]
    assert forgotten.get_xlabel().endswith("; 1 above 60 are left out")
