"""A stand-in for a vLLM server, which answers as vLLM 0.32 does. vLLM itself: tests/vllm_engine."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file

from sparse_opt.errors import WeightSyncError
from sparse_opt.weight_sync import WeightReceiver

# Settings with which the server samples from the model's distribution.
UNCHANGED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


class Server(ThreadingHTTPServer):
    """Samples from the weights that it was given last.

    Draws do not depend on the seeds of the requests: the k-th completion of a prompt since the weights have changed is
    the same, whichever process asks for it.
    """

    daemon_threads = True
    request_queue_size = 256  # several processes connect at once

    def __init__(self, model, *, max_model_len=16, weight_transfer=None):
        super().__init__(("localhost", 0), Handler)
        self.model, self.max_model_len = model, max_model_len
        self.weight_transfer = weight_transfer and {"backend": weight_transfer}
        self.logprobs_mode, self.missing = "processed_logprobs", []
        self.dtype = str(model.dtype)
        self.worker_extension = "sparse_opt.trainers.rollouts.vllm_weights.ReloadExtension"
        self.fails = None  # a route that answers with an error
        self.generation_config = {}  # values of what a request leaves out, as of generation_config.json
        self.receiver, self.version = WeightReceiver(model), "default"
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0  # requests for completions
        self.old_cache = False  # the prefix cache is of other weights
        self.drawn = Counter()  # completions of each prompt, of these weights
        self.served = []  # for each version of the weights that was sent, the number of its completions
        self.url = f"http://localhost:{self.server_address[1]}"

    def answer(self, route, body):
        if route == "/v1/completions":
            return self.complete(body)
        assert "reset_prefix_cache" not in route or "reset_external=true" in route
        with self.lock:
            return self.control(route.partition("?")[0], body)

    def control(self, route, body):
        if route == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if route == "/server_info":
            model = {"logprobs_mode": self.logprobs_mode, "max_model_len": self.max_model_len, "dtype": self.dtype}
            config = {"model_config": model, "parallel_config": {"worker_extension_cls": self.worker_extension}}
            return {"vllm_config": config | {"weight_transfer_config": self.weight_transfer}}
        if route == "/weight_info":
            return {"weight_version": self.version}
        if route == "/collective_rpc":
            assert body["method"] == "reload_policy"
            self.begin_update()
            self.model.load_state_dict(load_file(*body["args"]), strict=False)
            return {"results": [self.missing]}
        if route == "/start_weight_update":
            self.begin_update()
        elif route == "/update_weights":
            self.receiver.receive(base64.b64decode(body["update_info"]["message"]))
        elif route == "/finish_weight_update":
            self.version = body["weight_version"]
        elif route == "/reset_prefix_cache":
            self.old_cache = False
        else:
            assert route in ("/pause", "/resume")
        return {"success": True}

    def begin_update(self):
        assert self.in_flight == 0, "the weights change while a process samples"
        self.old_cache = True
        self.drawn.clear()
        self.served.append(0)

    def complete(self, body):
        assert body["model"] == "policy" and body["logprobs"] == 0
        assert body["n"] == 1 or body["temperature"] > 0, f"n must be 1 when using greedy sampling, got {body['n']}."
        changes = {name: value for name, value in (self.generation_config | body).items() if name in UNCHANGED}
        assert changes.items() <= UNCHANGED.items(), f"the server samples with {changes}"
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        with self.lock:
            assert not self.old_cache, "a process samples before the weights are complete"
            choices = [self.choice(body, index) for index in range(body["n"])]
            self.served[-1] += len(choices)
            self.in_flight -= 1
        return {"choices": choices[::-1]}

    @torch.no_grad()
    def choice(self, body, index):
        prompt, temperature = body["prompt"], body["temperature"]
        generator = torch.Generator().manual_seed(self.drawn[tuple(prompt)])
        self.drawn[tuple(prompt)] += 1
        ids, logprobs = [], []
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            table = (self.model(torch.tensor([prompt + ids])).logits[0, -1] / (temperature or 1)).log_softmax(-1)
            ids.append(int(torch.multinomial(table.exp(), 1, generator=generator) if temperature else table.argmax()))
            logprobs.append(float(table[ids[-1]]))
        return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.respond(None)

    def do_POST(self):
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}"))

    def respond(self, body):
        status = 200
        try:
            if self.path.partition("?")[0] == self.server.fails:
                raise WeightSyncError("the worker has failed")
            found = self.server.answer(self.path, body)
        except (AssertionError, WeightSyncError) as error:
            status, found = 500, {"error": {"message": str(error)}}
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(model, **settings) -> Iterator[Server]:
    """A context in which a server of this model answers; the settings are those of `Server`."""
    with Server(model, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
