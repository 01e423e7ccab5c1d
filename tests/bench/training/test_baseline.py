"""The end-to-end benchmark: its calls, one small run of each algorithm, and what it makes of wrong results."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt import MaskSet
from sparse_opt.bench.training.baseline import main as baseline
from sparse_opt.bench.training.baseline import run as baseline_run
from sparse_opt.bench.training.baseline.report import FIRST_LOSS_ATOL, FIRST_RATIO_ATOL
from sparse_opt.cli.main import main

SECTIONS = ["reference", "forward", "backward", "clip", "step"]
PNG = b"\x89PNG\r\n\x1a\n"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capfd, monkeypatch, tmp_path) -> Call:
    """`bench("dpo", "--small")` -> exit code, stdout and stderr, as a shell sees them; JSON goes to tmp_path."""
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)

    def call(algorithm: str, *words: object) -> tuple[int, str, str]:
        output = [] if "--output" in words else ["--output", tmp_path / "baseline.json"]
        code = main(["bench", "baseline", algorithm, *map(str, [*words, *output])])
        return code, *capfd.readouterr()

    return call


def need_peft() -> None:
    pytest.importorskip("peft", reason="modes lora and shira need peft: pip install 'sparse-opt[bench]'")


@pytest.fixture
def in_this_process(run_here):
    run_here(baseline_run)


@pytest.mark.slow
def test_dpo_in_all_modes(tmp_path, bench, in_this_process):
    need_peft()
    code, out, err = bench(
        "dpo", "--small", "--n_steps", 4, "--n_warmup", 1, "--sequence_length", 32, "--work_dir", tmp_path
    )
    assert code == 0, err
    report = json.loads((tmp_path / "baseline.json").read_text())
    assert set(report["environment"]) >= {"date", "commit", "machine", "versions"}
    assert [row["mode"] for row in report["rows"]] == ["dense", "sparse", "lora", "shira"]
    assert report["mask"]["nnz"] == pytest.approx(0.025 * report["numel"], rel=0.02)
    for row in report["rows"]:
        assert row["first"]["loss"] == pytest.approx(math.log(2), abs=FIRST_LOSS_ATOL)
        assert list(row["section_s"]) == list(row["section_host_s"]) == SECTIONS
        assert all(seconds > 0 for seconds in row["section_s"].values())
        assert row["p20_s"] <= row["step_s"] <= row["p80_s"]
        assert 0 < row["cpu_s"]
        assert row["sections_s"] <= row["p80_s"]
        assert (row["n_timed"], len(row["steps"])) == (3, 4)
        assert row["peak_memory_bytes"] is None and row["kernel_s"] is None  # no GPU
    dense, sparse, lora, shira = report["rows"]
    assert len({row["data_digest"] for row in report["rows"]}) == 1
    assert (dense["n_trained"], sparse["n_trained"]) == (report["numel"], report["mask"]["nnz"])
    for adapters in (lora, shira):
        assert adapters["bytes"]["grad"] == 2 * adapters["n_trained"]
        assert adapters["bytes"]["state"] == 4 * adapters["n_trained"]
        assert adapters["bytes"]["weights"] == 2 * (report["numel"] + adapters["n_trained"])
        assert adapters["bytes"]["reference"] == 0
    # Of each layer: q, o 64 x 64; k, v 32 x 64; gate, up, down 160 x 64. 2.5 % of their 86,016 is 0.96 x rank 1.
    assert report["settings"]["shira_rank"] == 1
    assert shira["n_trained"] == 2 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (160 + 64))
    assert shira["bytes"]["indices"] == 8 * shira["n_trained"]
    assert dense["bytes"]["reference"] == dense["bytes"]["weights"] == 2 * report["numel"]
    assert "reference" not in sparse["bytes"]
    assert sparse["bytes"]["grad"] == 2 * sparse["n_trained"]
    assert sparse["bytes"]["state"] == 8 * sparse["n_trained"]
    assert report["ratios"]["sparse"]["step"] == pytest.approx(sparse["step_s"] / dense["step_s"])
    for mode in ("sparse", "lora", "shira"):
        assert f"{mode}/dense: step {report['ratios'][mode]['step']:.2f}" in out
    assert "LoRA of rank 16, SHiRA of rank 1;" in out
    # In MiB: weights, reference, optimizer state, gradients, indices, base weights; then the values trained.
    (held,) = [line.split() for line in out.splitlines() if line.startswith("shira ") and line.endswith(" 2,240")]
    assert held == ["shira", "0.42", "-", "0.01", "0.00", "0.02", "-", "2,240"]
    assert [path.name for path in tmp_path.iterdir()] == ["baseline.json"]


@pytest.mark.slow
def test_dpo_with_shared_prompts(tmp_path, bench, in_this_process):
    code, out, err = bench(
        "dpo", "--small", "--modes", "dense,tiles", "--share_prompts", "--prompt_share", 0.75, "--sequence_length", 32,
        "--n_steps", 2, "--n_warmup", 0,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads((tmp_path / "baseline.json").read_text())
    names = ["dense", "dense, shared prompts", "tiles", "tiles, shared prompts"]
    assert [row["mode"] for row in report["rows"]] == names
    assert len({row["data_digest"] for row in report["rows"]}) == 1
    assert set(report["shared_ratios"]) == {"dense", "tiles"}
    assert "1 pair(s) of at most 32 tokens a step, prompts of 75%" in out
    assert "tiles, shared prompts/separate rows: step " in out


def test_a_missing_mode_with_shared_prompts_is_a_failure(monkeypatch, bench):
    monkeypatch.setattr(baseline, "_run", lambda job, folder: None)
    code, _, err = bench("dpo", "--small", "--modes", "dense", "--share_prompts")
    assert code == 1
    assert "FAILED: mode dense\n" in err and "FAILED: mode dense, shared prompts\n" in err


@pytest.mark.slow
def test_grpo_with_a_picture(tmp_path, bench, run_here):
    # The first mode has a process of its own, as in a benchmark.
    run_here(baseline_run, unless=lambda command: json.loads(Path(command[3]).read_text())["name"] == "tiles")
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'sparse-opt[plot]'")
    sizes = ("--sequence_length", 20, "--max_new_tokens", 8, "--n_generations", 4)
    code, out, err = bench(
        "grpo", "--small", "--modes", "tiles,dense", "--n_steps", 2, "--n_warmup", 0, *sizes,
        "--gradient_checkpointing", "--plot", tmp_path / "grpo.png",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads((tmp_path / "baseline.json").read_text())
    assert [row["mode"] for row in report["rows"]] == ["tiles", "dense"]
    # Of each layer gate, up and down, one tile of 32 each, and the output layer; 2.5 % of the others is no tile.
    assert [row["n_tiled"] for row in report["rows"]] == [1 + 2 * 3, 0]
    assert "active in tile64 in mode tiles (7 weight gradients by tiles); 1 prompt(s)" in out
    assert report["mask"] is None
    assert report["tile_mask"]["nnz"] == report["rows"][0]["n_trained"]
    for row in report["rows"]:
        assert list(row["section_s"]) == ["rollout", *SECTIONS]
        assert row["first"]["ratio_error"] <= FIRST_RATIO_ATOL
        assert row["first"]["k3"] <= FIRST_RATIO_ATOL
    assert (tmp_path / "grpo.png").read_bytes().startswith(PNG)
    assert f"plot: {tmp_path / 'grpo.png'}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["dpo", "--small", "--modes", "dense,fast"],
            "--modes dense,fast: expected some of dense, sparse, tiles, lora, shira, each once",
        ),
        (["dpo", "--small", "--modes", "dense,dense"], "each once"),
        (["dpo", "--small", "--n_steps", 5, "--n_warmup", 5], "--n_steps 5 leaves nothing after --n_warmup 5"),
        (
            ["dpo", "--small", "--n_steps", 9, "--n_warmup", 2, "--steps_in_a_row", 3],
            "--steps_in_a_row 3 does not divide the 7 steps after the warm-up",
        ),
        (["dpo", "--small", "--batch_size", 0], "--batch_size is 0, expected at least 1"),
        (["dpo", "--small", "--shira_rank", 0], "--shira_rank is 0, expected at least 1"),
        (["dpo", "--small", "--sequence_length", 4], "--sequence_length is 4, expected at least 8"),
        (["grpo", "--small", "--sequence_length", 64], "--sequence_length is 64, expected at least 129"),
        (["grpo", "--small", "--n_generations", 1], "--n_generations is 1, expected at least 2"),
        (["dpo", "--small", "--density", 0], "--density is 0.0"),
        (["dpo", "--small", "--pattern", "tile32"], "invalid choice: 'tile32' (choose from 'element', 'run16'"),
        (["dpo", "--small", "--tile_pattern", "run32"], "invalid choice: 'run32' (choose from 'tile64', 'tile128')"),
        (["dpo", "--small", "--mask", __file__, "--pattern", "tile64"], "--pattern tile64 is of a random mask"),
        (
            ["dpo", "--small", "--modes", "tiles", "--density", 0.001],
            "density 0.001 is less than one unit of tile64 in each tensor",
        ),
        (["dpo", "--small", "--mask", __file__, "--modes", "sparse", "--exclude", "*norm*"], "sparse draws none"),
        (["dpo", "--small", "--modes", "dense,lora", "--mlp_only"], "--modes dense,lora draws none"),
        (["dpo", "--small", "--exclude", "*"], "no tensor of the model is chosen by include, exclude and mlp_only"),
        (["dpo", "--small", "--model_name", "x"], "--small makes a model of its own"),
        (["dpo", "--small", "--dataset", "pairs.jsonl"], "--dataset pairs.jsonl needs a model"),
        (["dpo", "--small", "--mask", "/nowhere/mask"], "--mask /nowhere/mask: no such file"),
        (["dpo", "--small", "--work_dir", "/nowhere"], "--work_dir /nowhere: no such folder"),
        (["dpo", "--small", "--modes", "sparse", "--cuda_graphs"], "--cuda_graphs needs a GPU and --modes of sparse"),
        (["grpo", "--small", "--cuda_graphs"], "--cuda_graphs is of dpo on random words: leave out --dataset"),
        (["dpo", "--small", "--dataset", "pairs.jsonl", "--cuda_graphs"], "of dpo on random words: leave out"),
        (["dpo", "--small", "--kernel_time"], "--kernel_time needs a GPU, and the device is cpu"),
        (
            ["dpo", "--small", "--l2_fetch_granularity", "32"],
            "--l2_fetch_granularity needs a GPU, and the device is cpu",
        ),
        (["dpo", "--l2_fetch_granularity", "48"], "invalid choice: 48 (choose from"),
        (["dpo", "--small", "--checkpoint", "/nowhere"], "--small makes a model of its own"),
        (["dpo", "--device", "cpu", "--checkpoint", "/nowhere"], "--checkpoint /nowhere: expected a folder"),
        (["dpo", "--small", "--output", "/proc/none/x.json"], "cannot be written to /proc/none/x.json"),
        (["grpo", "--small", "--prompt_share", 0.5], "--prompt_share is of dpo on random words"),
        (
            ["dpo", "--small", "--sequence_length", 8, "--prompt_share", 0.9],
            "--prompt_share 0.9 of 8 tokens is a prompt of 7, expected 1 to 6",
        ),
        (["dpo", "--small", "--prompt_share", 0], "--prompt_share 0 of 512 tokens is a prompt of 0, expected 1 to 510"),
        (["dpo", "--small", "--n_step", 3], "unknown option 'n_step' (from '--n_step'); the nearest is 'n_steps'"),
        (["ppo", "--small"], "invalid choice: 'ppo' (choose from 'dpo', 'grpo')"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(bench, words, message):
    code, out, err = bench(*words)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert message in err


def test_none_is_an_option_that_was_not_given(monkeypatch, bench, tmp_path):
    given: list[baseline.Job] = []
    monkeypatch.setattr(baseline, "_run", lambda job, folder: given.append(job))
    optional = [
        word
        for name in ("model_name", "checkpoint", "mask", "pattern", "shira_rank", "dataset", "subset_size")
        for word in (f"--{name}", "None" if name == "checkpoint" else "none")
    ]
    rest = ("--work_dir", "none", "--l2_fetch_granularity", "none", "--plot", "null", "--output", tmp_path / "x.json")
    code, _, err = bench("dpo", "--small", "--modes", "dense", *optional, *rest)
    assert code == 1 and "error" not in err  # no mode has run
    (job,) = given
    assert job.checkpoint is None and job.model_name.endswith("/model") and job.subset_size is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_without_a_gpu(bench):
    code, _, err = bench("dpo")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "finds no CUDA device here; --small runs on a CPU" in err


def test_a_mask_of_another_model(tmp_path, bench):
    mask = MaskSet.random({"model.embed_tokens.weight": (10, 4), "other": (3, 3)}, density=0.5)
    mask.save(tmp_path / "mask.safetensors")
    code, out, err = bench("dpo", "--small", "--mask", tmp_path / "mask.safetensors")
    assert code == 1
    assert out == ""  # found out before any work
    assert len(err.splitlines()) == 1, err
    assert str(tmp_path / "mask.safetensors") in err and "other" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--density", 0.001],
            "SHiRA cannot have density 0.001: on this model's linear layers its least, of rank 1, is",
        ),
        (["--density", 0.9], "SHiRA cannot have density 0.9: it needs rank 35, and the smallest"),
        (["--shira_rank", 33], "SHiRA of rank 33 needs 4224 values of a weight of 64 x 64 = 4096"),
    ],
)
def test_what_shira_cannot_have(bench, words, message):
    code, out, err = bench("dpo", "--small", "--modes", "dense,shira", *words)
    assert (code, out) == (2, "")  # found out before any work
    assert len(err.splitlines()) == 1, err
    assert message in err


@pytest.mark.parametrize(
    ("words", "patterns"),
    [
        ((), {"sparse": "element", "tiles": "tile64"}),
        (("--pattern", "tile64", "--tile_pattern", "tile128"), {"sparse": "tile64", "tiles": "tile128"}),
        (("--pattern", "run32", "--modes", "dense,sparse"), {"sparse": "run32"}),
    ],
)
def test_each_mode_has_its_mask(tmp_path, monkeypatch, bench, words, patterns):
    masks = {}

    def load(job, *args, **kwargs):
        if job.mode != "dense":
            masks[job.mode] = MaskSet.load(job.mask)

    monkeypatch.setattr(baseline, "_run", load)
    monkeypatch.setattr(baseline, "make_checkpoint", lambda *args, **kwargs: None)
    options = ("--density", 0.4, "--batch_size", 4, "--sequence_length", 1024)
    bench("dpo", "--small", "--modes", "dense,sparse,tiles", *options, *words)
    report = json.loads((tmp_path / "baseline.json").read_text())
    assert {mode: mask.pattern for mode, mask in masks.items()} == patterns
    assert report["mask"] == {"file": None, "nnz": masks["sparse"].nnz, "pattern": patterns["sparse"]}
    tiles = masks.get("tiles")
    assert report["tile_mask"] == (None if tiles is None else {"nnz": tiles.nnz, "pattern": patterns["tiles"]})
    assert all(0.3 < mask.density < 0.5 for mask in masks.values())
    given = dict(zip(words[::2], words[1::2], strict=True))
    settings = {name: report["settings"][name] for name in ("density", "pattern", "tile_pattern", "batch_size")}
    assert settings == {
        "density": 0.4,
        "pattern": given.get("--pattern"),
        "tile_pattern": given.get("--tile_pattern", "tile64"),
        "batch_size": 4,
    }


@pytest.mark.parametrize("words", [(), ("--exclude", "*norm*"), ("--include", "*q_proj*", "*norm*"), ("--mlp_only",)])
def test_random_masks_of_chosen_tensors(tmp_path, monkeypatch, bench, words):
    masks = {}
    monkeypatch.setattr(baseline, "_run", lambda job, *args, **kwargs: masks.update({job.mode: MaskSet.load(job.mask)}))
    monkeypatch.setattr(baseline, "make_checkpoint", lambda *args, **kwargs: None)
    _, out, _ = bench("dpo", "--small", "--modes", "sparse,tiles", "--density", 0.4, *words)
    for mask in masks.values():
        kinds = {name.split(".")[-2].split("_")[-1] for name in mask.names if mask[name].numel()}
        assert (
            kinds
            == {
                (): {"tokens", "proj", "layernorm", "norm"},
                ("--exclude", "*norm*"): {"tokens", "proj"},
                ("--include", "*q_proj*", "*norm*"): {"proj", "layernorm", "norm"},
                ("--mlp_only",): {"proj"},
            }[words]
        )
        if words == ("--mlp_only",):
            assert all(".mlp." in name for name in mask.names)
    settings = json.loads((tmp_path / "baseline.json").read_text())["settings"]
    assert [settings[name] for name in ("include", "exclude", "mlp_only")] == [
        list(words[1:]) if words[:1] == ("--include",) else None,
        list(words[1:]) if words[:1] == ("--exclude",) else None,
        words == ("--mlp_only",),
    ]
    texts = {"--include": "random masks include *q_proj* *norm*", "--exclude": "random masks exclude *norm*"}
    texts["--mlp_only"] = "random masks of feed-forward blocks alone"
    assert [text in out for text in texts.values()] == [words[:1] == (flag,) for flag in texts]


def test_shira_takes_the_density_of_the_mask_that_is_given(tmp_path, monkeypatch, bench):
    """Of the whole model: a mask that lists one matrix of it is thin, however dense it is there."""
    model = baseline.without_weights(baseline.words_config(baseline.SMALL, 32))
    name = "model.embed_tokens.weight"
    MaskSet.random({name: model.get_parameter(name)}, density=0.5).save(tmp_path / "mask.safetensors")
    jobs = []
    monkeypatch.setattr(baseline, "_run", lambda job, *args, **kwargs: jobs.append(job))
    monkeypatch.setattr(baseline, "make_checkpoint", lambda *args, **kwargs: None)
    bench("dpo", "--small", "--modes", "shira", "--mask", tmp_path / "mask.safetensors")
    report = json.loads((tmp_path / "baseline.json").read_text())
    density = report["mask"]["nnz"] / report["numel"]
    assert 0.3 < density < 0.31
    # 1,120 values a rank on each layer's 43,008 weights.
    assert jobs[0].shira_rank == report["settings"]["shira_rank"] == round(density * 43008 / 1120) == 12


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ["--plot", "x.png"]),
        ("peft", ["--modes", "lora"]),
        ("peft", ["--modes", "dense,shira"]),
    ],
)
def test_a_package_that_is_missing(monkeypatch, bench, package, words):
    from importlib import util

    found = util.find_spec
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest))
    code, _, err = bench("dpo", "--small", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert f"{package}, which is not installed: pip install 'sparse-opt[" in err


def result(mode: str, loss: float, digest: str = "d") -> dict[str, Any]:
    step = {
        "loss": loss,
        "grad_norm": 1.0,
        "step_s": 0.1,
        "host_s": 0.1,
        "cpu_s": 0.1,
        "section_s": dict.fromkeys(SECTIONS, 0.02),
        "section_host_s": dict.fromkeys(SECTIONS, 0.02),
    }
    return {
        "mode": mode,
        "n_trained": 10,
        "n_tiled": 0,
        "data_digest": digest,
        "peak_memory_bytes": None,
        "peak_reserved_bytes": None,
        "bytes": {"weights": 20},
        "kernel_s": None,
        "steps": [copy.deepcopy(step) for _ in range(3)],
    }


@pytest.mark.parametrize(
    ("results", "messages"),
    [
        (
            [result("dense", math.log(2)), result("sparse", 0.7)],
            ["WRONG RESULT: mode sparse begins at a DPO loss of 0.7"],
        ),
        (
            [result("dense", math.log(2)), result("sparse", math.log(2), "e")],
            ["WRONG RESULT: the modes trained on differ"],
        ),
        ([result("dense", math.log(2)), None], ["FAILED: mode sparse"]),
    ],
    ids=["loss", "data", "a run that failed"],
)
def test_wrong_results_are_reported_and_end_with_1(monkeypatch, tmp_path, bench, results, messages):
    waiting = iter(results)
    monkeypatch.setattr(baseline, "_run", lambda *args, **kwargs: next(waiting))
    monkeypatch.setattr(baseline, "make_checkpoint", lambda *args, **kwargs: None)
    code, out, err = bench("dpo", "--small", "--modes", "dense,sparse", "--n_steps", 3, "--n_warmup", 0)
    assert code == 1
    assert [line[: len(message)] for line, message in zip(err.splitlines(), messages, strict=True)] == messages
    assert "dense" in out
    report = json.loads((tmp_path / "baseline.json").read_text())
    assert len(report["rows"]) == sum(item is not None for item in results)


@pytest.mark.slow
def test_a_run_that_fails_says_why_in_one_line(tmp_path, bench):
    """A dataset that cannot be read is found by each mode's own process."""
    folder = tmp_path / "model"
    config = baseline.words_config(baseline.SMALL, 32)
    baseline.make_checkpoint(folder, config, seed=0, device=torch.device("cpu"))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{")
    words = ("--device", "cpu", "--checkpoint", folder, "--modes", "dense", "--dataset", pairs)
    code, _, err = bench("dpo", *words)
    assert code == 1
    assert any(line.startswith(f"sparse-opt: error: dense: dataset {pairs}: cannot be") for line in err.splitlines())
    assert "dense: the run ended with exit code 1" in err.splitlines()


def test_a_missing_file_of_rows_is_refused_at_once(bench):
    code, _, err = bench("grpo", "--device", "cpu", "--model_name", "m", "--dataset", "/nowhere/rows.jsonl")
    assert code == 2 and "--dataset /nowhere/rows.jsonl: no such file" in err and len(err.splitlines()) == 1
