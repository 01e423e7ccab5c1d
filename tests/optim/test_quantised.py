"""Active weights over a quantised base, compared with a model of the dequantised weights."""

import copy

import launch
import pytest
import quantised_models
import torch
import torch.distributed as dist
from moe_models import moe_model
from quantised_models import batch, dequantised, quantised, transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from sparse_opt import GraphedStep, MaskSet, RandomMask, SparseAdamW, SparseSGD
from sparse_opt.mask_finding import find_from_model
from sparse_opt.optim import save_merged
from sparse_opt.trainers.models import compile_layers
from sparse_opt.weight_sync import WeightSender

# A gate of 200 rows has tiles that are cut off; norms, embeddings and the head are not quantised.
SIZES = {"hidden_size": 128, "intermediate_size": 200}


@pytest.fixture
def folder(tmp_path, tiny_llama):
    tiny_llama(dtype=torch.bfloat16, **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def load(folder, device):
    return lambda base="nf4": quantised_models.load(folder, base, device)


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


class Sequence:
    ids, prompt_length = batch(torch.device("cpu"), vocabulary=60)[0].tolist(), 4


def backward(model, device, seed=0, **options):
    ids = batch(device, seed, **options)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def train(model, optimizer, device, steps, first=0, **options):
    losses = []
    for seed in range(first, first + steps):
        for micro_batch in (0, 100):
            losses.append(backward(model, device, seed + micro_batch, **options))
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
        ("nf4_bf16_storage", "tile64", 0.2, SparseAdamW, None),
        ("fp4", "tile64", 0.6, SparseAdamW, None),  # too dense for tiles
        ("int8", "run16", 0.1, SparseAdamW, None),
        ("torchao_int8", "tile64", 0.2, SparseAdamW, None),
        ("torchao_fp8", "run16", 0.1, SparseAdamW, None),
        ("torchao_int4", "element", 0.05, SparseSGD, None),
        ("fp8", "tile64", 0.2, SparseAdamW, None),
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

    ids = batch(device)
    policy = model(input_ids=ids).logits.detach()
    with torch.no_grad(), ours.base_weights():  # the first loss of DPO is ln 2
        assert torch.equal(model(input_ids=ids).logits, policy)
    assert torch.equal(backward(model, device), backward(twin, device))
    params = dict(zip(ours.param_groups[0]["param_names"], ours.param_groups[0]["params"], strict=True))
    for name, param in twin.named_parameters():
        expected = theirs.compact_grad(param)
        found = ours.compact_grad(params[name])
        assert (found is None) == (expected is None), name
        assert found is None or (expected.any() and torch.equal(found, expected)), name
    ours.zero_grad(), theirs.zero_grad()

    before = {name: dequantised(layer) for name, layer in quantised(model).items()}
    assert torch.equal(train(model, ours, device, 3), train(twin, theirs, device, 3))
    assert all(torch.equal(before[name], dequantised(layer)) for name, layer in quantised(model).items())
    with torch.no_grad(), ours.base_weights(), theirs.base_weights():
        assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    ours.close()  # the trained weights stay
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    for name, weight in weights(model, tmp_path / "merged").items():
        assert torch.equal(weight, twin.state_dict()[name].cpu()), name


@pytest.mark.parametrize(
    ("base", "family", "implementation"),
    [("nf4", "gpt_oss", "grouped_mm"), ("nf4", "qwen3", "eager"), ("fp8", "qwen3", "grouped_mm")],
)
def test_training_of_experts_is_that_of_the_dequantised_weights(
    tmp_path, device, deterministic, base, family, implementation
):
    moe_model(family, torch.bfloat16).save_pretrained(tmp_path / "model")
    model = quantised_models.experts(tmp_path / "model", base, device)
    save_merged(model, tmp_path / "dequantised")
    twin = quantised_models.load(tmp_path / "dequantised", None, device)
    for each in (model, twin):
        each.set_experts_implementation(implementation)
    if implementation == "eager":
        model.gradient_checkpointing_enable()
    found = [find_from_model(m, method="snip", sparsity=95, sequences=[Sequence]).mask for m in (model, twin)]
    assert found[0] == found[1]
    mask = MaskSet.random(model, density=0.1, seed=1)
    assert mask == MaskSet.random(twin, density=0.1, seed=1)
    ours, theirs = (SparseAdamW(m, mask, lr=1e-2) for m in (model, twin))
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert experts in ours.quantised_parameters

    twin_losses = train(twin, theirs, device, 3, vocabulary=60)
    assert torch.equal(train(model, ours, device, 3, vocabulary=60), twin_losses)
    with torch.no_grad(), ours.base_weights(), theirs.base_weights():
        ids = batch(device, vocabulary=60)
        assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    merged = weights(model, tmp_path / "merged")
    assert merged.keys() == twin.state_dict().keys()
    assert all(torch.equal(weight, twin.state_dict()[name].cpu()) for name, weight in merged.items())
    with pytest.raises(RuntimeError, match="no place for the trained weights of 'gate_up_proj'"):
        model.model.layers[0].mlp.experts.state_dict()

    delta, other = ours.delta(), quantised_models.experts(tmp_path / "model", base, device)
    with delta.active(other), torch.no_grad():
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    entries = quantised_models.stored(other)
    assert not any("parametrizations" in name for name in entries) and experts in delta.quantised_digests


@pytest.mark.parametrize("block", [(64, 32), None])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_blocks_of_fp8_that_are_cut_off(tmp_path, device, block, scale_fmt):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(0)
    layer = fp8.FP8Linear(200, 72, block_size=block, scale_fmt=scale_fmt)
    weight, scales = torch.randn(72, 200, generator=generator), layer.weight_scale_inv
    layer.weight.data = weight.to(torch.float8_e4m3fn)
    scales.data = torch.rand(scales.shape, generator=generator).add(0.5).to(scales.dtype)
    rows, columns = block or (72, 200)
    grid = scales.detach().float().view(-(-72 // rows), -(-200 // columns))
    expected = layer.weight.detach().float() * grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:72, :200]
    save_merged(layer.to(device), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {"weight"}
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], expected.bfloat16())


def test_compiled_layers_keep_their_inputs_only(load, device, monkeypatch):
    partitioned = torch._dynamo.lookup_backend("aot_eager_decomp_partition")  # inductor takes long on a CPU
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: partitioned)
    grads = []
    for compiled in (False, True):
        model = load()
        optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, pattern="tile64", seed=1), lr=1e-2)
        if compiled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            compile_layers(model)
        kept, ids = [], batch(device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        of_layers = sum(t.nbytes for t in kept if t.shape[:2] == ids.shape and t.dtype == torch.bfloat16)
        # Not their squares: the last norm makes the sum of these the same for all weights.
        direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(device)
        (states.float() * direction).sum().backward()
        name = "model.layers.0.mlp.down_proj.weight"
        found = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
        grads.append(optimizer.compact_grad(found[name]))
    # A layer's input, and the last norm's and its rows in two dtypes.
    assert of_layers <= (len(model.model.layers) + 3) * states.nbytes
    torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-2 * grads[0].abs().max().item())


