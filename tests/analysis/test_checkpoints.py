import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparse_opt.analysis import CheckpointSeries, count_changes, measure_coverage, measure_ranks, measure_sparsity
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import DataError


@pytest.fixture
def write(tmp_path: Path):
    """`write(name, tensors, shards=1)`: a checkpoint folder."""

    def make(name: str, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = list(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[i::shards], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return make


def test_two_folders_are_a_log_of_two_steps(write, random_states):
    base, _, _, tuned = random_states(torch.float32)
    pair = CheckpointSeries.of_pair(write("base", base, shards=3), write("tuned", tuned))
    assert pair.steps == (0, 1)
    assert set(pair.layout.names) == set(tuned)
    found = measure_sparsity(pair, [1], tolerances=[1e-5])[0].stored
    assert found == {name: count_changes(base[name], tuned[name], [1e-5]) for name in found}
    assert set(measure_ranks(pair)[1]) == {name for name in tuned if "norm" not in name}
    for step, state in ((0, base), (1, tuned)):
        for name in tuned:
            ((at, tensor),) = pair.tensor_states(name, [step])
            assert at == step
            assert torch.equal(tensor, state[name])
    assert pair.digest(0) != pair.digest(1)


def test_a_checkpoint_of_another_dtype_is_compared_in_fp32(write):
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    pair = CheckpointSeries.of_pair(
        write("base", {"w.weight": weight.bfloat16()}), write("tuned", {"w.weight": weight})
    )
    counts = measure_sparsity(pair, [1], tolerances=[0.0])[0].stored["w.weight"]
    assert counts.changed == int((weight != weight.bfloat16().float()).sum())


def test_gpt2_names_match_with_and_without_their_prefix(write):
    base = {"h.0.attn.c_attn.weight": torch.zeros(4, 12), "h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    tuned = {"transformer.h.0.attn.c_attn.weight": torch.ones(4, 12)}
    for first, second in ((base, tuned), (tuned, base)):
        pair = CheckpointSeries.of_pair(write(f"a{len(first)}", first), write(f"b{len(second)}", second))
        (name,) = pair.layout.names
        assert name in second
        assert measure_sparsity(pair, [1])[0].stored[name].changed == 48


def test_a_tied_head_may_be_missing(write):
    body = {"model.embed_tokens.weight": torch.zeros(5, 3)}
    head = {**body, "lm_head.weight": torch.zeros(5, 3)}
    pair = CheckpointSeries.of_pair(write("with_head", head), write("tied", body))
    assert pair.layout.names == ("model.embed_tokens.weight",)


def test_names_and_shapes_must_be_those_of_one_model(write):
    base = write("base", {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2)})
    with pytest.raises(DataError, match=r"a\.weight is \[2, 3\] in .*base and \[3, 2\] in .*turned"):
        CheckpointSeries.of_pair(base, write("turned", {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(2)}))
    with pytest.raises(DataError, match=r"b\.weight is in .*base and not in .*short: two different models"):
        CheckpointSeries.of_pair(base, write("short", {"a.weight": torch.zeros(2, 3)}))


def test_what_is_no_checkpoint_is_named(write, tmp_path):
    good = write("good", {"a.weight": torch.zeros(2, 3)})
    (tmp_path / "empty").mkdir()
    torn = write("torn", {"a.weight": torch.zeros(2, 3)})
    (torn / "model.safetensors").write_bytes(b"\x10")
    lost = write("lost", {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2)}, shards=2)
    (lost / "model-00002-of-00002.safetensors").unlink()
    for source, said in (
        (tmp_path / "empty", "holds no model.safetensors and no model.safetensors.index.json"),
        (torn, "not a readable safetensors file"),
        (lost, "model-00002-of-00002.safetensors: not a readable"),
        ("someone/model-that-is-not-cached", "cannot read someone/model-that-is-not-cached"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            CheckpointSeries.of_pair(good, source)
        assert "\n" not in str(caught.value)


def test_a_hub_name_is_taken_from_the_cache(write, tmp_path, monkeypatch):
    folder = write("model", {"a.weight": torch.ones(2, 3)}, shards=2)
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (tmp_path / "hub" / "models--someone--small" / "refs").mkdir()
    (tmp_path / "hub" / "models--someone--small" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    pair = CheckpointSeries.of_pair("someone/small", "someone/small@main")
    assert measure_sparsity(pair, [1])[0].stored["a.weight"].changed == 0


@pytest.mark.parametrize(
    "name", ["step-{}", "step_{:08d}", "checkpoint-{}", "step_{:03d}.pt", "step_{:03d}.safetensors"]
)
def test_coverage_of_a_folder_of_checkpoints_is_that_of_the_log(write, tmp_path, random_states, name):
    states = dict(zip((0, 100, 600), random_states(torch.float32)[1:], strict=True))
    folder = tmp_path / "run"
    folder.mkdir()
    for step, state in states.items():
        file = folder / name.format(step)
        if file.suffix == ".pt":
            torch.save({"model": state} if step else state, file)
        elif file.suffix:
            save_file(state, file)
        else:
            write(f"run/{file.name}", state)
    log = DeltaLog.create(tmp_path / "log", states[0])
    for step in (100, 600):
        log.append(step, states[step])
    series, log = CheckpointSeries.of_folder(folder), DeltaLog.open(tmp_path / "log")
    assert series.steps == log.steps == (0, 100, 600)
    assert measure_coverage(series) == measure_coverage(log)
    assert measure_sparsity(series) == measure_sparsity(log)
    assert measure_ranks(series) == measure_ranks(log)
    assert series.digest(100) != series.digest(600)


def test_tied_tensors_of_a_state_dict_count_once(tmp_path):
    weight = torch.randn(4, 3)
    for step in (0, 1):
        state = {"embed.weight": weight + step, "b.weight": torch.ones(2)}
        torch.save(state | {"lm_head.weight": state["embed.weight"]}, tmp_path / f"step_{step}.pt")
    assert CheckpointSeries.of_folder(tmp_path).layout.names == ("embed.weight", "b.weight")


def test_a_folder_without_a_series_is_refused(write, tmp_path):
    base = write("base", {"a.weight": torch.zeros(2)})
    folder = tmp_path / "run"
    write("run/step-1", {"a.weight": torch.ones(2)})
    write("run/logs", {"a.weight": torch.ones(2)})  # of no step
    with pytest.raises(DataError, match=r"run: holds 1 checkpoints .*expected two or more, or one and a base model"):
        CheckpointSeries.of_folder(folder)
    series = CheckpointSeries.of_folder(folder, base)
    assert series.steps == (0, 1)
    with pytest.raises(DataError, match="no checkpoint of step 7; there are 0, 1"):
        list(series.tensor_states("a.weight", [7]))
    write("run/checkpoint-1", {"a.weight": torch.ones(2)})
    with pytest.raises(DataError, match="checkpoint-1 and step-1 are both of step 1"):
        CheckpointSeries.of_folder(folder)
