"""`sparse-opt mask find`: every method, its output, and refused calls."""

import json
import shutil

import pytest
from moe_models import moe_model
from transformers import AutoTokenizer

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.mask_finding.find import find_from_log
from sparse_opt.mask_finding.log_scores import LOG_METHODS
from sparse_opt.mask_finding.model_scores import CALIBRATION_METHODS

UNTRAINED = ("weight_magnitude", *CALIBRATION_METHODS)


@pytest.fixture
def find(sparse_opt, files, tmp_path):
    """`find("--method", "fisher", ...)`: on the tiny log or model, whichever the method needs, into tmp_path/masks."""

    def call(method, *words):
        source = ["--delta_log_dir", files.delta_log] if method in LOG_METHODS else ["--model_name", files.model]
        if method in CALIBRATION_METHODS:
            source += ["--dataset", files.pairs, "--n_samples", 4]
        return sparse_opt("mask", "find", "--method", method, *source, "--output", tmp_path / "masks", *words)

    return call


@pytest.mark.parametrize("method", [*LOG_METHODS, *UNTRAINED])
def test_every_method_writes_a_mask_that_a_run_takes(find, files, tmp_path, method):
    found = json.loads(find(method, "--json", "--sparsity_percent", 80).done())
    names = {
        "magnitude": "magnitude_step3",
        "momentum": "momentum_w3_step3",
        "fisher": "fisher_step3",
        "oracle": "oracle_step3",
    }
    assert found["file"] == str(tmp_path / "masks" / f"sparsity_80.0pct_{names.get(method, method)}.safetensors")
    mask = MaskSet.load(found["file"], files.states[0])
    assert (mask.nnz, mask.digest, mask.metadata["method"]) == (found["nnz"], found["digest"], method)
    assert mask.density == pytest.approx(0.2, abs=0.002)
    assert mask.metadata["sparsity"] == "80.0"


def test_the_file_s_name_has_the_size_as_given_and_the_pattern(find):
    words = ("--top_percent", 10, "--pattern", "run16", "--momentum_window", 2, "--target_step", 2, "--json")
    found = json.loads(find("momentum", *words).done())
    assert found["file"].endswith("/top_10.0pct_momentum_w2_run16_step2.safetensors")


def test_masks_have_a_folder_by_default(sparse_opt, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(sparse_opt("mask", "find", "--delta_log_dir", files.delta_log, "--json").done())
    assert found["file"] == f"masks/{files.delta_log.name}/sparsity_90.0pct_magnitude_step3.safetensors"
    assert MaskSet.load(tmp_path / found["file"]).digest == found["digest"]


def test_a_log_s_mask_is_the_library_s(find, files):
    words = ("--sparsity_percent", 70, "--target_step", 2, "--exclude", "*norm*", "--pool", "tensor", "--json")
    found = json.loads(find("fisher", *words).done())
    expected = find_from_log(
        DeltaLog.open(files.delta_log), method="fisher", sparsity=70, target_step=2, exclude=["*norm*"], pool="tensor"
    ).mask
    mask = MaskSet.load(found["file"])
    assert mask == expected
    assert mask.metadata == expected.metadata


def test_calibration_is_recorded(find, files):
    found = json.loads(find("snip", "--seed", 3, "--max_length", 20, "--dtype", "bf16", "--json").done())
    metadata = found["metadata"]
    assert metadata["model"] == str(files.model)
    assert metadata["dataset"] == str(files.pairs)
    assert (metadata["n_samples"], metadata["seed"], metadata["max_length"]) == ("4", "3", "20")
    assert metadata["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("method", "words", "code", "said"),
    [
        ("momentum", ("--momentum_window", 4), 1, "window 4 needs 4 logged steps after the first, step 0"),
        ("magnitude", ("--target_step", 0), 1, "no element of step 0 has changed since step 0"),
        ("magnitude", ("--sparsity_percent", 100), 2, "'sparsity_percent' is 100.0"),
        ("snip", ("--delta_log_dir", "log"), 2, "'delta_log_dir' is not valid with method 'snip'"),
        ("magnitude", ("--pattern", "tile128"), 1, "in whole units of tile128, but sparsity 90.0 leaves"),
        ("magnitude", ("--device", "gpu"), 2, "'device' is 'gpu'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_refuses_in_one_line_and_writes_nothing(find, tmp_path, method, words, code, said):
    assert said in find(method, *words).failed_in_one_line(code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "fisher"), "method 'fisher' needs --delta_log_dir"),
        (("--method", "fischer"), "invalid choice: 'fischer' (choose from 'magnitude', 'momentum'"),
    ],
)
def test_what_a_method_needs(sparse_opt, tmp_path, words, said):
    assert said in sparse_opt("mask", "find", *words, "--output", tmp_path).failed_in_one_line(2)


def test_a_log_of_another_model_is_refused(find, files, tmp_path):
    line = find("magnitude", "--model_name", files.wider_model).failed_in_one_line(1)
    assert f"not a log of {files.wider_model}: model.embed_tokens.weight is [" in line
    assert list(tmp_path.iterdir()) == []


def test_experts_of_calibration_data(sparse_opt, files, tmp_path):
    folder = tmp_path / "moe"
    shutil.copytree(files.model, folder)
    model = moe_model("qwen3")
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    model.save_pretrained(folder)
    words = ("mask", "find", "--method", "experts", "--model_name", folder, "--dataset", files.pairs, "--n_samples", 4)
    found = json.loads(sparse_opt(*words, "--experts_per_layer", 2, "--output", tmp_path / "masks", "--json").done())
    assert found["file"] == str(tmp_path / "masks" / "experts_tokens_2_a_layer.safetensors")
    mask = MaskSet.load(found["file"], model)
    assert mask == MaskSet.experts(model, found["experts"])
    for layer, shares in found["shares"]["tokens"].items():
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares[e] for e in found["experts"][layer]) >= sorted(shares)[-2]
    by_weight = ("--expert_score", "weights", "--top_p", 0.3, "--output", tmp_path / "weights.safetensors")
    assert "share of weights" in sparse_opt(*words, *by_weight).done()
    info = json.loads(sparse_opt("mask", "info", found["file"], "--json", "--experts_png", tmp_path / "e.png").done())
    active = {expert for expert, stats in info["experts"].items() if stats["density"] == 1.0}
    assert active == {f"{layer}.{e}" for layer, of in found["experts"].items() for e in of}
    compared = sparse_opt("mask", "compare", found["file"], tmp_path / "weights.safetensors", "--json").done()
    overlaps = [record for record in json.loads(compared)["overlaps"] if record["level"] == "expert"]
    assert len(overlaps) == 10
    for option in (("--sparsity_percent", 50), ("--pattern", "tile64")):
        error = sparse_opt(*words, *option, "--output", tmp_path / "masks").failed_in_one_line(2)
        assert f"'{option[0].removeprefix('--')}' is not valid with method 'experts'" in error
