"""Receivers have the sender's bits after every update: patterns, dtypes, encodings, sources, and tensors past 2**31."""

from dataclasses import replace

import pytest
import torch
from samples import DTYPES, bits, change, clones, make_weights, same_bits

from sparse_opt import MaskSet, SparseAdamW, backends
from sparse_opt.errors import BackendUnavailable, DamagedMessage, WeightSyncError
from sparse_opt.masks.patterns import PATTERNS, expand_units, matrix_shape, unit_grid
from sparse_opt.weight_sync import Destination, WeightReceiver, WeightSender
from sparse_opt.weight_sync.encoding import Layout, LayoutTensor, changed_tensors, checked_mask
from sparse_opt.weight_sync.index import choose
from sparse_opt.weight_sync.sender import ActiveValues

SHARES = (0.01, 0.9, 0.0, 0.3, 1.0)


def connected(weights, mask, **options):
    """A sender of the weights, a receiver that has the mask, and the receiver's weights."""
    copy = clones(weights)
    sender, receiver = WeightSender(weights, mask, **options), WeightReceiver(copy, backend=options.get("backend"))
    assert receiver.receive(sender.mask_message().to_bytes()) == 0
    return sender, receiver, copy


@pytest.mark.parametrize(
    ("pattern", "density"), [*((pattern, 0.3) for pattern in PATTERNS), ("element", 0.0), ("element", 1.0)]
)
def test_updates_equal_a_full_copy(place, pattern, density):
    device, backend = place
    weights = make_weights("mixed", device)
    mask = MaskSet.random(weights, density=density, pattern=pattern)
    sender, receiver, copy = connected(weights, mask, backend=backend)
    for version, share in enumerate(SHARES, start=1):
        change(weights, mask, share, seed=version)
        assert receiver.receive(sender.update().to_bytes()) == version
        assert same_bits(weights, copy)
        assert sender.version == receiver.version == version
    assert receiver.receive(sender.state_message().to_bytes()) == version
    assert same_bits(weights, copy)


@pytest.mark.parametrize("share", SHARES)
def test_the_tensors_that_an_update_changes_can_be_handed_on(share):
    weights = make_weights("mixed")
    mask = MaskSet.random(weights, density=0.3, pattern="run16")
    sender, copy = WeightSender(weights, mask), clones(weights)
    layout, _ = checked_mask(sender.mask_message())
    change(weights, mask, share, seed=1)
    update = sender.update().wait()
    for entry, numbers, values in changed_tensors(update, layout, torch.device("cpu")):
        copy[entry.name].view(-1)[mask[entry.name].long()[numbers]] = values
    assert same_bits(weights, copy)
    with pytest.raises(DamagedMessage, match="the values sent have digest"):
        changed_tensors(replace(update, payload_digest="0" * 15 + "1"), layout, torch.device("cpu"))


