"""VLLMWeightSync against stand-ins for vLLM's server and `LLM`; tests/vllm_engine has the real ones."""

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import VLLMChannelSync, VLLMWeightSync, connections
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupSender, open_receiver

SHAPE = (40, 30)
RESET = "reset_prefix_cache?reset_running_requests=true&reset_external=true"


class Worker:
    """What vLLM's worker and engine do with the calls: the session, the weight version and the receiver's errors."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.workers = 1
        self.agreed = 0  # workers that say together that they have refused an update
        self.fails: str | None = None  # the route that answers with an error
        self.ends_in = ""  # the route in which the server is killed
        self.hangs = False  # does not answer for a second
        self.restart()

    def restart(self) -> None:
        self.receiver = WeightReceiver(self.weights)
        self.version, self.active, self.calls, self.kinds = "default", False, [], []

    def start_weight_update(self) -> None:
        assert not self.active
        self.active = True

    def update_weights(self, content: dict) -> None:
        assert self.active
        message = content["update_info"]["message"]
        try:
            self.receiver.receive(base64.b64decode(message) if isinstance(message, str) else message)
        except WeightSyncError as error:
            self.active = False
            if self.agreed:
                raise WeightSyncError(f"{error}; {connections.kept_by_all(self.agreed)}") from error
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.version = self.version if weight_version is None else weight_version


class LLM(Worker):
    class llm_engine:
        class vllm_config:
            class parallel_config:
                world_size_across_dp = 1

    def get_weight_version(self) -> str:
        return self.version

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append(f"reset_prefix_cache {reset_running_requests} {reset_connector}")
        return True


class Server(Worker):
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/get_world_size":
                    self.answer(200, {"world_size": worker.workers})
                    return
                assert self.path == "/weight_info"
                self.answer(200, {"weight_version": worker.version})

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
                worker.calls.append(self.path.strip("/"))
                if worker.fails is not None and self.path.startswith(worker.fails):
                    self.answer(500, {"error": {"message": "out of order"}})
                    return
                if worker.ends_in == self.path:
                    worker.ends_in = ""
                    worker.http.socket.close()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if worker.hangs:
                    time.sleep(1.0)
                    return
                try:
                    if self.path == "/update_weights":
                        worker.update_weights(content)
                    elif self.path == "/start_weight_update":
                        worker.start_weight_update()
                    elif self.path == "/finish_weight_update":
                        worker.finish_weight_update(content["weight_version"])
                except (WeightSyncError, RuntimeError) as error:
                    self.answer(500, {"error": {"message": f"Call to collective_rpc failed:\n{error}", "code": 500}})
                else:
                    self.answer(200, {"success": True})

            def answer(self, status: int, content: dict) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1200.0).view(SHAPE)}


@pytest.fixture
def sender(weights) -> WeightSender:
    return WeightSender(weights, MaskSet.random(weights, density=0.2, seed=0))


@pytest.fixture
def servers(weights) -> Iterator[Callable[[int], list[Server]]]:
    made: list[Server] = []

    def make(count: int) -> list[Server]:
        made.extend(Server(weights) for _ in range(count))
        return made

    yield make
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def step(weights: dict[str, torch.Tensor], sender: WeightSender) -> None:
    weights["w"].view(-1)[sender.mask["w"][::3].long()] += 1


def test_the_calls_of_a_server(weights, sender, servers):
    (server,) = servers(1)
    sync = VLLMWeightSync(sender, server.address + "/")
    assert sync.connect() == 0 and server.version == "0"
    session = ["start_weight_update", "update_weights", "finish_weight_update"]
    around = ["pause?mode=keep&clear_cache=false", *session, RESET, "resume"]
    assert server.calls == [*around[:2], "update_weights", *around[2:]]  # mask and state
    server.calls.clear()
    step(weights, sender)
    assert sync.update() == 1 and server.version == "1"
    assert server.calls == around
    assert torch.equal(server.weights["w"], weights["w"])
    server.calls.clear()
    assert VLLMWeightSync(sender, server.address, pause=None).update() == 2
    assert server.calls == around[1:-1]


def test_several_engines_and_a_restarted_one(weights, sender, servers):
    first, second = servers(2)
    llm = LLM(weights)
    engines = (first, second, llm)
    sync = VLLMWeightSync(sender, [first.address, second.address, llm])
    sync.connect()
    step(weights, sender)
    sync.update()
    second.restart()
    step(weights, sender)
    assert sync.update() == 2
    assert second.calls.count("update_weights") == 2 and first.calls.count("update_weights") == 4
    for engine in engines:
        assert engine.version == "2" and torch.equal(engine.weights["w"], weights["w"])
    assert llm.calls == ["reset_prefix_cache True True"] * 3


def test_a_refused_update_is_an_error_and_the_next_one_repairs_it(weights, sender, servers, monkeypatch):
    first, second = servers(2)
    sync = VLLMWeightSync(sender, [first.address, second.address])
    sync.connect()
    before = second.weights["w"].clone()
    step(weights, sender)
    second.receiver = WeightReceiver(second.weights)  # has lost its mask, and its engine reports the version before
    with pytest.raises(WeightSyncError, match=rf"{second.address}/update_weights answered 500: .* failed: version 1"):
        sync.update()
    assert second.calls[-3:] == ["update_weights", RESET, "resume"]  # the worker has left the session: no "finish"
    assert not second.active and second.version == "0"
    assert torch.equal(second.weights["w"], before)
    assert first.version == "1" and torch.equal(first.weights["w"], weights["w"])
    step(weights, sender)
    assert sync.update() == 2
    assert first.version == second.version == "2"
    assert torch.equal(first.weights["w"], weights["w"]) and torch.equal(second.weights["w"], weights["w"])


def test_a_server_that_does_not_answer_is_one_line(sender):
    with pytest.raises(
        WeightSyncError, match=r"http://127.0.0.1:9/pause\?mode=keep&clear_cache=false cannot be reached: "
    ) as caught:
        VLLMWeightSync(sender, "http://127.0.0.1:9", timeout=5).connect()
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightSyncError, match="'localhost:8000', expected http://host:port"):
        VLLMWeightSync(sender, "localhost:8000")


def test_a_server_whose_workers_may_differ_stays_paused(weights, sender, servers):
    (server,) = servers(1)
    server.workers = 2
    sync = VLLMWeightSync(sender, server.address)
    sync.connect()
    step(weights, sender)
    server.receiver = WeightReceiver(server.weights)  # one worker has lost its mask
    server.calls.clear()
    with pytest.raises(WeightSyncError, match="the weights of its 2 workers may differ, and it is paused until"):
        sync.update()
    assert server.calls[-2:] == ["finish_weight_update", RESET] and "resume" not in server.calls
    server.fails = "/start_weight_update"
    with pytest.raises(WeightSyncError, match="start_weight_update answered 500"):
        sync.update()
    assert "resume" not in server.calls
    server.fails = None
    server.calls.clear()
    assert sync.update() == 3
    assert server.calls.count("update_weights") == 2 and server.calls[-1] == "resume"  # mask and state
    assert torch.equal(server.weights["w"], weights["w"])


@pytest.mark.parametrize(("workers", "resumes"), [(2, True), (4, False)], ids=["all", "one replica of two"])
def test_a_server_whose_workers_have_all_refused_is_resumed(weights, sender, servers, workers, resumes):
    (server,) = servers(1)
    server.workers, server.agreed = workers, 2
    sync = VLLMWeightSync(sender, server.address)
    sync.connect()
    step(weights, sender)
    server.receiver = WeightReceiver(server.weights)
    with pytest.raises(WeightSyncError, match="all 2 workers have kept their weights") as refusal:
        sync.update()
    assert ("may differ" in str(refusal.value)) != resumes
    assert (server.calls[-1] == "resume") == resumes
    assert sync.update() == 2
    assert server.calls[-1] == "resume" and torch.equal(server.weights["w"], weights["w"])


def test_a_server_without_pauses_is_paused_if_its_workers_may_differ(weights, sender, servers):
    (server,) = servers(1)
    server.workers = 2
    sync = VLLMWeightSync(sender, server.address, pause=None)
    sync.connect()
    server.receiver = WeightReceiver(server.weights)
    with pytest.raises(WeightSyncError, match="it is paused until an update has succeeded"):
        sync.update()
    assert server.calls[-1] == "pause?mode=keep&clear_cache=false"
    sync.update()
    assert server.calls[-1] == "resume"


def test_a_server_that_is_killed_during_an_update_is_named_once(weights, sender, servers):
    lost, other = servers(2)
    sync = VLLMWeightSync(sender, [lost.address, other.address])
    sync.connect()
    lost.ends_in = "/update_weights"
    step(weights, sender)
    ended = f"{lost.address}/update_weights has ended during the request: Remote end closed connection without response"
    with pytest.raises(WeightSyncError, match=f"^{ended}$"):
        sync.update()
    assert other.version == "1" and torch.equal(other.weights["w"], weights["w"])


def test_a_server_that_hangs_is_not_waited_for_again_as_long(weights, sender, servers, monkeypatch):
    monkeypatch.setattr(connections, "_PATIENCE", 0.05)
    (server,) = servers(1)
    sync = VLLMWeightSync(sender, server.address, timeout=0.5)
    sync.connect()
    server.hangs = True
    step(weights, sender)
    begin = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=rf"^{server.address}/pause\?mode=keep&clear_cache=false has not answered within 0.5 s$"
    ):
        sync.update()
    assert time.monotonic() - begin < 0.9
    server.hangs = False
    time.sleep(1.0)  # the requests of before have ended
    assert sync.update() == 2 and torch.equal(server.weights["w"], weights["w"])


@pytest.mark.parametrize("route", ["/pause", "/reset_prefix_cache"])
def test_a_failure_is_followed_by_resume(sender, servers, route):
    (server,) = servers(1)
    server.fails = route
    with pytest.raises(WeightSyncError, match=f"{route}.* answered 500: out of order$"):
        VLLMWeightSync(sender, server.address).connect()
    assert server.calls[-1] == "resume"


def test_a_failing_resume_does_not_hide_the_first_error(sender, servers):
    (server,) = servers(1)
    sync = VLLMWeightSync(sender, server.address)
    sync.connect()
    server.receiver, server.fails = WeightReceiver(server.weights), "/resume"
    with pytest.raises(WeightSyncError, match="update_weights answered 500: .*; then .*/resume answered 500"):
        sync.update()


class ChannelLLM(LLM):
    """An `LLM` whose worker receives by a transport.

    `start_weight_update` fails if `is_broken`, and all calls if `is_dead`.
    """

    is_broken = is_dead = False

    def get_weight_version(self) -> str:
        if self.is_dead:
            raise RuntimeError("the engine core is dead")
        return super().get_weight_version()

    def init_weight_transfer_engine(self, content: dict) -> None:
        if self.is_dead:
            raise RuntimeError("the engine core is dead")
        info = content["init_info"]
        if info["transport"] == "bytes":
            self.channel.close()
            return
        self.channel = open_receiver(info["transport"], self.receiver, info["address"], timeout=info["timeout"])

    def start_weight_update(self) -> None:
        if self.is_broken:
            raise RuntimeError("the engine core died")
        super().start_weight_update()

    def update_weights(self, content: dict) -> None:
        assert self.active
        self.channel.receive(5)


def test_the_engines_error_is_in_that_of_the_channel(weights, sender):
    llm = ChannelLLM(weights)
    with closing(ProcessGroupSender(sender, "127.0.0.1:0", timeout=1.0)) as channel:
        sync = VLLMChannelSync(channel, llm)
        assert sync.connect() == 0
        step(weights, sender)
        assert sync.update() == 1 and llm.version == "1" and torch.equal(llm.weights["w"], weights["w"])
        llm.is_broken = True
        expected = "has not replied within 1 s; start_weight_update of the vLLM engine failed: the engine core died"
        with pytest.raises(WeightSyncError, match=expected):
            sync.update()


def test_the_workers_of_an_idle_engine_leave_a_channel_that_is_closed(weights, sender):
    channel = ProcessGroupSender(sender, "127.0.0.1:0", timeout=60.0)
    llm = ChannelLLM(weights)
    VLLMChannelSync(channel, llm).connect()
    begin = time.monotonic()
    channel.close()
    assert time.monotonic() - begin < 5


def test_a_dead_engine_does_not_keep_the_others_from_the_update(weights, sender):
    dead, alive = ChannelLLM(weights), ChannelLLM(weights)
    with closing(ProcessGroupSender(sender, "127.0.0.1:0", timeout=1.0)) as channel:
        sync = VLLMChannelSync(channel, [dead, alive])
        dead.is_dead = True
        with pytest.raises(WeightSyncError, match="init_weight_transfer_engine of .* failed: the engine core is dead$"):
            sync.connect()
        assert alive.version == "0"
        dead.is_dead = False
        step(weights, sender)
        assert sync.update() == 1 and dead.version == alive.version == "1"
        dead.is_dead = True
        step(weights, sender)
        with pytest.raises(WeightSyncError, match="get_weight_version of .* the engine core is dead"):
            sync.update()
        assert alive.version == "2" and torch.equal(alive.weights["w"], weights["w"])
        dead.restart()
        dead.is_dead = False
        step(weights, sender)
        assert sync.update() == 3
        for llm in (dead, alive):
            assert llm.version == "3" and torch.equal(llm.weights["w"], weights["w"])


def test_updates_are_sent_while_training_goes_on(weights, sender, servers):
    (server,) = servers(1)
    llm = ChannelLLM(weights)
    other = WeightSender(weights, sender.mask)
    with closing(ProcessGroupSender(other, "127.0.0.1:0", timeout=1.0)) as channel:
        clients = [VLLMWeightSync(sender, server.address), VLLMChannelSync(channel, llm)]
        for engine, sync in zip((server, llm), clients, strict=True):
            sync.connect()
            step(weights, sender)
            sent = weights["w"].clone()
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(sync.send, sync.weights.update())
                step(weights, sender)
                sending.result(60)
            assert sync.weights.version == 1
            assert engine.version == "1" and torch.equal(engine.weights["w"], sent)
        server.fails, llm.is_broken = "/start_weight_update", True
        for sync in clients:
            with ThreadPoolExecutor(1) as pool, pytest.raises(WeightSyncError, match="start_weight_update"):
                pool.submit(sync.send, sync.weights.update()).result(60)


def test_a_round_starts_after_the_requests_of_all_engines_have_ended(weights, sender):
    class Slow(ChannelLLM):
        def start_weight_update(self) -> None:
            time.sleep(2.0)  # twice the channel's timeout
            super().start_weight_update()

    llms = [ChannelLLM(weights), Slow(weights)]
    with closing(ProcessGroupSender(sender, "127.0.0.1:0", timeout=1.0)) as channel:
        sync = VLLMChannelSync(channel, llms)
        sync.connect()
        step(weights, sender)
        assert sync.update() == 1
        assert all(llm.version == "1" and torch.equal(llm.weights["w"], weights["w"]) for llm in llms)
