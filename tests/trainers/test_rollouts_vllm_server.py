"""The engine on a vLLM server, with a stand-in that answers as vLLM 0.32 does. vLLM itself: tests/vllm_engine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file
from small_models import small
from transformers import LlamaConfig

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.masks import MaskSet
from sparse_opt.trainers.policy.pretrained import max_positions
from sparse_opt.trainers.rollouts import GenerateEngine, Sampling, VLLMServerEngine, rollout

NEVER = [210]
PROMPTS = [[5, 6, 7], [8], [9, 9, 10]]


class Server(ThreadingHTTPServer):
    """Samples greedily from the weights that it has loaded, and reports the log-probability of each token."""

    daemon_threads = True

    def __init__(self, model):
        super().__init__(("localhost", 0), Handler)
        self.model, self.missing, self.logprobs_mode, self.cached = model, [], "processed_logprobs", False
        self.lock = threading.Lock()
        self.url = f"http://localhost:{self.server_address[1]}"

    def answer(self, route, body):
        if route == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if route.startswith("/server_info"):
            model = {"logprobs_mode": self.logprobs_mode, "max_model_len": 16}
            return {"vllm_config": {"model_config": model, "weight_transfer_config": None}}
        if route == "/collective_rpc":
            assert body["method"] == "reload_policy"
            self.model.load_state_dict(load_file(*body["args"]), strict=False)
            return {"results": [self.missing]}
        if route == "/reset_prefix_cache":
            self.cached = False
            return {"success": True}
        assert route == "/v1/completions" and body["model"] == "policy" and body["logprobs"] == 0
        with self.lock:
            choices = [self.choice(body, index) for index in range(body["n"])]
        return {"choices": choices[::-1]}

    def choice(self, body, index):
        sampling = Sampling(body["max_tokens"], temperature=0.0)
        ids = GenerateEngine(self.model, pad_id=0, eos_ids=NEVER).generate([body["prompt"]], 1, sampling).ids[0]
        with torch.no_grad():
            table = (
                self.model(torch.tensor([body["prompt"] + ids])).logits[0, len(body["prompt"]) - 1 :].log_softmax(-1)
            )
        logprobs = [float(table[i, token]) for i, token in enumerate(ids)]
        return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.respond(None)

    def do_POST(self):
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body):
        found = self.server.answer(self.path, body)
        data = json.dumps({"error": {"message": "no such route"}} if found is None else found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server(small(LlamaConfig)) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_it_samples_from_the_policy_as_it_is_now(server):
    model = small(LlamaConfig)
    engine = VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url + "/")
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        found = rollout(engine, model, PROMPTS, n_generations=2, sampling=Sampling(6, temperature=0.0), pad_id=0)
        expected = GenerateEngine(model, pad_id=0, eos_ids=NEVER).generate(PROMPTS, 2, Sampling(6, temperature=0.0))
        assert found.completions == expected.ids
        # Two fp32 computations of the same logits, in batches of other sizes.
        torch.testing.assert_close(found.engine_logprobs, found.logprobs, atol=1e-5, rtol=0)
    engine.close()


def test_a_weight_that_the_policy_does_not_give_is_an_error(server):
    server.missing = ["model.norm.weight"]
    engine = VLLMServerEngine(small(LlamaConfig), eos_ids=NEVER, base_url=server.url)
    with pytest.raises(SparseOptError, match="has 1 weights that the policy does not give it, among them model.norm"):
        engine.generate(PROMPTS, 1, Sampling(6))


def test_completions_that_the_server_would_cut_are_refused(server):
    model = small(LlamaConfig)
    assert max_positions(model.config) > 16
    engine = VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    with pytest.raises(ConfigError, match="has 17 tokens, more than the vLLM server's --max-model-len, 16"):
        engine.generate(PROMPTS, 1, Sampling(14))


def test_a_server_with_other_settings_is_refused(server):
    model = small(LlamaConfig)
    with pytest.raises(ConfigError, match="backend None, and mode sparse needs --weight-transfer-config"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url, mask=MaskSet.random(model, density=0.1, seed=0))
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="has --logprobs-mode raw_logprobs, expected processed_logprobs"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    with pytest.raises(ConfigError, match=r"needs a server with VLLM_SERVER_DEV_MODE=1: .* does not answer"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url="http://localhost:9")
