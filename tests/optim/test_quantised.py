"""Active weights over a base that bitsandbytes has quantised, compared with a model of the dequantised weights."""

import copy
import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from sparse_opt import GraphedStep, MaskSet, SparseAdamW, SparseSGD
from sparse_opt.mask_finding import find_from_model
from sparse_opt.optim import save_merged
from sparse_opt.weight_sync import WeightSender

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

BASES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4_double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
# A gate of 200 rows has tiles that are cut off; norms, embeddings and the head are not quantised.
SIZES = {"hidden_size": 128, "intermediate_size": 200}


@pytest.fixture
def folder(tmp_path, tiny_llama):
    tiny_llama(dtype=torch.bfloat16, **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def load(folder, device):
    """`load(base="nf4")`: the model as transformers quantises it; base None: not quantised."""

    def make(base="nf4", **options):
        if base is not None:
            compute = {"bnb_4bit_compute_dtype": torch.bfloat16} if "load_in_4bit" in BASES[base] else {}
            config = transformers.BitsAndBytesConfig(**{**BASES[base], **compute, **options})
            options = {"quantization_config": config, "device_map": {"": 0 if device.type == "cuda" else "cpu"}}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        return model.train() if base is not None else model.to(device).train()

    return make


def quantised(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))}


@torch.no_grad()
def dequantised(layer):
    """The definition: bitsandbytes' own for 4 bits, [-127, 127] times a row's largest magnitude / 127 for 8."""
    weight = layer.weight
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    return (weight.data * (weight.SCB.view(-1, 1) * (1 / 127))).bfloat16()


@pytest.fixture
def twins(load):
    """A quantised model, and a model of the same weights, dequantised."""

    def make(base="nf4"):
        model, twin = load(base), load(None)
        with torch.no_grad():
            for name, layer in quantised(model).items():
                twin.get_submodule(name).weight.copy_(dequantised(layer))
        return model, twin

    return make


def batch(device, seed=0):
    return torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed)).to(device)


def backward(model, device, seed=0):
    ids = batch(device, seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def train(model, optimizer, device, steps, first=0):
    losses = []
    for seed in range(first, first + steps):
        for micro_batch in (0, 100):
            losses.append(backward(model, device, seed + micro_batch))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def weights(model, tmp_path):
    save_merged(model, tmp_path)
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()


@pytest.mark.parametrize(
    ("base", "pattern", "density", "optimizer_class", "backend"),
    [
        ("nf4", "tile64", 0.2, SparseAdamW, None),  # gradients by tiles
        ("nf4_double", "element", 0.05, SparseSGD, "reference"),
        ("fp4", "tile64", 0.6, SparseAdamW, None),  # too dense for tiles
        ("int8", "run16", 0.1, SparseAdamW, None),
    ],
)
def test_training_is_that_of_the_dequantised_weights(
    twins, device, tmp_path, deterministic, base, pattern, density, optimizer_class, backend
):
    model, twin = twins(base)
    mask = MaskSet.random(model, density=density, pattern=pattern, seed=1)
    assert mask == MaskSet.random(twin, density=density, pattern=pattern, seed=1)
    ours, theirs = (optimizer_class(m, mask, lr=1e-2, backend=backend) for m in (model, twin))
    active = {name for name in mask.names if mask[name].numel() and name.removesuffix(".weight") in quantised(model)}
    assert set(ours.quantised_parameters) == active
    assert set(ours.tiled_parameters) == set(theirs.tiled_parameters)
    assert bool(ours.tiled_parameters) == (density == 0.2)

    assert torch.equal(backward(model, device), backward(twin, device))
    params = dict(zip(ours.param_groups[0]["param_names"], ours.param_groups[0]["params"], strict=True))
    for name, param in twin.named_parameters():
        expected = theirs.compact_grad(param)
        found = ours.compact_grad(params[name])
        assert (found is None) == (expected is None), name
        assert found is None or (expected.any() and torch.equal(found, expected)), name
    ours.zero_grad(), theirs.zero_grad()

    before = {name: layer.weight.data.clone() for name, layer in quantised(model).items()}
    assert torch.equal(train(model, ours, device, 3), train(twin, theirs, device, 3))
    assert all(torch.equal(before[name], layer.weight) for name, layer in quantised(model).items())
    ids = batch(device)
    with torch.no_grad(), ours.base_weights(), theirs.base_weights():
        assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    ours.close()  # the trained weights stay
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    for name, weight in weights(model, tmp_path / "merged").items():
        assert torch.equal(weight, twin.state_dict()[name].cpu()), name


def test_the_first_dpo_loss_is_ln_2(load, device):
    model = load("nf4_double")
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.05), lr=1e-2)

    def margin():
        chosen, rejected = (model(input_ids=batch(device, seed)).logits.float().log_softmax(-1) for seed in (0, 1))
        return (chosen - rejected)[..., 0].sum(-1)

    def loss():
        with torch.no_grad(), optimizer.base_weights():
            model.eval()
            reference = margin()
            model.train()
        return -logsigmoid(margin() - reference).mean()

    first = loss()
    assert first.item() == torch.tensor(math.log(2)).item()
    first.backward()
    optimizer.step()
    assert loss() < first


