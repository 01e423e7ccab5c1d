"""Runs with sharded models: resumed with other numbers of processes, their files, and their rollouts.

A step has one example on each of two ranks, and two forward passes of one example in one process. The loss of each is
multiplied by 2 and the sum of their gradients divided by 2, which is exact, so that all outputs are the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import launch
from rollout_models import with_lora
from safetensors.torch import load_file
from stopping import StoppedError, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt.analysis.update_statistics import UpdateStatistics
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.policy.sharding import shard
from sparse_opt.trainers.policy.whole_model import Outline
from sparse_opt.trainers.rft import datagen
from sparse_opt.trainers.rollouts import Sampling, make_engine
from sparse_opt.trainers.run.training_run import TrainingRun

CASES = {
    "dense": {"dtype": "bf16", "share_prompts": True},
    "sparse": {"mode": "sparse", "dtype": "bf16", "gather_for_generation": False},
    "lora": {"mode": "lora", "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def options(model_folder, pairs_file, mask_file, folder):
    """`options("one")`: for each case the options of a DPO run of six steps in that folder, with all outputs."""

    def make(name_of_all, **changes):
        return {
            name: {
                "policy_name": str(model_folder),
                "dataset": str(pairs_file),
                "dtype": "fp32",
                "device": "cpu",
                "n_steps": 6,
                "batch_size": 1,
                "gradient_accumulation_steps": 2,
                "max_length": 64,
                "learning_rate": 1e-3,
                "max_grad_norm": None,
                "save_steps": 2,
                "sample_steps": 3,
                "eval_dataset": str(pairs_file),
                "eval_subset_size": 4,
                "eval_steps": 3,
                "statistics_steps": 3,
                "delta_log_steps": "every:1",
                **case,
                "mask": str(mask_file) if name == "sparse" else None,
                "output_dir": str(folder / name_of_all / name),
                "delta_log_dir": str(folder / name_of_all / f"{name}_log"),
                **changes,
            }
            for name, case in CASES.items()
        }

    return make


def train_until(rank, options, last):
    """Train each case until the process dies after this step."""
    original = TrainingRun.log

    def log(self, step, *args, **metrics):
        original(self, step, *args, **metrics)
        if step == last:
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "log", log)
        for each in options.values():
            paths = {name: Path(each[name]) for name in ("output_dir", "delta_log_dir")}
            try:
                dpo.train(dpo.DPOConfig(**{**each, **paths}))
            except StoppedError:
                continue


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in processes of `launch`: sums of several threads are in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def of_ranks(options, folder, model_folder):
    """The completions of two ranks, by `generate`; they also train until step 3, in one launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        yield launch(train_and_generate, 2, options("several", fsdp=True), str(model_folder))


def train_and_generate(rank, options, model_folder):
    train_until(rank, options, 3)
    refuse(options["dense"], model_folder)
    return generate(rank, model_folder)


def refuse(options, model_folder):
    """What a sharded model does not support raises before a file is written."""
    shared = {name: options[name] for name in ("policy_name", "dataset", "device")} | {
        "parallel": "fsdp",
        "reward_functions": ["token_rewards:even_tokens"],
        "output_dir": Path(options["output_dir"]) / "refused",
    }
    with pytest.raises(ConfigError, match="option 'parallel' is fsdp: rft datagen samples other prompts"):
        datagen.datagen(datagen.DatagenConfig(**shared))
    assert not shared["output_dir"].exists()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    shard(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match="'gather_for_generation' is false with rollout_engine continuous_batching"):
        make_engine("continuous_batching", model, tokenizer, gather=False)
    with pytest.raises(ConfigError, match="'gather_for_generation' is false with generation_aggregation_steps"):
        make_engine("generate", model, tokenizer, gather=False, at_once=4)


