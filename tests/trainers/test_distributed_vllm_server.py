"""GRPO of two processes with one vLLM server: the losses of one process, its refusals and its errors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from launch import launch
from stopping import rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_stand_in import serving

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import grpo
from sparse_opt.trainers.ranks import Ranks
from sparse_opt.trainers.rft import datagen
from sparse_opt.trainers.rollouts import Sampling, make_engine

# Name: mode and parallel.
CASES = {
    "dense": ("dense", "replicate"),
    "lora": ("lora", "replicate"),
    "sparse": ("sparse", "replicate"),
    "dense-fsdp": ("dense", "fsdp"),
    "sparse-fsdp": ("sparse", "fsdp"),
}
N_STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def dataset_cache(tmp_path_factory):
    """Keep the cache of `datasets` of all processes out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="module")
def options(model_folder, pairs_file, mask_file):
    """`options("sparse", folder, url)`: two optimizer steps on four groups of four completions in each step."""

    def make(mode, folder, url):
        return {
            "policy_name": str(model_folder),
            "dataset": str(pairs_file),
            "eval_dataset": str(pairs_file),
            "eval_subset_size": 1,  # one of two ranks has no prompt
            "eval_steps": 2,
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": N_STEPS,
            "batch_size": 4,
            "gradient_accumulation_steps": 4,
            "n_generations": 4,
            "num_iterations": 2,  # the loss of a single step is 0, up to rounding
            "max_completion_length": 6,
            "learning_rate": 1e-4,  # no ratio is near the bounds of clipping, where rounding would decide
            "reward_functions": ["token_rewards:even_tokens"],
            "mode": mode,
            "mask": str(mask_file) if mode == "sparse" else None,
            "rollout_engine": "vllm",
            "vllm_server_base_url": url,
            "output_dir": str(folder),
            "sample_steps": None,
            "seed": 5,
        }

    return make


@pytest.fixture
def server_of(model_folder):
    """`server_of()`: a server with the checkpoint that the runs start from."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            serving(AutoModelForCausalLM.from_pretrained(model_folder), max_model_len=128, weight_transfer="sparse_opt")
        )


def train_all(rank, cases):
    return [grpo.train(grpo.GRPOConfig(**{**each, "output_dir": Path(each["output_dir"])})) for each in cases]


def test_the_losses_of_two_processes_are_those_of_one(options, server_of, tmp_path):
    cases, servers = {}, {}
    for name, (mode, parallel) in CASES.items():
        servers[name] = server_of()
        cases[name] = options(mode, tmp_path / "two" / name, servers[name].url) | {"parallel": parallel}
    for summaries in launch(train_all, 2, list(cases.values()), timeout=400):
        assert len(summaries) == len(CASES)
    for mode in ("dense", "lora", "sparse"):
        servers[mode, 1] = server_of()
        train_all(0, [options(mode, tmp_path / "one" / mode, servers[mode, 1].url)])
    for name, (mode, _) in CASES.items():
        one, two = tmp_path / "one" / mode, tmp_path / "two" / name
        # Evaluations before the first step, after the second and after the last. Weights are sent once for a rollout of
        # all processes.
        assert servers[name].served == servers[mode, 1].served == [1, 16, 16, 1, 16, 1]
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            expected, found = rows(one / file), rows(two / file)
            assert [row["step"] for row in found] == [row["step"] for row in expected]
            for before, after in zip(expected, found, strict=True):
                for key, value in before.items():
                    # The sums of a step are in another order: log-probabilities near 6 differ by a few units of 2^-22.
                    if isinstance(value, float) and "/" not in key and key != "padding" and not timed(key):
                        assert after[key] == pytest.approx(value, rel=1e-5, abs=5e-6), (name, file, key)
        metrics = rows(two / "metrics.jsonl")
        assert len(metrics) == N_STEPS and all(abs(row["loss"]) > 1e-4 for row in metrics)
        assert all(row["clip_low"] == row["clip_high"] == 0 for row in metrics)
        # Two fp32 computations of the same logits, of the policy and the server, in batches of other sizes.
        assert all(row["sampling_logp_difference_max"] < 1e-5 for row in metrics)


def timed(key):
    return key.endswith(("_time_s", "_s", "_bytes", "_per_s", "_percent"))


def refuse(rank, options, model_folder):
    """What several processes cannot do with vLLM raises on every rank."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(ConfigError, match=r"runs in a single process, and there are 2: set --vllm_server_base_url"):
        make_engine("vllm", model, tokenizer)
    names = ("policy_name", "dataset", "device", "reward_functions", "rollout_engine", "vllm_server_base_url")
    own = {name: options[name] for name in names} | {"output_dir": Path(options["output_dir"])}
    with pytest.raises(ConfigError, match="on a server: each of 2 processes samples by itself"):
        datagen.datagen(datagen.DatagenConfig(**own))
    assert not own["output_dir"].exists()
    lora = {**options, "mode": "lora", "parallel": "fsdp", "output_dir": own["output_dir"]}
    with pytest.raises(ConfigError, match="cannot merge the adapters of a sharded policy: expected --parallel repl"):
        grpo.train(grpo.GRPOConfig(**lora))
    assert not own["output_dir"].exists()


def test_what_several_processes_cannot_do(options, server_of, model_folder, tmp_path):
    url = server_of().url
    launch(refuse, 2, options("dense", tmp_path / "refused", url), str(model_folder))


def sample_unevenly(rank, model_folder, url):
    """Rank 0 has no prompts in the first rollout, and would begin the second one while rank 1 samples."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    engine = make_engine("vllm", model, tokenizer, vllm_server_base_url=url, ranks=Ranks(rank, 2))
    sampling = Sampling(6)
    assert len(engine.generate([[5, 6, 7]] * 8 * rank, 2, sampling).ids) == 16 * rank
    assert len(engine.generate([[5, 6, 7]], 1, sampling).ids) == 1
    engine.close()


def test_the_weights_do_not_change_while_a_process_samples(server_of, model_folder):
    server = server_of()
    launch(sample_unevenly, 2, str(model_folder), server.url)
    assert server.served == [16, 2]