def test_checkpointing_compilation_and_autocast_give_the_same_gradients(twins, device):
    grads = {}
    for how in ("plain", "checkpointed", "compiled", "autocast"):
        model, _ = twins()
        optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, pattern="tile64", seed=1), lr=1e-2)
        if how == "checkpointed":
            model.gradient_checkpointing_enable()
        layer = model.model.layers[0].mlp.down_proj
        run = torch.compile(layer, backend="eager") if how == "compiled" else layer
        x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        if how in ("plain", "checkpointed"):
            backward(model, device)
        with torch.autocast(device.type, torch.float16, enabled=how == "autocast"):
            run(x).float().square().sum().backward()
        name = "model.layers.0.mlp.down_proj.weight"
        found = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
        grads[how] = optimizer.compact_grad(found[name])
    assert torch.equal(grads["plain"], grads["checkpointed"])
    assert torch.equal(grads["compiled"], grads["autocast"]) and grads["compiled"].any()


def test_a_resumed_run_has_the_same_bits(load, device, tmp_path):
    model = load()
    mask = MaskSet.random(model, density=0.05, seed=1)
    names = [name for name in mask.names if name.removesuffix(".weight") in quantised(model)]  # others are in the model
    mask = MaskSet({n: mask.indices[n] for n in names}, {n: mask.shapes[n] for n in names})
    optimizer = SparseAdamW(model, mask, lr=1e-2, stochastic_rounding=True)
    train(model, optimizer, device, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, device, 3, first=3)

    resumed = load()
    other = SparseAdamW(resumed, mask, lr=1e-2, stochastic_rounding=True)
    other.load_state_dict(saved)
    assert torch.equal(train(resumed, other, device, 3, first=3), expected)
    ours, theirs = weights(model, tmp_path / "a"), weights(resumed, tmp_path / "b")
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())

    moved = MaskSet({n: mask[n][1:] for n in names}, mask.shapes)
    with pytest.raises(ValueError, match="saved under another mask"):
        SparseAdamW(load(), moved, lr=1e-2).load_state_dict(saved)


@pytest.mark.parametrize("method", ["weight_magnitude", "snip", "fisher_gradient", "wanda"])
def test_masks_are_found_as_in_the_dequantised_model(twins, device, deterministic, method):
    class Sequence:
        ids, prompt_length = batch(torch.device("cpu"))[0].tolist(), 4

    found = [find_from_model(m, method=method, sparsity=95, sequences=[Sequence]).mask for m in twins("nf4_double")]
    assert found[0] == found[1]
    assert any("mlp" in name and found[0][name].numel() for name in found[0].names)


def test_memory_is_that_of_the_active_elements(load):
    model = load()
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, pattern="tile64"), lr=1e-2)
    bytes_of = optimizer.nbytes()
    nnz = optimizer.mask.nnz
    assert bytes_of["compact_weights"] <= 2 * nnz
    assert bytes_of["base"] < bytes_of["compact_weights"]  # that of embeddings and the head alone


def test_what_is_refused(load, device, tmp_path):
    model = load()
    mask = MaskSet.random(model, density=0.05)
    optimizer = SparseAdamW(model, mask, lr=1e-2)
    for name, call in {
        "set_mask": lambda: optimizer.set_mask(mask),
        "GraphedStep": lambda: GraphedStep(lambda: None, optimizer),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name} is not supported for a quantised base, which 'model"):
            call()
    for source in (optimizer, model):
        with pytest.raises(NotImplementedError, match="is quantised, and an engine has no place"):
            WeightSender(source, None if source is optimizer else mask)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) has no place for the trained weights of .*save_merged"):
        model.state_dict()
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(model)
    with optimizer.base_weights(), pytest.raises(RuntimeError, match="save_merged: the model holds its base weights"):
        save_merged(model, tmp_path / "merged")
    optimizer.detach()
    optimizer, replaced = SparseAdamW(model, mask, lr=1e-2), optimizer  # possible before the first step
    with pytest.raises(RuntimeError, match="is trained by another optimizer"):
        replaced.attach()
    train(model, optimizer, device, 1)
    with pytest.raises(ValueError, match="has been trained by another optimizer over the same quantised base"):
        SparseAdamW(model, mask, lr=1e-2)

    loss = model(input_ids=batch(device)).logits.sum()
    with torch.no_grad(), optimizer.base_weights(), pytest.raises(RuntimeError, match="modified by an inplace|base"):
        loss.backward()

    class OtherMethod(torch.nn.Linear):
        is_quantized, quantization_method = True, "mxfp4"

    with pytest.raises(ValueError, match="the model is quantised by 'mxfp4', expected bitsandbytes Linear4bit"):
        SparseAdamW(OtherMethod(64, 64), 0.1, lr=1e-2)
    with pytest.raises(ValueError, match="'weight' is not quantised yet"):
        SparseAdamW(bnb.nn.Linear4bit(64, 64), 0.1, lr=1e-2)
