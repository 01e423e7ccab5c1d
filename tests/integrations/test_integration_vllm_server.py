"""GRPO sends a vLLM server the changed values only. vLLM itself: tests/vllm_engine/test_vllm_trl.py."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest
import torch
from launch import launch
from trainer_lab import Lab, make_tokenizer

from sparse_opt.errors import ConfigError
from sparse_opt.integrations import SparseArguments
from sparse_opt.weight_sync import Message, WeightReceiver

SPARSE = SparseArguments(vllm_weights="sparse")


class Server(ThreadingHTTPServer):
    """Answers as vLLM 0.32 with backend `sparse_opt` does; another route, such as that of the NCCL group, is a 404."""

    daemon_threads = True

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.receiver = model, WeightReceiver(model)
        self.backend, self.logprobs_mode = "sparse_opt", "processed_logprobs"
        self.version, self.active, self.paused = "default", False, False
        self.cached = None  # the version whose keys and values are cached
        self.kinds, self.sizes, self.requests = [], [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, route, body):
        if route == "/health":
            return {}
        if route == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if route.startswith("/server_info"):
            transfer = None if self.backend is None else {"backend": self.backend}
            return {
                "vllm_config": {
                    "model_config": {"logprobs_mode": self.logprobs_mode},
                    "weight_transfer_config": transfer,
                }
            }
        if route == "/weight_info":
            return {"weight_version": self.version}
        if route == "/pause?mode=keep&clear_cache=false":
            self.paused = True
        elif route == "/resume":
            self.paused = False
        elif route == "/start_weight_update":
            self.active = self.paused
        elif route == "/update_weights":
            assert self.active
            message = Message.from_bytes(base64.b64decode(body["update_info"]["message"]))
            self.kinds.append(message.kind)
            self.sizes.append(len(message.to_bytes()))
            self.receiver.receive(message)
        elif route == "/finish_weight_update":
            self.active, self.version = False, body["weight_version"]
        elif route == "/reset_prefix_cache?reset_running_requests=true&reset_external=true":
            self.cached = None
        elif route == "/v1/completions":
            return self.complete(body)
        else:
            return None
        return {"success": True}

    def complete(self, body):
        assert not self.paused and self.cached in (None, self.version)
        self.cached = self.version
        self.requests.append(body)
        return {"choices": [self.choice(prompt, body) for prompt in body["prompt"] for _ in range(body["n"])]}

    def choice(self, prompt, body):
        row = torch.tensor([prompt])
        ids = self.model.generate(row, max_new_tokens=body["max_tokens"], do_sample=True)[0, len(prompt) :]
        with torch.no_grad():
            logits = self.model(torch.cat([row[0], ids])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / body["temperature"]).log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        tokens = [f"token_id:{token}" for token in ids.tolist()]
        top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        table = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
        return {"prompt_token_ids": prompt, "token_ids": ids.tolist(), "logprobs": table}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.respond(None)

    def do_POST(self):
        self.respond(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"))

    def respond(self, body):
        found = self.server.answer(self.path, body)
        data = json.dumps({"error": {"message": "no such route"}} if found is None else found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(model):
    client, refused = "trl.generation.vllm_client", AssertionError("TRL's transfer of all weights is used")
    with (
        # TRL's client of a server asks whether vLLM is installed, which this environment need not have.
        mock.patch(f"{client}.is_vllm_available", return_value=True),
        mock.patch(f"{client}.VLLMClient.init_communicator", side_effect=refused),
        mock.patch(f"{client}.VLLMClient.update_named_params", side_effect=refused),
        Server(model) as found,
    ):
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture
def server(lab):
    with serving(lab.model().cpu()) as found:
        yield found


def options(server, **changes):
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "warmup_steps": 0,
        "max_steps": 4,
        **changes,
    }


def test_a_server_gets_the_changed_values(lab, server):
    mask = lab.random_mask(0.1)
    trainer = lab("GRPO", mask=mask, sparse=SPARSE, **options(server, generation_kwargs={"seed": 3}, beta=0.1))
    args = trainer.args
    assert args.use_vllm and args.generation_kwargs == {"seed": 3} and args.beta == 0.1
    trainer.train()
    assert server.kinds == ["mask", "state", "update", "update", "update"]
    assert max(server.sizes[2:]) < 4 * mask.nnz + 4096  # fp32 values and a header
    assert server.version == "3" and not server.paused
    assert all(body["seed"] == 3 and body["n"] == 4 and body["max_tokens"] == 6 for body in server.requests)
    # Logged by TRL's importance sampling: both models compute in fp32, in batches of other sizes, and differ by a few
    # roundings (5e-7). Without the updates the differences are 0.1 to 0.2 from step 2 on.
    differences = [
        row["sampling/sampling_logp_difference/max"]
        for row in trainer.state.log_history
        if "sampling/sampling_logp_difference/max" in row
    ]
    assert len(differences) == 4 and max(differences) < 1e-5
    trainer.evaluate(lab.rows("GRPO"))  # of the weights after the last step, which no generation has needed before
    assert server.kinds[5:] == ["update"]
    for served, trained in zip(server.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(served, trained.cpu())
    start = lab.model().cpu()
    assert any(not torch.equal(a, b) for a, b in zip(server.model.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_a_server_with_another_backend_is_refused(lab, server, backend):
    server.backend = backend
    with pytest.raises(ConfigError, match=f"has weight transfer backend {backend!r}, expected 'sparse_opt'"):
        lab("GRPO", mask=lab.random_mask(0.1), sparse=SPARSE, **options(server))


def test_other_log_probabilities_are_a_warning(lab, server):
    server.logprobs_mode = "raw_logprobs"
    with pytest.warns(UserWarning, match="has --logprobs-mode raw_logprobs, expected processed_logprobs"):
        lab("GRPO", mask=lab.random_mask(0.1), sparse=SPARSE, **options(server))


def test_vespo_needs_importance_sampling_of_tokens(lab, server):
    changes = {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
    with pytest.raises(ConfigError, match="loss_type is 'vespo', and vllm_importance_sampling_mode is 'sequence_mask'"):
        lab("GRPO", mask=lab.random_mask(0.1), sparse=SPARSE, **options(server, **changes))


def train_on(rank, folder, root):
    """Train in this process of two, with a server of its own that the second one must not find."""
    lab = Lab(folder, make_tokenizer(), root / str(rank), torch.device("cpu"))
    with serving(lab.model()) as server:
        trainer = lab("GRPO", mask=lab.random_mask(0.1), sparse=SPARSE, **options(server))
        trainer.train()
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.evaluate(lab.rows("GRPO"))
        same = [torch.equal(a, b) for a, b in zip(server.model.parameters(), weights, strict=True)]
    return {"kinds": server.kinds, "requests": len(server.requests), "weights": weights, "served": all(same)}


@pytest.mark.dist
def test_of_two_processes_the_main_one_has_the_server(lab, tmp_path):
    if lab.device.type != "cpu":
        pytest.skip("the two processes run on the CPU")
    first, second = launch(train_on, 2, lab.folder, tmp_path)
    assert first["kinds"] == ["mask", "state", "update", "update", "update", "update"] and first["served"]
    assert not second["kinds"] and not second["requests"]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