@pytest.mark.parametrize("base", ["nf4", "torchao_int8", "fp8"])
def test_checkpointing_compilation_and_autocast_give_the_same_gradients(load, device, base):
    grads = {}
    for how in ("plain", "checkpointed", "compiled", "autocast"):
        model = load(base)
        optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, pattern="tile64", seed=1), lr=1e-2)
        if how == "checkpointed":
            model.gradient_checkpointing_enable()
        mlp = model.model.layers[0].mlp
        run = torch.compile(mlp, backend="aot_eager") if how == "compiled" else mlp
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        if how in ("plain", "checkpointed"):
            backward(model, device)
        with torch.autocast(device.type, torch.float16, enabled=how == "autocast"):
            run(x).float().square().sum().backward()
        name = "model.layers.0.mlp.down_proj.weight"
        found = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
        grads[how] = optimizer.compact_grad(found[name])
    assert torch.equal(grads["plain"], grads["checkpointed"])
    assert torch.equal(grads["compiled"], grads["autocast"]) and grads["compiled"].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("base", "pattern"),
    [
        ("nf4_double", "tile64"),
        ("int8", "element"),
        ("torchao_int8", "run16"),
        ("torchao_fp8", "tile64"),
        ("fp8", "element"),
    ],
)
def test_a_captured_step_has_the_bits_of_an_eager_one(folder, base, pattern):
    device, results = torch.device("cuda"), []
    inputs = torch.randn(6, 32, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for graphs in (False, True):
        mlp = quantised_models.load(folder, base, device).model.layers[0].mlp
        mask = MaskSet.random(mlp, density=0.2, pattern=pattern, seed=1)
        optimizer = SparseAdamW(mlp, mask, lr=torch.tensor(1e-2, device=device), max_grad_norm=1.0)

        def step(x, mlp=mlp, optimizer=optimizer):
            with torch.no_grad(), optimizer.base_weights():
                reference = mlp(x)
            loss = (mlp(x).float() - 2 * reference.float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = GraphedStep(step, optimizer, n_warmup=2) if graphs else step
        losses = [call(x).clone() for x in inputs]
        results.append((torch.stack(losses), *(p.detach() for p in optimizer.param_groups[0]["params"])))
        assert not graphs or call.n_graphs == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].unique().numel() == len(inputs)


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


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("weight_magnitude", "torchao_fp8"),
        ("snip", "torchao_int8"),
        ("fisher_gradient", "nf4_double"),
        ("wanda", "nf4_double"),
        ("wanda", "fp8"),
    ],
)
def test_masks_are_found_as_in_the_dequantised_model(twins, device, deterministic, method, base):
    found = [find_from_model(m, method=method, sparsity=95, sequences=[Sequence]).mask for m in twins(base)]
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
    with pytest.raises(NotImplementedError, match="set_mask is not supported for a quantised base, which 'model"):
        optimizer.set_mask(mask)
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


