"""VLLMDeltas against a stand-in for an `LLM` and a server; tests/vllm_engine/test_deltas.py has the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_opt import SparseDelta
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import VLLMDeltas, connections
from sparse_opt.weight_sync import DeltaSwitch, Destination

BASE = {name: torch.arange(start, start + 64.0).view(8, 8) for name, start in (("q", 0), ("k", 64))}


def trained(row: int) -> dict[str, torch.Tensor]:
    found = {name: weight.clone() for name, weight in BASE.items()}
    found["k"][row] += 1
    return found


class Engine:
    """One worker with the fused weights [q; k], called as an `LLM` or by the routes of a server."""

    class llm_engine:
        class vllm_config:
            class parallel_config:
                world_size_across_dp = 1

    def __init__(self) -> None:
        self.qk = torch.cat([BASE["q"], BASE["k"]])
        self.deltas = DeltaSwitch(lambda: [self.qk])
        self.calls: list[Any] = []

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, content: dict) -> None:
        match content["update_info"]:
            case {"delta": {"register": name, "source": source}}:
                places = {"q": [Destination(self.qk[:8])], "k": [Destination(self.qk[8:])]}
                self.deltas.register(name, SparseDelta.from_pretrained(source), BASE.items(), lambda _: places)
            case {"delta": {"switch": name}}:
                self.deltas.switch(name)
            case {"delta": {"remove": name}}:
                self.deltas.remove(name)

    def finish_weight_update(self, version: str | None) -> None:
        self.calls.append(version)

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.calls.append("reset")
        return True

    def request(self, url: str, content: Any = None, *, method: str = "POST", timeout: float) -> dict:
        route = url.removeprefix("http://engine/")
        try:
            match route:
                case "update_weights":
                    self.update_weights(content)
                case "start_weight_update":
                    self.start_weight_update()
                case "finish_weight_update":
                    self.finish_weight_update(content["weight_version"])
                case "get_world_size":
                    return {"world_size": 1}
                case _:
                    self.calls.append(route.partition("?reset")[0])
        except Exception as error:
            raise WeightSyncError(f"{url} answered 500: {error}") from error
        return {"success": True}


@pytest.fixture(params=["LLM", "server"])
def engine(request, monkeypatch) -> tuple[Engine, Any]:
    made = Engine()
    monkeypatch.setattr(connections, "request_json", made.request)
    return made, made if request.param == "LLM" else "http://engine"


def test_an_engine_has_the_weights_of_one_of_several_deltas(engine, tmp_path, monkeypatch):
    made, address = engine
    monkeypatch.chdir(tmp_path)
    SparseDelta.from_models(BASE, trained(2)).save_pretrained("two")
    served = VLLMDeltas(address, {"one": SparseDelta.from_models(BASE, trained(1)), "two": "two"})
    assert made.deltas.active is None
    for name, row in (("one", 1), ("two", 2), ("one", 1)):
        made.calls.clear()
        served.switch(name)
        assert torch.equal(made.qk, torch.cat([BASE["q"], trained(row)["k"]]))
        # A server's requests end first, and no request finds keys and values of the other delta.
        local = ["start", name, "reset"]
        remote = ["pause?mode=wait", "start", name, "reset_prefix_cache", "resume"]
        assert made.calls == (local if address is made else remote)
    with pytest.raises(WeightSyncError, match="there is no delta 'three'"):
        served.switch("three")
    assert torch.equal(made.qk[8:], trained(1)["k"])
    served.switch(None)
    assert torch.equal(made.qk, torch.cat([BASE["q"], BASE["k"]]))
    assert "default" in made.calls
    served.remove("one")
    with pytest.raises(WeightSyncError, match="there is no delta 'one'"):
        served.switch("one")


def test_requests_do_not_go_on_with_another_delta():
    with pytest.raises(WeightSyncError, match="pause is 'keep', expected 'wait' or 'abort'"):
        VLLMDeltas("http://engine", pause="keep")
