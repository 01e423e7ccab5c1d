"""The rollout engine `vllm` with vLLM itself, in this process and on a server, on a CPU: `make test-vllm`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.masks import MaskSet
from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.rollouts import GenerateEngine, Sampling, VLLMEngine, VLLMServerEngine, rollout

PROMPTS = [[5, 6, 7], [8], [9] * 11 + [10]]
NEVER = [2]
SAMPLING = Sampling(6, temperature=0.0)
# Two orders of fp32 sums of up to 384 products: differences of log-probabilities near 6 measured at most 4e-6.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose output layer is tied to the embedding: vLLM packs that layer's weight separately on a CPU."""
    return make_arithmetic(tmp_path_factory.mktemp("world") / "arithmetic") / "model"


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def perturb(model, seed, mask=None):
    """Change all weights, or the active elements of the mask."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            changed = parameter + 1.5 * parameter.std() * torch.randn_like(parameter)
            if mask is None:
                parameter.copy_(changed)
            elif name in mask.names:
                parameter.view(-1)[mask[name]] = changed.view(-1)[mask[name]]


def assert_follows(engine, model, mask=None):
    """The engine writes what the policy would, before and after changes of all weights, and reports the same odds."""
    by_hand = GenerateEngine(model, pad_id=0, eos_ids=NEVER)
    found = []
    for seed in range(3):
        found.append(engine.generate(PROMPTS, 1, SAMPLING).ids)
        assert found[-1] == by_hand.generate(PROMPTS, 1, SAMPLING).ids
        perturb(model, seed, mask)
    assert found[0] != found[1] != found[2]
    torch.manual_seed(3)
    sampling = Sampling(6, temperature=0.7)
    sampled = rollout(engine, model, PROMPTS, n_generations=4, sampling=sampling, pad_id=0)
    assert len({tuple(completion) for completion in sampled.completions}) == 12
    torch.testing.assert_close(sampled.engine_logprobs, sampled.logprobs, atol=TOLERANCE, rtol=0)
    torch.manual_seed(3)
    assert engine.generate(PROMPTS, 4, sampling).ids == sampled.completions


def test_in_process(model):
    engine = VLLMEngine(model, eos_ids=NEVER, max_length=64, enforce_eager=True)
    try:
        assert_follows(engine, model)
        lacks_a_weight(engine)
    finally:
        engine.close()


def test_in_process_under_a_mask(model):
    mask = MaskSet.random(model, density=0.5, seed=0)
    engine = VLLMEngine(model, eos_ids=NEVER, max_length=64, enforce_eager=True, mask=mask)
    try:
        assert_follows(engine, model, mask)
    finally:
        engine.close()


def lacks_a_weight(engine):
    engine.model.model.norm = torch.nn.Identity()
    with pytest.raises(SparseOptError, match=r"has 1 weights that the policy does not give it, among them model\.norm"):
        engine.generate(PROMPTS, 1, SAMPLING)


def test_on_a_server(folder, model, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
    command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "sparse_opt"}']
    command += ["--generation-config", "vllm"]
    command += ["--worker-extension-cls", "sparse_opt.trainers.rollouts.vllm_weights.ReloadExtension"]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        )
    url = f"http://localhost:{port}"
    try:
        with pytest.raises(ConfigError, match=r"needs a server with VLLM_SERVER_DEV_MODE=1: .* cannot be reached"):
            VLLMServerEngine(model, eos_ids=NEVER, base_url=url)
        wait_for(server, f"{url}/health", log)
        mask = MaskSet.random(model, density=0.5, seed=0)
        assert_follows(VLLMServerEngine(model, eos_ids=NEVER, base_url=url, mask=mask), model, mask)
        engine = VLLMServerEngine(model, eos_ids=NEVER, base_url=url)
        assert_follows(engine, model)
        with pytest.raises(ConfigError, match=r"has 66 tokens, more than the vLLM server's --max-model-len, 64"):
            engine.generate([[5] * 60], 1, SAMPLING)
        lacks_a_weight(engine)
        engine.close()
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server, url, log, seconds=300):
    """Wait until the server answers."""
    for _ in range(seconds):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])