def test_a_run_goes_on_with_and_without_shards(options, of_ranks, folder):
    train_until(0, options("one"), None)
    train_until(0, options("several", resume=True), 5)
    launch(train_until, 2, options("several", resume=True, parallel="fsdp"), None)
    for name in CASES:
        one, several = folder / "one" / name, folder / "several" / name
        for file in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "update_statistics.jsonl"):
            assert common(one / file) == common(several / file), (name, file)
        # Steps 3 and 4 were repeated by one process.
        assert ["rank1/peak_host_memory_bytes" in row for row in rows(several / "metrics.jsonl")] == [
            True, True, False, False, True, True,
        ]  # fmt: skip
        assert_same(*(load_file(path / "final" / "model.safetensors") for path in (one, several)))
        for step in (2, 4):  # saved by two processes, and by one
            states = (path / "checkpoints" / f"step_0000000{step}" / "training_state.pt" for path in (one, several))
            assert_same(*(torch.load(state, weights_only=True) for state in states))
        assert logged(folder / "one" / f"{name}_log") == logged(folder / "several" / f"{name}_log"), name


def common(file):
    """The rows without the columns of each rank."""
    return [{key: value for key, value in row.items() if not key.startswith("rank")} for row in rows(file)]


def logged(folder):
    """The digests of a log's steps, and by file the bytes after the header, which has the run's random id."""
    log = DeltaLog.open(folder)
    contents = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(contents) == 7 + (folder / "mask.safetensors").exists()
    return (
        {step: log.digest(step) for step in log.steps},
        {name: content[8 + int.from_bytes(content[:8], "little") :] for name, content in contents.items()},
    )


def assert_same(one, several):
    """Two nested states have the same values, tensors to the bit."""
    assert type(one) is type(several)
    if isinstance(one, torch.Tensor):
        assert one.dtype == several.dtype and torch.equal(one, several)
    elif isinstance(one, dict):
        assert one.keys() == several.keys()
        for key, value in one.items():
            assert_same(value, several[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(several)
        for pair in zip(one, several, strict=True):
            assert_same(*pair)
    else:
        assert one == several


PROMPTS = [[5, 6, 7], [20, 21, 22, 23, 24], [100]]


def generate(rank, folder):
    """Completions by engine, of rank 0 and of an unsharded model; rank 1 has no prompts, or longer completions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for adapted in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)  # of the adapters
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            models.append(with_lora(model) if adapted else model)
        whole, model = models
        shard(model, torch.device("cpu"))
        for name, gather in (("generate", True), ("generate", False), ("continuous_batching", True)):
            engine = make_engine(name, model, tokenizer, gather=gather)
            expected = make_engine(name, whole, tokenizer)
            for prompts, longest in ((PROMPTS if rank == 0 else [], 6), (PROMPTS[rank:], 3 + 4 * rank)):
                sampling = Sampling(longest, temperature=0.0)
                completions = engine.generate(prompts, 2, sampling).ids
                assert completions == (expected.generate(prompts, 2, sampling).ids if prompts else [])
                found[adapted, name, gather, longest] = completions
    return found


def test_ranks_of_a_sharded_model_generate_different_numbers_of_tokens(of_ranks):
    first, second = of_ranks
    assert all(len(completions) == 6 for completions in first.values())
    assert {len(completions) for completions in second.values()} == {0, 4}
    assert any(len(completion) == 7 for completions in second.values() for completion in completions)


def statistics_of_sharded(rank, model_folder):
    """The weights are frozen after the outline of the model was made, as in a run with `mlp_only`."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    outline = Outline(model)
    shard(model, torch.device("cpu"))
    train_mlps_only(model)
    whole = outline.gather(model)
    return None if whole is None else UpdateStatistics(whole).matrices


def train_mlps_only(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)


def test_the_statistics_of_a_sharded_model_are_of_its_trained_matrices(model_folder):
    whole = AutoModelForCausalLM.from_pretrained(model_folder)
    train_mlps_only(whole)
    expected = UpdateStatistics(whole).matrices
    assert all(".mlp." in name for name in expected)
    assert launch(statistics_of_sharded, 2, str(model_folder)) == [expected, None]
