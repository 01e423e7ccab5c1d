"""Deltas over quantised bases: made by training, applied, removed, switched, and refused."""

import json

import pytest
import quantised_models
import torch
import xxhash
from quantised_models import batch

from sparse_opt import DeltaSet, MaskSet, SparseAdamW, SparseDelta
from sparse_opt.cli.main import main
from sparse_opt.errors import DeltaError
from sparse_opt.optim import save_merged

PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def load(tmp_path, tiny_llama, device):
    tiny_llama(dtype=torch.bfloat16, hidden_size=128, intermediate_size=200).save_pretrained(tmp_path / "model")

    def make(base="nf4", folder="model", config=None):
        return quantised_models.load(tmp_path / folder, base, device, config)

    return make


def trained(model, device, pattern="element", seed=1):
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.2, pattern=pattern, seed=seed), lr=1e-2)
    for step in range(3):
        model(input_ids=(ids := batch(device, step)), labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def documented_digest(entries):
    """As in docs/formats.md, of a layer's tensors in a state dict, of less than 64 KB each."""
    lines = []
    for key, tensor in entries.items():
        name, tensor = key.removeprefix(PROJECTION[:-6]), tensor.cpu().contiguous()
        digest = xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(tensor.view(-1).view(torch.uint8).numpy().tobytes()))
        if name != "weight_format":  # of 8 bits: says how the file stores the weight
            lines.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest])
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in sorted(lines))
    return xxhash.xxh3_128_hexdigest(text.encode())


@torch.no_grad()
def logits(model, device, seed=9):
    return model(input_ids=batch(device, seed)).logits


@pytest.mark.parametrize(
    ("base", "pattern"),
    [
        ("nf4", "tile64"),
        ("nf4_double", "element"),
        ("fp4", "run16"),
        ("int8", "tile64"),
        ("torchao_int8", "element"),
        ("torchao_fp8", "tile64"),
        ("torchao_int4", "element"),
        ("fp8", "run16"),
    ],
)
def test_a_delta_gives_a_quantised_base_the_outputs_of_the_trained_model(load, device, tmp_path, base, pattern):
    tuned = load(base)
    optimizer = trained(tuned, device, pattern)
    expected = logits(tuned, device)
    optimizer.delta().save_pretrained(tmp_path / "delta")
    save_merged(tuned, tmp_path / "merged")
    delta = SparseDelta.from_pretrained(tmp_path / "delta")
    assert delta.changed == optimizer.delta().changed <= optimizer.mask.nnz
    assert len(delta.quantised_digests) == 14 and any(delta.counts[name] for name in delta.quantised_digests)
    entries = {key: t for key, t in quantised_models.stored(load(base)).items() if key.startswith(PROJECTION[:-6])}
    assert delta.quantised_digests[PROJECTION] == documented_digest(entries)
    with optimizer.base_weights():
        with pytest.raises(RuntimeError, match="delta: the model holds its base weights"):
            optimizer.delta()
        with pytest.raises(DeltaError, match="the trained model holds its base weights"):
            SparseDelta.from_models(load(base), tuned)

    model = load(base, config=json.loads(delta.metadata["quantization_config"]))
    runs = base != "fp8"  # its own product needs a kernel from the hub
    before = logits(model, device) if runs else None
    stored = quantised_models.stored(model)
    delta.apply_(model)
    assert torch.equal(logits(model, device), expected) and not (runs and torch.equal(expected, before))
    with pytest.raises(DeltaError, match="applied to this model already"):
        delta.apply_(model)
    save_merged(model, tmp_path / "again")
    again, merged = (load(None, folder).state_dict() for folder in ("again", "merged"))
    assert all(torch.equal(weight, again[name]) for name, weight in merged.items())
    delta.remove_(model)
    assert all(torch.equal(stored[name], tensor) for name, tensor in quantised_models.stored(model).items())
    with delta.active(model):
        assert torch.equal(logits(model, device), expected)
    assert not runs or torch.equal(logits(model, device), before)

    # The same delta changes the dequantised checkpoint, in memory and in files.
    save_merged(load(base), tmp_path / "dequantised")
    plain = load(None, "dequantised")
    delta.apply_(plain)
    assert all(torch.equal(weight, merged[name]) for name, weight in plain.state_dict().items())
    arguments = ["delta", "apply", str(tmp_path / "delta"), str(tmp_path / "dequantised")]
    assert main([*arguments, "-o", str(tmp_path / "applied")]) == 0
    applied = load(None, "applied").state_dict()
    assert all(torch.equal(weight, applied[name]) for name, weight in merged.items())


