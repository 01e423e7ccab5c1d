"""The plan of the study: which runs each claim needs.

A run is one training of one algorithm on one task with one choice of what is trained, one learning rate and one seed.
Several claims share runs, which are done once. What is trained:

| word | |
|---|---|
| dense | all weights, by AdamW |
| sgd | all weights, by SGD without momentum |
| again | the same as dense with the same seed, which shows how much of a difference is chance |
| subnetwork | the weights that the dense run of the seed changed in bf16, alone |
| lora:8 | adapters of rank 8 on all linear layers |
| shira:8 | SHiRA, as many values at random positions as LoRA of rank 8 has |
| supertuning:8 | Super-Tuning, as many values, the largest of each linear layer |
| random:2.5:tile64 | a random 2.5 % of the weights in tiles of 64 x 64, another one for every seed |
| magnitude:2.5 | the 2.5 % of the largest absolute value |
| fisher:2.5, snip:2.5 | the 2.5 % that the first training batch scores highest: mean of squared gradients; abs(w g) |
| early5:2.5 | the 2.5 % that changed most in the first 5 % of the steps of a dense run with another seed |
| found:2.5 | the same after all steps of that run |
| lean:2.5:tile64 | the weights of random:2.5:tile64 with the same seed, by bf16 moments and bf16 compact gradients |

Runs under a mask have fp32 moments, fp32 compact gradients and fp32 copies of the trained bf16 weights; dense runs have
fp32 moments and copies. Lean runs have none of these, and round the bf16 weights and moments stochastically.

Parts of the plan are in tiers. A tier begins when nothing of those before is left that could begin, and of a tier the
tuning and the first seed of every part come before the other seeds, so that a study that is stopped has the most
informative rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sparse_opt.errors import ConfigError
from sparse_opt.masks.patterns import PATTERNS

SETTINGS = Path(__file__).with_name("study.yaml")
TUNING_SEED = 1000
FINDING_SEED = 2000
EARLY = (2, 5, 10)  # percent of the steps of the dense run; 1 % of 50 steps is no other mask than 2 %
WHOLE = ("dense", "sgd", "again", "subnetwork")
# These are compared with the dense run of their seed, so that a run with the tuning seed would say nothing.
OF_DENSE = ("again", "subnetwork")
ADAPTERS = ("lora", "shira", "supertuning")
SOURCES = ("random", "magnitude", "fisher", "snip", "found", *(f"early{percent}" for percent in EARLY))
# Everything that trains under a mask; lean is no source of its own.
MASKS = (*SOURCES, "lean")


@dataclass(frozen=True)
class Trained:
    """What a run trains: see the module."""

    source: str  # one of WHOLE, ADAPTERS or MASKS
    amount: float | None = None  # an adapter's rank, or percent of the weights
    pattern: str | None = None

    @classmethod
    def parse(cls, word: str) -> Trained:
        """Read a word of the table above; the pattern element may be left out.

        Raises:
            ConfigError: the word is not valid.
        """
        source, *rest = word.split(":")
        if source in WHOLE and not rest:
            return cls(source)
        if source in ADAPTERS and len(rest) == 1 and re.fullmatch(r"[1-9]\d*", rest[0]):
            return cls(source, float(rest[0]))
        if source not in MASKS or len(rest) not in (1, 2) or not re.fullmatch(r"\d+(\.\d+)?", rest[0]):
            raise ConfigError(
                f"trained {word}: expected {', '.join(WHOLE)}, {', '.join(ADAPTERS)} with a rank, as in lora:8, or "
                f"{', '.join(MASKS)} with a percentage and, optionally, a pattern, as in random:2.5:tile64"
            )
        percent, pattern = float(rest[0]), rest[1] if len(rest) == 2 else "element"
        if not 0 < percent < 100 or pattern not in PATTERNS:
            raise ConfigError(
                f"trained {word}: expected a percentage above 0 and below 100, and one of {', '.join(PATTERNS)}"
            )
        return cls(source, percent, pattern)

    def __str__(self) -> str:
        if self.amount is None:
            return self.source
        return f"{self.source}:{self.amount:g}" + (f":{self.pattern}" if self.pattern not in (None, "element") else "")

    @property
    def is_mask(self) -> bool:
        """Whether the run trains under a mask."""
        return self.source in MASKS

    @property
    def needs_finding_run(self) -> bool:
        """Whether the mask is found in the log of a dense run."""
        return self.source == "found" or self.source.startswith("early")


@dataclass(frozen=True)
class Subject:
    """What is compared: all runs of a subject differ in learning rate and seed only."""

    algorithm: str
    task: str
    trained: str


@dataclass(frozen=True)
class Run:
    """One training run; its settings are the key of its result."""

    algorithm: str
    task: str
    trained: str
    learning_rate: float
    seed: int
    n_steps: int | None = None  # None: as many as the settings have

    @property
    def name(self) -> str:
        """Name of its folder."""
        what = self.trained.replace(":", "_")
        name = f"{self.algorithm}_{self.task}_{what}_lr{self.learning_rate:g}_seed{self.seed}"
        return name if self.n_steps is None else f"{name}_{self.n_steps}steps"

    @property
    def key(self) -> tuple[Any, ...]:
        """Its settings."""
        return tuple(asdict(self).values())


# Claim -> what it says, in the words of the report.
CLAIMS = {
    1: "Reinforcement learning changes few weights, by full-rank updates, and supervised learning many",
    2: "Runs of other seeds, data and algorithms change the same weights more often than chance",
    3: "Training only the weights that a dense run changes gives its weights and its score",
    4: "A mask that costs little trains as well as all weights",
    5: "A mask trains as well as LoRA with as many trained values",
    6: "SGD trains as well as AdamW in reinforcement learning",
    7: "The best learning rate rises as the density falls, by the same law for every task",
    8: "bf16 moments and gradients with stochastic rounding train as well as fp32 ones with fp32 copies of the weights",
}


def claims_of(settings: Mapping[str, Any]) -> list[int]:
    """The claims that a size can be asked about: claim 8 needs bf16 weights."""
    return [claim for claim in CLAIMS if claim != 8 or settings["shared"]["dtype"] == "bf16"]


@dataclass(frozen=True)
class Choice:
    """What a call of the study is about."""

    claims: Sequence[int]
    tasks: Sequence[str]
    seeds: Sequence[int]
    size: str = "smollm2"

    def command(self, claim: int) -> str:
        """The command that does the runs of a claim's tables."""
        of_size = "" if self.size == "smollm2" else f" --size {self.size}"
        seeds = " ".join(map(str, self.seeds))
        return f"sparse-opt bench study{of_size} --claims {claim} --tasks {' '.join(self.tasks)} --seeds {seeds}"


