"""VLLMDeltas and a stand-in for a server. tests/vllm_engine/test_deltas.py has real engines, docs/sharing.md an LLM."""

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


class Server:
    """One worker with the fused weights [q; k]."""

    def __init__(self) -> None:
        self.qk = torch.cat([BASE["q"], BASE["k"]])
        self.deltas = DeltaSwitch(lambda: [self.qk])
        self.calls: list[str] = []

    def request(self, url: str, content: Any = None, *, method: str = "POST", timeout: float) -> dict:
        self.calls.append(url.removeprefix("http://engine/").partition("?reset")[0])
        if self.calls[-1] == "get_world_size":
            return {"world_size": 1}
        try:
            match content:
                case {"update_info": {"delta": {"register": name, "source": source}}}:
                    places = {"q": [Destination(self.qk[:8])], "k": [Destination(self.qk[8:])]}
                    self.deltas.register(name, SparseDelta.from_pretrained(source), BASE.items(), lambda _: places)
                case {"update_info": {"delta": {"switch": name}}}:
                    self.deltas.switch(name)
                case {"update_info": {"delta": {"remove": name}}}:
                    self.deltas.remove(name)
                case {"weight_version": str(version)}:
                    self.calls[-1] = version
        except Exception as error:
            raise WeightSyncError(f"{url} answered 500: {error}") from error
        return {"success": True}


def test_an_engine_has_the_weights_of_one_of_several_deltas(tmp_path, monkeypatch):
    server = Server()
    monkeypatch.setattr(connections, "request_json", server.request)
    monkeypatch.chdir(tmp_path)
    SparseDelta.from_models(BASE, trained(2)).save_pretrained("two")
    served = VLLMDeltas("http://engine", {"one": SparseDelta.from_models(BASE, trained(1)), "two": "two"})
    assert server.deltas.active is None
    for name, row in (("one", 1), ("two", 2), ("one", 1)):
        server.calls.clear()
        served.switch(name)
        assert torch.equal(server.qk, torch.cat([BASE["q"], trained(row)["k"]]))
        # Requests end first, and no later one finds keys and values of the other delta.
        session = ["start_weight_update", "update_weights", name]
        assert server.calls == ["pause?mode=wait&clear_cache=false", *session, "reset_prefix_cache", "resume"]
    with pytest.raises(WeightSyncError, match="there is no delta 'three'"):
        served.switch("three")
    assert server.calls[-1] == "resume" and torch.equal(server.qk[8:], trained(1)["k"])
    served.switch(None)
    assert "default" in server.calls and torch.equal(server.qk, torch.cat([BASE["q"], BASE["k"]]))
    served.remove("one")
    with pytest.raises(WeightSyncError, match="there is no delta 'one'"):
        served.switch("one")
    with pytest.raises(WeightSyncError, match="pause is 'keep', expected 'wait' or 'abort'"):
        VLLMDeltas("http://engine", pause="keep")
