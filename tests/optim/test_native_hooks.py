"""Native hooks: when they gather a gradient themselves, and when they call the Python hooks."""

import gc

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW, backends
from sparse_opt.optim.gradients.collector import Receiver


@pytest.fixture(autouse=True)
def native(device, monkeypatch):
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    if backends.choose(device.type) not in ("cpu", "cuda"):
        pytest.skip("needs the extension: " + backends.why_unavailable(device.type, device.type))


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8)).to(device)


def backward(model, **options):
    x = torch.ones(3, 12, device=next(model.parameters()).device)
    model(x).square().sum().backward(**options)


@pytest.fixture
def python_calls(monkeypatch, autograd_library):
    """The names of parameters whose Python hook has received a gradient."""
    calls = []
    receive = Receiver.receive

    def counted(self, i, param):
        calls.append(self.buffer.names[i])
        receive(self, i, param)

    monkeypatch.setattr(Receiver, "receive", counted)
    return calls


def expected_grads(model, mask):
    """The active elements of the dense gradients of a copy without an optimizer."""
    copy = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8)).to(next(model.parameters()).device)
    copy.load_state_dict(model.state_dict())
    backward(copy)
    grads = {name: p.grad.view(-1) for name, p in copy.named_parameters()}
    return {name: grads[name][mask[name].long().to(grads[name].device)] for name in mask.names}


def assert_gathered(model, optimizer, mask, times=1):
    for name, grad in expected_grads(model, mask).items():
        param = model.get_parameter(name)
        assert param.grad is None
        if mask[name].numel():
            torch.testing.assert_close(optimizer.compact_grad(param), times * grad)


def queue_gradients(optimizer, gradient_bytes=10**12):
    """Queue gradients of up to so many bytes, also on a CPU, where each is gathered at once by default."""
    for buffer in optimizer.gradient_buffers:
        if not hasattr(buffer, "set_queue_limits"):
            pytest.skip("needs sparse_opt._autograd: Python code queues nothing")
        buffer.set_queue_limits(gradient_bytes=gradient_bytes)


@pytest.mark.parametrize("queued", [False, True], ids=["", "queued"])
@pytest.mark.parametrize("options", [{}, {"create_graph": True}], ids=["", "create-graph"])
def test_gradients_are_gathered_without_python(model, python_calls, options, queued):
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask)
    if queued:
        queue_gradients(optimizer)
    backward(model, **options)
    backward(model, **options)
    assert_gathered(model, optimizer, mask, times=2)
    assert python_calls == []


@pytest.mark.parametrize("queued", [False, True], ids=["", "queued"])
@pytest.mark.parametrize("pattern", ["element", "tile64"])
def test_with_a_scaler_only_the_first_gradient_of_a_step_reaches_python(device, python_calls, pattern, queued):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5, pattern=pattern), lr=1e-2, amp_scaling=True)
    if queued:
        queue_gradients(optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def step(factors):
        """Take a step, with the gradient of layer i, and so of those before it, multiplied by factors[i]."""
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            x = torch.ones(3, 64, device=device)
            for layer, factor in zip(model, factors, strict=True):
                x = layer(x)
                x.register_hook(lambda grad, factor=factor: grad * factor)
            scaler.scale(x.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert step([1, 1, 1])
    assert len(python_calls) <= 1  # none if tiles come first
    # The gradients of the last layer come first, and those of the first layer are received directly.
    assert not step([float("inf"), 1, 1]) and scaler.get_scale() == 512.0
    assert not step([1, 1, float("nan")]) and scaler.get_scale() == 256.0
    assert step([1, 1, 1]) and scaler.get_scale() == 256.0
    assert len(python_calls) <= 4


@pytest.mark.parametrize("first", [True, False], ids=["before-ours", "after-ours"])
def test_hooks_of_others_run_in_their_order(model, python_calls, first):
    seen = []
    mask, weight = MaskSet.random(model, density=0.5), model[0].weight
    handle = None
    if first:
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    optimizer = SparseAdamW(model, mask)
    if not first:
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    backward(model)
    assert_gathered(model, optimizer, mask)
    assert seen == [first]
    assert python_calls == ["0.weight"]
    handle.remove()
    backward(model)
    assert_gathered(model, optimizer, mask, times=2)
    assert python_calls == ["0.weight"] and seen == [first]


def gradients_of(model, optimizer):
    grads = [optimizer.compact_grad(p) for p in model.parameters()]
    return [optimizer.clip_grad_norm_(1.0), *(g for g in grads if g is not None)]


def run_parts(model, parts, nested=False):
    """Apply all layers, and run the backward pass through some of them; one of them is applied twice if `nested`."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 32, device=next(model.parameters()).device, requires_grad=True)
    for i, layer in enumerate(model):
        x = layer(x) if i in parts else layer(x.detach().requires_grad_()).detach().requires_grad_()
        if nested and i == 1:
            x = checkpoint(layer, x, use_reentrant=True)
    x.square().mean().backward()


@pytest.mark.parametrize("passes", [[{2, 3}, {0, 1, 2, 3}], [{1, 2, 3}, {3}, {2, 3}]], ids=["more", "fewer"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("pattern", ["element", "run16"])
def test_queued_gradients_have_the_same_bits(device, pattern, passes, nested):
    """The passes reach some of the parameters, and their gradients add up; nested ones reach a parameter twice."""
    found = []
    for most in (0, 10**12, 3000):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=i % 2 == 0) for i in range(4)]).to(device)
        optimizer = SparseAdamW(model, MaskSet.random(model, density=0.3, pattern=pattern, seed=1))
        queue_gradients(optimizer, most)
        for _ in range(2):  # the second one overwrites the gradients of the first
            optimizer.zero_grad()
            torch.manual_seed(1)
            for parts in passes:
                run_parts(model, parts, nested)
            found.append(gradients_of(model, optimizer))
    for other in found[1:]:
        assert len(other) == len(found[0]) > 4
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_more_gradients_are_queued_than_one_launch_supports(device):
    """The CUDA kernels support 320 tensors per launch."""
    torch.manual_seed(0)
    params = {f"p{i}": torch.nn.Parameter(torch.randn(1 + 7 * i % 90, device=device)) for i in range(400)}
    factors = [torch.randn_like(p) for p in params.values()]
    mask = MaskSet.random(params, density=0.4)
    optimizer = SparseAdamW(list(params.items()), mask)
    queue_gradients(optimizer)
    sum((p * f).sum() for p, f in zip(params.values(), factors, strict=True)).backward()
    for (name, p), f in zip(params.items(), factors, strict=True):
        expected = f[mask[name].long().to(device)]
        assert p.grad is None
        if expected.numel():
            assert torch.equal(optimizer.compact_grad(p), expected), name


@pytest.mark.parametrize("then", ["zero_grad", "step", "del"])
def test_a_pass_that_raises_while_gradients_are_queued(device, then):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(device)
    x = torch.ones(3, 16, device=device)
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask)
    queue_gradients(optimizer)

    def fail(grad):
        raise RuntimeError("stop here")

    handle = model[1].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        model(x).square().sum().backward()
    handle.remove()
    if then == "step":
        weights = [p.detach().clone() for p in model.parameters()]
        optimizer.step()  # with the gradients that have arrived
        moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
        assert moved[-2:] == [True, True] and not any(moved[:2])
    elif then == "zero_grad":
        optimizer.zero_grad()
        model(x).square().sum().backward()
        grads = [optimizer.compact_grad(p) for p in model.parameters()]
        twin = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(device)
        twin.load_state_dict(model.state_dict())
        twin(x).square().sum().backward()
        for (name, p), found in zip(twin.named_parameters(), grads, strict=True):
            assert torch.equal(found, p.grad.view(-1)[mask[name].long().to(device)]), name
    else:
        del optimizer
        gc.collect()
        model(x).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def deep(device):
    """Makes equal models, with gradients large enough to be queued on a GPU."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")

    def make():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)]
        return torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)

    return make