@dataclass(frozen=True)
class Part:
    """A subject of the plan, with the seeds that it is run with after tuning, and the claims whose tables have it.

    `tuned_by` is the subject whose tuning chooses its learning rate: itself, unless it is compared with the dense run
    of its seed, or is a lean run, which is compared with the random mask of its seed: both runs of such a pair have the
    same rate. Parts of a lower tier come first. `n_steps` is that of its runs, see `Run`.
    """

    subject: Subject
    tuned_by: Subject
    seeds: tuple[int, ...]
    claims: tuple[int, ...]
    tier: int = 0
    n_steps: int | None = None


def plan(
    claims: Iterable[int],
    tasks: Sequence[str],
    seeds: Sequence[int],
    chosen: Callable[[list[Subject]], Subject | None],
    lora: Mapping[str, Any],
    tile: str = "tile64",
) -> list[Part]:
    """The parts of some claims, in the order of their tiers:

    | tier | |
    |---|---|
    | 0 | on the first task dense runs, the same again, and their subnetworks: claim 3, and GRPO's part of 1 and 2 |
    | 1 | SGD, a random mask of 2.5 %, LoRA and a mask of its size; dense runs of the other algorithms |
    | 2, 3 | both on the other tasks, with GRPO alone |
    | 4 | masks of every source, at 2.5 % in tiles |
    | 5 | random masks of the other densities, on all tasks |
    | 6 | random single elements; the best other source but `found` at all densities, in tiles and single elements |
    | 6 | the best masks of 2.5 % in tiles and of 1 % of single elements, on the other tasks |
    | 7 | SHiRA and Super-Tuning |
    | 8 | LoRA of the other ranks, and masks of their sizes |
    | 9 | masks with as many steps as they make in the time of dense training, see `schedule.at_equal_time` |
    | 10 | the other sources but `found` at all densities, in tiles and single elements, with one seed |
    | 11 | lean runs under the random mask of 2.5 %, on all tasks |

    Every subject is tuned on its own, on every task, except for those of `OF_DENSE` and lean runs.

    Args:
        chosen: the best of some subjects by the questions for tuning, the first of equal ones; None while the tuning of
            one of them is unfinished.
        lora: ranks of LoRA, the most informative first, and percent, the share of the weights that rank 1 trains: the
            settings of this name.
        tile: pattern of the masks that are not of single elements.

    Raises:
        ConfigError: the plan has no such claim.
    """
    for claim in (claims := list(claims)):
        if claim not in CLAIMS:
            raise ConfigError(f"--claims {claim}: expected some of {' '.join(map(str, CLAIMS))}")
    parts: dict[Subject, Part] = {}
    first, *others = tasks
    every, one = tuple(seeds), tuple(seeds[:1])

    def add(
        tier: int,
        of: tuple[int, ...],
        word: str,
        runs: tuple[int, ...],
        *,
        task: str = first,
        algorithm: str = "grpo",
        like: Subject | None = None,
    ) -> Subject:
        subject = Subject(algorithm, task, word)
        before = parts.get(subject, Part(subject, like or subject, (), (), tier))
        if of := tuple(claim for claim in of if claim in claims):
            parts[subject] = Part(
                subject,
                before.tuned_by,
                tuple(dict.fromkeys(before.seeds + runs)),
                tuple(sorted({*before.claims, *of})),
                before.tier,
            )
        return subject

    first_rank, *other_ranks = lora["ranks"]
    for task in tasks:
        tier = 0 if task == first else 2
        dense = add(tier, (1, 2, 3, 4, 5, 6, 8), "dense", every, task=task)
        add(tier, (7,), "dense", (), task=task)
        # These need the final weights of the dense runs, which are too large to be carried to another machine.
        add(tier, (3,), "again", one, task=task, like=dense)
        add(tier, (3,), "subnetwork", every, task=task, like=dense)
        random = add(tier + 1, (4, 8), f"random:2.5:{tile}", every, task=task)
        add(tier + 1, (7,), f"random:2.5:{tile}", (), task=task)
        add(11, (8,), f"lean:2.5:{tile}", every, task=task, like=random)
        add(tier + 1, (6,), "sgd", every, task=task)
        for word in (f"lora:{first_rank}", mask_like_lora(lora, first_rank, tile)):
            add(tier + 1, (5,), word, every, task=task)
        if task == first:
            for algorithm in ("sft", "dpo", "rft"):
                add(tier + 1, (1, 2), "dense", every, algorithm=algorithm)

    masks = {source: add(4, (4,), f"{source}:2.5:{tile}", every) for source in SOURCES}
    del masks["found"]  # for comparison alone: it needs a whole dense run
    for percent in (10, 1, 0.1):
        add(5, (4,), f"random:{percent:g}:{tile}", every)
        for task in tasks:
            add(5, (7,), f"random:{percent:g}:{tile}", (), task=task)
    elements = {percent: add(6, (4,), f"random:{percent:g}", every) for percent in (10, 2.5, 1, 0.1)}
    best_tiles = chosen(list(masks.values())) if 4 in claims else None
    if best_tiles is not None:
        for task in others:
            add(6, (4,), best_tiles.trained, every, task=task)
    del masks["random"]
    other = chosen(list(masks.values())) if best_tiles is not None else None
    if other is not None:
        best_source = Trained.parse(other.trained).source
        for percent, source in product(elements, masks):
            tier, runs = (6, every) if source == best_source else (10, one)
            add(tier, (4,), f"{source}:{percent:g}:{tile}", runs)
            add(tier, (4,), f"{source}:{percent:g}", runs)
        two = [elements[1], Subject("grpo", first, f"{best_source}:1")]
        if (best_elements := chosen(two)) is not None:
            for task in others:
                add(6, (4,), best_elements.trained, every, task=task)
    for adapter in ("shira", "supertuning"):
        add(7, (5,), f"{adapter}:{first_rank}", every)
    for rank in other_ranks:
        for word in (f"lora:{rank}", mask_like_lora(lora, rank, tile)):
            add(8, (5,), word, every)
    return sorted(parts.values(), key=lambda part: part.tier)


def mask_like_lora(lora: Mapping[str, Any], rank: int, tile: str) -> str:
    """The random mask with as many values as LoRA of a rank."""
    return f"random:{lora['percent'] * rank:.4g}:{tile}"


def first_rates(settings: dict[str, Any], subject: Subject) -> list[float]:
    """The learning rates that tuning tries first: the same multiples of a rate for every subject.

    The rate is the algorithm's dense rate; of LoRA, ten times it; of a mask, SHiRA and Super-Tuning, density ** -0.75
    times it, 16 at 2.5 %, where the best in docs/results.md is 10 to 33; of SGD, one of its own. A rate at the end of
    those tried is followed by one beyond it, so that the choice matters little.
    """
    from ..common.training import rounded

    rate = float(settings["learning_rates"][subject.algorithm])
    trained = Trained.parse(subject.trained)
    if trained.source == "sgd":
        rate = float(settings["sgd_rate"])
    elif trained.source == "lora":
        rate *= 10
    elif trained.amount is not None:
        percent = trained.amount * (settings["lora"]["percent"] if trained.source in ADAPTERS else 1)
        rate *= (100 / percent) ** 0.75
    return [rounded(rate * factor) for factor in settings["factors"]]
