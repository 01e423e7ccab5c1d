"""DeltaSwitch: an engine with weights in tensors of its own has those of one of several deltas, bit for bit."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from samples import bits, clones
from test_weight_sync_destinations import Engine, equal, make_weights
from torch import Tensor

from sparse_opt import SparseDelta
from sparse_opt.errors import DeltaError, ForeignMessage
from sparse_opt.weight_sync import DeltaSwitch, Destination

Weights = dict[str, Tensor]


def changed(base: Weights, seed: int, share: float = 0.1, names: Iterable[str] | None = None, run: int = 1) -> Weights:
    """A copy in which a share of the aligned runs has other bits."""
    source, found = torch.Generator().manual_seed(seed), clones(base)
    for name in found if names is None else names:
        flat = bits(found[name])
        chosen = torch.rand(flat.numel() // run, generator=source) < share
        chosen[0] = True
        flat[: chosen.numel() * run] ^= 5 * chosen.repeat_interleave(run).to(flat.dtype)
    return found


def registered(
    base: Weights, trained: Mapping[str, Weights], places: dict[str, list[Destination]], tensors: Callable[[], Iterable]
) -> DeltaSwitch:
    found = DeltaSwitch(tensors)
    for name, weights in trained.items():
        found.register(name, SparseDelta.from_models(base, weights), base.items(), lambda _: places)
    return found


@pytest.mark.parametrize("run", [1, 8])  # two runs of 8 have 16 elements
def test_fused_padded_transposed_and_repeated_weights(run):
    base = make_weights("cpu")
    trained = {"a": changed(base, 1, run=run), "b": changed(base, 2, 0.3, ["q", "up", "down", "embed"], run)}
    engine = Engine(base)
    deltas = registered(base, trained, engine.destinations(), engine.tensors().values)
    assert equal(engine.tensors(), Engine(base).tensors())
    for name in ("a", "b", None, "b", "a", "a", None, None):
        written = deltas.switch(name)
        assert deltas.active == name
        assert equal(engine.tensors(), Engine(trained[name] if name else base).tensors())
    assert written == set()
    assert deltas.switch("b") == {"q", "up", "down", "embed"}
    deltas.switch("a")
    deltas.remove("b")
    with pytest.raises(DeltaError, match="there is no delta 'b'; expected one of a"):
        deltas.switch("b")
    with pytest.raises(DeltaError, match="delta 'a' is active: switch to another one before"):
        deltas.remove("a")


def test_slices_of_runs_have_no_index_for_each_element():
    """Two ranks with halves of the rows of one weight and of the columns of another; the second has no bias."""
    base = {"up": torch.randn(64, 256), "down": torch.randn(64, 256), "bias": torch.randn(64)}
    base = {name: w.bfloat16() for name, w in base.items()}
    trained = changed(base, 1, 0.1, ["up", "down"], run=64) | changed({"bias": base["bias"]}, 2)
    for rank in range(2):
        rows, columns = slice(32 * rank, 32 * rank + 32), slice(128 * rank, 128 * rank + 128)
        own = [base["up"][rows].clone(), base["down"][:, columns].clone(), base["bias"][None].clone()]
        places = {
            "up": [Destination(own[0], rows=(rows.start, rows.stop))],
            "down": [Destination(own[1], columns=(columns.start, columns.stop))],
            "bias": [Destination(own[2])] if rank == 0 else [],
        }
        deltas = registered(base, {"a": trained}, places, lambda own=own: own)
        deltas.switch("a")
        assert torch.equal(bits(own[0]), bits(trained["up"][rows].contiguous()))
        assert torch.equal(bits(own[1]), bits(trained["down"][:, columns].contiguous()))
        assert torch.equal(bits(own[2]), bits(trained["bias"] if rank == 0 else base["bias"]))
        before = (base["up"][rows], base["down"][:, columns], base["bias"])
        here = sum(int((w.view(-1) != b.reshape(-1)).sum()) for w, b in zip(own, before, strict=True))
        assert deltas.nbytes < 2.2 * here  # 2 bytes for the value of each element


def test_what_is_not_the_base_is_refused():
    base = make_weights("cpu")
    delta = SparseDelta.from_models(base, changed(base, 1))
    engine = Engine(base)
    places = engine.destinations()
    deltas = DeltaSwitch(engine.tensors().values)

    def refused(error: type[Exception], match: str, checkpoint: Weights, places: dict = places) -> None:
        with pytest.raises(error, match=match):
            deltas.register("a", delta, checkpoint.items(), lambda _: places)
        assert equal(engine.tensors(), Engine(base).tensors())

    refused(DeltaError, "k has the digest .* the delta is for another model", base | {"k": base["k"] + 1})
    refused(DeltaError, r"k of the engine's checkpoint is float32 \[16, 24\]", base | {"k": base["k"].float()})
    refused(DeltaError, "checkpoint has no tensor norm", {n: w for n, w in base.items() if n != "norm"})
    refused(ForeignMessage, "the mask has 'v'", base, {n: p for n, p in places.items() if n != "v"})
    engine.head[49, 3] += 1  # no element of it need be one that the delta changes
    with pytest.raises(DeltaError, match="embed of the engine has other bits than its checkpoint: switch to the base"):
        deltas.register("a", delta, base.items(), lambda _: places)
    with pytest.raises(DeltaError, match="there is no delta 'a': none is registered"):
        deltas.switch("a")


def test_weights_that_other_code_has_changed():
    """As `sleep(level=2)` and `reload_weights` of vLLM do, or a trainer. A switch that is refused writes nothing."""
    base = make_weights("cpu")
    trained = {"a": changed(base, 1), "b": changed(base, 2)}
    engine = Engine(base)
    places = engine.destinations()
    deltas = registered(base, trained, places, lambda: engine.tensors().values())
    deltas.switch("a")
    with pytest.raises(DeltaError, match="'c' cannot be registered while 'a' is active: switch to the base"):
        deltas.register("c", SparseDelta.from_models(base, trained["b"]), base.items(), lambda _: places)

    for name, tensor in engine.tensors().items():  # the weights are loaded again, in place
        tensor.copy_(Engine(base).tensors()[name])
    for name in ("b", "a", None):
        with pytest.raises(DeltaError, match="other code has changed weights that delta 'a' changes: load"):
            deltas.switch(name)
        assert equal(engine.tensors(), Engine(base).tensors())
    deltas.register("a", SparseDelta.from_models(base, trained["a"]), base.items(), lambda _: places)
    assert deltas.active is None
    for name in ("a", "b"):
        deltas.switch(name)
        assert equal(engine.tensors(), Engine(trained[name]).tensors())

    at = (bits(base["k"]) != bits(trained["a"]["k"])) & (bits(base["k"]) == bits(trained["b"]["k"]))
    bits(engine.qkv[32:48])[at] ^= 1  # of `a` alone: found when it is entered, after `b` was left
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    with pytest.raises(DeltaError, match="other code has changed weights that delta 'a' changes"):
        deltas.switch("a")
    assert deltas.active == "b" and equal(engine.tensors(), before)
    bits(engine.qkv[32:48])[at] ^= 1

    engine.down = engine.down.clone()
    with pytest.raises(DeltaError, match="the engine has replaced down since delta 'b' was registered: load"):
        deltas.switch(None)