def test_a_bitmap_of_other_elements_is_not_handed_on():
    weights = {"a": torch.randn(100)}
    mask = MaskSet({"a": torch.arange(0, 70)}, {"a": (100,)})
    sender = WeightSender(weights, mask, encoding="bitmap")
    layout, _ = checked_mask(sender.mask_message())
    weights["a"][3] += 1
    update = sender.update().wait()
    for wrong, match in ((0, "marks 0 elements, expected 1"), (1 << 7, "marks element 71, the mask has 70")):
        bitmap = torch.zeros(16, dtype=torch.uint8)
        bitmap[8] = wrong
        damaged = replace(update, tensors=update.tensors | {"float32.bitmap": bitmap})
        with pytest.raises(DamagedMessage, match=match):
            changed_tensors(damaged, layout, torch.device("cpu"))


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes by dtype."""
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        found[name.partition(".")[0]] = found.get(name.partition(".")[0], 0) + tensor.nbytes
    return found


@pytest.mark.parametrize("dtypes", DTYPES)
def test_dtypes_and_encodings(dtypes):
    weights = make_weights(dtypes)
    mask = MaskSet.random(weights, density=0.1)
    pairs = {encoding: connected(weights, mask, encoding=encoding) for encoding in ("values", "bitmap", "auto")}
    for version, share in enumerate(SHARES, start=1):
        change(weights, mask, share, seed=version)
        messages = {encoding: sender.update().wait() for encoding, (sender, _, _) in pairs.items()}
        for encoding, (_, receiver, copy) in pairs.items():
            assert receiver.receive(messages[encoding]) == version
            assert same_bits(weights, copy)
        values, bitmap, auto = (sizes(message.tensors) for message in messages.values())
        assert {name.rpartition(".")[2] for name in messages["values"].tensors} == {"values"}
        assert {name.rpartition(".")[2] for name in messages["bitmap"].tensors} <= {"bitmap", "changed"}
        assert auto == {dtype: min(values[dtype], size) for dtype, size in bitmap.items()}


def test_scattered_elements_of_large_tensors(place):
    """Consecutive active elements are more than 2**16 apart; rows are longer than that."""
    device, backend = place
    shapes = {"long": (3, 300_001), "vector": (500_000,), "narrow": (400_000, 1)}
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    mask = MaskSet.random(weights, density=2e-5, seed=1)
    sender, receiver, copy = connected(weights, mask, backend=backend)
    for version, share in enumerate((1.0, 0.1), start=1):
        change(weights, mask, share, seed=version)
        receiver.receive(sender.update().wait())
        assert same_bits(weights, copy)


@pytest.mark.parametrize("pattern", ["run32", "tile64"])
def test_more_elements_than_the_reference_expands_at_once(pattern):
    """1.2 million active elements of a tensor; the reference computes the positions of about a million at a time."""
    weights = {"w": torch.zeros(1200, 2000, dtype=torch.bfloat16)}
    mask = MaskSet.random(weights, density=0.5, pattern=pattern)
    sender, receiver, copy = connected(weights, mask)
    change(weights, mask, 0.3, seed=1)
    assert receiver.receive(sender.update()) == 1
    assert same_bits(weights, copy)


def test_no_element_outside_of_the_mask_is_written(place):
    device, backend = place
    weights = make_weights("bf16", device)
    mask = MaskSet.random(weights, density=0.2)
    sender = WeightSender(weights, mask, backend=backend)
    other = {name: torch.full_like(w, torch.nan) for name, w in weights.items()}
    receiver = WeightReceiver(other, backend=backend)
    assert receiver.receive(sender.mask_message()) is None
    assert receiver.receive(sender.state_message()) == 0
    for name, w in weights.items():
        active = mask.bool(name).to(device)
        assert torch.equal(bits(other[name])[active.view(-1)], bits(w)[active.view(-1)])
        assert other[name][~active].isnan().all()


def test_an_optimizer_is_a_source():
    model = torch.nn.Linear(20, 30, dtype=torch.float32)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.2), lr=0.1)
    copy = clones(dict(model.named_parameters()))
    sender, receiver = WeightSender(optimizer), WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    for _ in range(3):
        model(torch.randn(5, 20)).square().sum().backward()
        optimizer.step()
        receiver.receive(sender.update().wait())
        assert same_bits(dict(model.named_parameters()), copy)
    with optimizer.base_weights(), pytest.raises(WeightSyncError, match="base weights"):
        sender.update()
    optimizer.set_mask(MaskSet.random(model, density=0.2, seed=1))
    with pytest.raises(WeightSyncError, match="mask was replaced"):
        sender.update()


@pytest.mark.parametrize("source", ["module", "parameters", "state dict"])
def test_base_weights_are_not_sent(source):
    """Also by a sender that does not know the optimizer; and it goes on afterwards."""
    model = torch.nn.Linear(20, 30)
    mask = MaskSet.random(model, density=0.2)
    sources = {"module": model, "parameters": dict(model.named_parameters()), "state dict": model.state_dict()}
    optimizer = SparseAdamW(model, mask, lr=0.1)
    sender = WeightSender(sources[source], mask)
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    with optimizer.base_weights():
        with pytest.raises(WeightSyncError, match="the model holds its base weights: leave base_weights"):
            sender.update()
        with pytest.raises(WeightSyncError, match="the model holds its base weights"):
            WeightSender(sources[source], mask)
    assert sender.version == 0
    assert sum(v.numel() for k, v in sender.update().wait().tensors.items() if k.endswith("values")) == mask.nnz


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_sender_reads_compact_weights_instead_of_the_model(place, masters, pattern, monkeypatch):
    """Layers 0 to 11, so that the order of the layout, by name, is not that of the optimizer; and two dtypes."""
    device, backend = place
    layers = [torch.nn.Linear(96, 80, dtype=torch.bfloat16 if i % 3 else torch.float32) for i in range(12)]
    model = torch.nn.ModuleList(layers).to(device)
    mask = MaskSet.random(model, density=0.3, pattern=pattern)
    optimizer = SparseAdamW(model, mask, lr=0.1, compact_weights=True, master_weights=masters)
    copy = clones(dict(model.named_parameters()))
    sender, receiver = WeightSender(optimizer, backend=backend), WeightReceiver(copy, backend=backend)
    receiver.receive(sender.mask_message())

    def read(*args: object) -> None:
        raise AssertionError("the sender has read the model")

    monkeypatch.setattr(type(sender._values), "_weights", read)
    for i in range(3):
        for layer in layers:
            x = torch.randn(5, 96, dtype=layer.weight.dtype, device=device)
            layer(x).square().sum().backward()
        optimizer.step()
        if i == 1 and not masters:  # a write by others; masters would undo it
            with torch.no_grad():
                layers[4].weight.mul_(2)
        messages = [sender.update().wait(), sender.state_message()]
        receiver.receive(messages[i == 2])
        active = {name: mask.bool(name).to(device) for name in mask.names}
        for name, parameter in model.named_parameters():
            assert torch.equal(bits(copy[name][active[name]]), bits(parameter.detach()[active[name]]))
    with optimizer.base_weights(), pytest.raises(WeightSyncError, match="base weights"):
        sender.update()


def test_a_sender_follows_weights_that_have_moved():
    model = torch.nn.Linear(20, 30, dtype=torch.bfloat16)
    mask = MaskSet.random(model, density=0.2)
    sender = WeightSender(model, mask)
    copy = clones(dict(model.named_parameters()))
    receiver = WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    with torch.no_grad():
        model.weight = torch.nn.Parameter(model.weight * 2)
    model.bias.data = torch.randn(30, dtype=torch.bfloat16)
    change(dict(model.named_parameters()), mask, 1.0, seed=1)
    receiver.receive(sender.update().wait())
    for name, parameter in model.named_parameters():
        active = mask.bool(name)
        assert torch.equal(bits(copy[name][active]), bits(parameter[active]))


def test_a_module_with_tied_weights_receives():
    tied = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)).bfloat16()
    tied[1].weight = tied[0].weight
    sender = WeightSender(tied, MaskSet.random(tied, density=0.3))
    state = clones(dict(tied.named_parameters(remove_duplicate=False)))
    receiver = WeightReceiver(state)
    receiver.receive(sender.mask_message())
    assert sender.mask.names == ("0.weight",)
    change({"0.weight": tied[0].weight}, sender.mask, 0.5, seed=1)
    receiver.receive(sender.update().wait())
    assert torch.equal(bits(state["0.weight"]), bits(tied[0].weight))


def test_messages_are_not_overwritten_by_later_updates():
    weights = make_weights("mixed")
    mask = MaskSet.random(weights, density=0.3)
    sender, receiver, copy = connected(weights, mask)
    pending = []
    for seed, share in enumerate((1.0, 0.1, 0.0, 0.9)):
        change(weights, mask, share, seed)
        pending.append(sender.update())
    for update in reversed(pending):
        assert update.wait() is update.wait()
    assert [receiver.receive(update.wait()) for update in pending] == [1, 2, 3, 4]
    assert same_bits(weights, copy)


# Bytes per active element that an index may hold, by pattern. The reference has an int32 for each element, run or tile.
MOST_BYTES = {
    "reference": {"element": 4.0, "run16": 0.25, "tile64": 0.001, "tile128": 0.001},
    "triton": {"element": 2.1, "run16": 0.2, "tile64": 0.01, "tile128": 0.01},
}


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64", "tile128"])
def test_memory_held_per_active_element(place, pattern):
    """For a matrix of a language model; at most 3 bytes on a GPU, and 0.01 for tiles, are promised."""
    device, backend = place
    weights = {"w": torch.zeros(1024, 4096, dtype=torch.bfloat16, device=device)}
    mask = MaskSet.random(weights, density=0.025, pattern=pattern)
    sender, receiver = WeightSender(weights, mask, backend="reference"), WeightReceiver(weights, backend=backend)
    receiver.receive(sender.mask_message())
    assert 0 < sum(receiver.nbytes().values()) <= MOST_BYTES[backend][pattern] * mask.nnz


def test_unknown_arguments():
    weights = make_weights()
    mask = MaskSet.random(weights, density=0.1)
    with pytest.raises(ValueError, match="encoding is 'delta'"):
        WeightSender(weights, mask, encoding="delta")
    with pytest.raises(ValueError, match="'z' is float64|'a' is float64"):
        WeightSender({name: w.double() for name, w in weights.items()}, mask)
    if backends.why_unavailable("triton", "cpu"):
        with pytest.raises(BackendUnavailable, match="backend 'triton'"):
            WeightSender(weights, mask, backend="triton")


@pytest.mark.parametrize("loaded_in", [torch.no_grad, torch.inference_mode])
def test_weights_of_an_engine_that_infers_or_trains(loaded_in):
    """Weights loaded in inference mode can be written, and those of a training model can be trained afterwards."""
    with loaded_in():
        model = torch.nn.Linear(8, 8)
    mask = MaskSet.random({name: p.shape for name, p in model.named_parameters()}, density=0.5)
    weights = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    sender, receiver = WeightSender(weights, mask), WeightReceiver(model)
    receiver.receive(sender.mask_message())
    assert receiver.receive(sender.state_message()) == 0
    for share in (0.1, 1.0):
        change(weights, mask, share, seed=1)
        receiver.receive(sender.update().wait())
    for name, p in model.named_parameters():
        assert torch.equal(bits(p)[mask[name].long()], bits(weights[name])[mask[name].long()])
    if loaded_in is torch.no_grad:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(8)).sum().backward()
        before = model.bias.detach().clone()
        optimizer.step()
        assert torch.equal(model.bias, before - 1)


@pytest.mark.parametrize("compact", [False, True])
def test_weights_are_sent_in_another_dtype(compact):
    """Of two dtypes, which are one group in the messages; a change that bf16 cannot hold is not sent."""
    torch.manual_seed(0)  # of a weight in some thousands the change crosses a midpoint
    layers = [torch.nn.Linear(20, 30), torch.nn.Linear(20, 30).bfloat16(), torch.nn.Linear(20, 30)]
    model = torch.nn.ModuleList(layers)
    mask = MaskSet.random(model, density=0.3)
    source = SparseAdamW(model, mask, lr=0.1, compact_weights=True) if compact else model
    sender = WeightSender(source, None if compact else mask, dtype=torch.bfloat16)
    copy = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    receiver = WeightReceiver(copy)
    assert receiver.receive(sender.mask_message()) == 0
    for layer in layers:
        layer(torch.ones(1, 20, dtype=layer.weight.dtype)).sum().backward()
    if isinstance(source, SparseAdamW):
        source.step()
    else:
        with torch.no_grad():
            layers[0].weight.mul_(1 + 2**-20)
            layers[2].bias.add_(1.0)
    message = sender.update().wait()
    assert compact or message.n_values == mask["2.bias"].numel()
    receiver.receive(message)
    for name, p in model.named_parameters():
        active = mask.bool(name)
        assert torch.equal(bits(copy[name][active]), bits(p.detach().bfloat16()[active]))


class NumberedValues(ActiveValues):
    """The active values of a weight that no process holds: 0, 1, 2, ... plus `base`, in fp32."""

    def __init__(self, mask: MaskSet, device: str) -> None:
        self.mask, self.base = mask, 0
        tensors = tuple(LayoutTensor(n, mask.shapes[n], "float32", t.numel()) for n, t in mask.indices.items())
        self.layout = Layout(mask.pattern, tensors)
        self.device = torch.device(device)
        self.backend = choose(self.device, "reference")

    def take(self) -> dict[str, torch.Tensor]:
        return {"float32": torch.arange(self.mask.nnz, dtype=torch.float32, device=self.device) + self.base}


@pytest.mark.parametrize("shape", [(2**20 + 70, 2**16 + 48), (2**32 + 50,), (3, 2**31 + 70_000)], ids=str)
@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
def test_slices_of_a_large_tensor(place, pattern, shape):
    """The receiver has a transposed slice at the end of the last rows, and one at the beginning."""
    device, backend = place
    rows, columns = matrix_shape(shape)
    down, across = unit_grid(shape, pattern)
    corner = [r * across + c for r in (0, down - 2, down - 1) for c in (0, 1, across - 2, across - 1)]
    units = torch.tensor(sorted({u for u in corner if u >= 0}))
    positions = expand_units(units, shape, pattern)
    mask = MaskSet({"w": positions}, {"w": shape}, pattern=pattern)
    values = NumberedValues(mask, device)
    sender = WeightSender(values)
    last, right = (max(rows - 200, 0), rows), (columns - 130, columns)
    end = torch.zeros(130, last[1] - last[0], device=device).t()
    top, left = (0, min(rows, 3)), (0, 100)
    begin = torch.zeros(top[1], 100, device=device)
    receiver = WeightReceiver(
        None, destinations={"w": [Destination(end, last, right), Destination(begin, top, left)]}, backend=backend
    )
    receiver.receive(sender.mask_message())
    receiver.receive(sender.state_message())
    check(positions, columns, 0, (end, last, right), (begin, top, left))
    values.base = 1000
    receiver.receive(sender.update().wait())
    check(positions, columns, 1000, (end, last, right), (begin, top, left))


def check(positions, columns, base, *slices):
    row, column = positions // columns, positions % columns
    found = 0
    for tensor, (r0, r1), (c0, c1) in slices:
        inside = (row >= r0) & (row < r1) & (column >= c0) & (column < c1)
        expected = torch.zeros(tensor.shape)
        expected[row[inside] - r0, column[inside] - c0] = inside.nonzero().view(-1).float() + base
        assert torch.equal(tensor.cpu(), expected)
        found += int(inside.sum())
    assert found


def test_a_whole_tensor(place):
    """Elements on both sides of 2**31 are read and written where torch's indexing finds them."""
    device, backend = place
    numel = 2**31 + 70_000
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB free on the CUDA device")
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)  # on the CPU its pages are not touched
    positions = torch.tensor([0, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, numel - 65_600, numel - 1])
    at = positions.to(device)
    weight[at] = torch.arange(8, dtype=torch.bfloat16, device=device)
    sender = WeightSender({"w": weight}, MaskSet({"w": positions}, {"w": (numel,)}), backend=backend)
    assert sender.state_message().tensors["bfloat16.values"].tolist() == list(range(8))
    receiver = WeightReceiver({"w": weight}, backend=backend)
    assert receiver.receive(sender.mask_message()) == 0
    weight[at[::3]] += 100
    update = sender.update().wait()
    weight[at[::3]] -= 100
    assert receiver.receive(update) == 1
    assert weight[at].tolist() == [100, 1, 2, 103, 4, 5, 106, 7]