class OtherMethod(nn.Linear):
    is_quantized, quantization_method = True, "mxfp4"


def packed_by_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(64, 64, bias=False)
    scales = torch.ones(2, 64, dtype=torch.bfloat16)
    packed = quantization.Int4Tensor(torch.zeros(64, 32, dtype=torch.int8), scales, scales, [1, 32], (64, 64))
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return layer


def embedding_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    quantization.quantize_(
        model, quantization.IntxWeightOnlyConfig(), lambda module, _: isinstance(module, nn.Embedding)
    )
    return model


def parameter_of_bitsandbytes():
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    layer = nn.Linear(64, 64)
    parametrize.replace_parameter_4bit(layer, "weight")
    return layer


REFUSED = {
    "the model is quantised by 'mxfp4', expected bitsandbytes, torchao": lambda: OtherMethod(64, 64),
    "'weight' is not quantised yet": lambda: pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64),
    r"'weight' has the shape \[64, 64\] and 1 parametrizations, expected the 3-D weight": parameter_of_bitsandbytes,
    "'weight' of a Linear is a torchao Int4Tensor, expected Int8Tensor": packed_by_torchao,
    "'0.weight' of a Embedding is a torchao IntxUnpackedToInt8Tensor": embedding_of_torchao,
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_in_another_format_is_refused(message):
    model = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        SparseAdamW(model, RandomMask(0.1), lr=1e-2)


@pytest.mark.dist
@launch.ranks(2, nccl=False)
def test_a_sharded_base_is_refused(rank):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, quant_storage=torch.bfloat16, quant_type="nf4").to("cpu")
    fully_shard(layer)
    with pytest.raises(ValueError, match="'weight' is a DTensor: a quantised base can't be sharded by fully_shard"):
        SparseAdamW(layer, RandomMask(0.1), lr=1e-2)
    layer = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
    with pytest.raises(NotImplementedError, match="a process group is not supported for a quantised base.*'weight'"):
        SparseAdamW(layer, RandomMask(0.1), lr=1e-2, process_group=dist.group.WORLD)


def test_a_merged_model_of_several_files(load, tmp_path, monkeypatch):
    model = load("nf4")
    save_merged(model, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr("sparse_opt.optim.quantised._SHARD_BYTES", 10_000)
    save_merged(model, tmp_path)
    files = sorted(path.name for path in tmp_path.glob("model*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    monkeypatch.undo()
    save_merged(model, tmp_path)
    assert [path.name for path in tmp_path.glob("model*.safetensors*")] == ["model.safetensors"]