def test_deltas_of_a_quantised_base_are_switched_merged_and_made_of_two_models(load, device):
    tuned, other = load(), load()
    deltas = {"a": trained(tuned, device, seed=1).delta(), "b": trained(other, device, "tile64", seed=2).delta()}
    model = load()
    expected = {None: logits(model, device), "a": logits(tuned, device), "b": logits(other, device)}
    switch = DeltaSet(model, deltas)
    for name in ("a", "b", None, "b", "a", None):
        switch.activate(name)
        assert torch.equal(logits(model, device), expected[name]), name
    assert switch.nbytes >= 2 * (deltas["a"].changed + deltas["b"].changed)

    both = deltas["a"].merged(deltas["b"], model, add=True)
    assert both.quantised_digests == deltas["a"].quantised_digests
    assert both.changed > max(delta.changed for delta in deltas.values())
    assert SparseDelta.from_models(load(), tuned).result_digest == deltas["a"].result_digest
    with both.active(model):
        assert not torch.equal(logits(model, device), expected["a"])
    with pytest.raises(DeltaError, match=f"the base: '{PROJECTION}' has been trained"):
        SparseDelta.from_models(tuned, other)


def test_what_is_refused_changes_nothing(load, device, tmp_path, capsys):
    tuned = load()
    optimizer = trained(tuned, device)
    delta = optimizer.delta()
    base = delta.metadata["base_model"]

    def refused(model, match):
        before = logits(model, device)
        with pytest.raises(DeltaError, match=match):
            delta.apply_(model)
        assert torch.equal(logits(model, device), before)

    quantised = rf"{PROJECTION} has quantised bytes of the digest \w+, expected \w+: the delta is for {base}, quantised"
    for other in ("nf4_double", "fp4", "int8"):
        refused(load(other), quantised)
    refused(load(None), rf"{PROJECTION} has the digest .* the delta is for {base}, quantised")
    changed = load()
    with torch.no_grad():
        changed.get_parameter(PROJECTION.replace("q_proj", "k_proj"))[5, 0] ^= 1
    refused(changed, quantised.replace("q_proj", "k_proj"))

    model = load()
    with SparseDelta.from_models(load(), load()).active(model):  # changes no weight
        refused(model, f"{PROJECTION} of the model has trained weights over its quantised base already")
    with delta.active(model):
        with pytest.raises(ValueError, match="a delta is applied to it"):
            SparseAdamW(model, optimizer.mask, lr=1e-2)
        with pytest.raises(RuntimeError, match=r"state_dict\(\) has no place for the trained weights"):
            model.state_dict()
    with pytest.raises(DeltaError, match=f"to_peft: '{PROJECTION}' is quantised"):
        delta.to_peft(model)

    delta.save_pretrained(tmp_path / "delta")
    assert main(["delta", "show", str(tmp_path / "delta")]) == 0
    assert "quantised tensors of the base: 14" in capsys.readouterr().out
    original = str(tmp_path / "model")
    assert main(["delta", "apply", str(tmp_path / "delta"), original, "-o", str(tmp_path / "out")]) == 1
    assert f"the delta is for {base}, quantised" in capsys.readouterr().err