def run_deep(model, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(512, 2048, device="cuda", generator=generator).bfloat16()
    model(x).float().square().mean().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("queued", [False, True], ids=["", "queued"])
@pytest.mark.parametrize("other_stream", [False, True])
def test_gradients_gathered_on_the_stream_of_the_backward_pass(deep, other_stream, queued):
    model, twin = deep(), deep()
    mask = MaskSet.random(model, density=0.025)
    optimizer = SparseAdamW(model, mask, lr=1e-3)
    if queued:
        queue_gradients(optimizer, 40 << 20)
    stream = torch.cuda.Stream() if other_stream else torch.cuda.current_stream()
    for seed in range(6):
        twin.zero_grad()
        run_deep(twin, seed)
        stream.wait_stream(torch.cuda.current_stream())
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(stream):
            run_deep(model, seed)
        assert seed == 0 or torch.cuda.memory_allocated() == before, "the pass ended and did not free the last gradient"
        for name, p in twin.named_parameters():  # read at once, on the stream that is current
            expected = p.grad.view(-1)[mask[name].long().cuda()].float()
            assert torch.equal(optimizer.compact_grad(model.get_parameter(name)).float(), expected), (seed, name)
        optimizer.zero_grad()


def peak_of_a_pass(model, optimizer):
    """The peak memory of the second pass, in bytes above the memory before it."""
    for _ in range(2):
        optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_deep(model)
    return torch.cuda.max_memory_allocated() - before


ACTIVATIONS = 12 * 512 * 2048 * 2 + 3 * 512 * 2048 * 4  # of run_deep, in bytes


@pytest.mark.gpu
def test_few_gradients_are_held_however_many_groups_there_are(deep):
    model = deep()
    groups = [{"params": [named], "lr": 1e-3 * k} for k, named in enumerate(model.named_parameters(), 1)]
    optimizer = SparseAdamW(groups, MaskSet.random(model, density=0.025))
    peak = peak_of_a_pass(model, optimizer)
    assert peak < ACTIVATIONS + 4 * model[0].weight.nbytes, "of 12 weights' gradients"


@pytest.mark.gpu
def test_a_gradient_in_shared_memory_is_gathered_at_once(deep):
    workspace = torch.empty(2048, 2048, device="cuda", dtype=torch.bfloat16)

    class Linear(torch.autograd.Function):
        """A linear layer; with `reuse` it computes every weight gradient in the same memory."""

        @staticmethod
        def forward(ctx, x, weight, reuse):
            ctx.save_for_backward(x, weight)
            ctx.reuse = reuse
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            made = workspace if ctx.reuse else torch.empty_like(workspace)
            torch.mm(grad.t(), x, out=made)
            return grad @ weight, made.view(2048, 2048), None

    model, twin = deep(), deep()
    mask = MaskSet.random(model, density=0.025)
    optimizer = SparseAdamW(model, mask)
    x = torch.randn(512, 2048, device="cuda").bfloat16()
    for m, reuse in ((model, True), (twin, False)):
        y = x
        for layer in m:
            y = Linear.apply(y, layer.weight, reuse)
        y.float().square().mean().backward()
    for name, p in twin.named_parameters():
        expected = p.grad.view(-1)[mask[name].long().cuda()].float()
        assert torch.equal(optimizer.compact_grad(model.get_parameter(name)).float(), expected), name
