"""Ops inside torch.compile and CUDA graphs: no graph break, no copy, few recompiles, the bits of an eager call."""

from collections.abc import Callable, Iterator

import pytest
import torch
from cases import Case, assert_same_bits, bits_of, make, step_call
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from sparse_opt import backends, ops
from sparse_opt.ops import STEP_OPS

COMPILERS = ("aot_eager", "inductor")
PLACES = [
    ("cpu", "cpu"),
    *(pytest.param(("cuda", b), marks=pytest.mark.gpu, id=f"cuda-{b}") for b in ("cuda", "triton")),
]


@pytest.fixture(params=PLACES, ids="-".join)
def where(request: pytest.FixtureRequest) -> tuple[torch.device, str]:
    """(device, backend); a backend that cannot run is skipped with its reason."""
    device, backend = request.param
    if cause := backends.why_unavailable(backend, device):
        pytest.skip(f"backend {backend!r} cannot run: {cause}")
    return torch.device(device), backend


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


Function = Callable[[Case, str], list[Tensor]]

# What a user would compile: an op between other work, whose results are exact, so that fusing them changes no bit.


def step(op: str) -> Function:
    def call(case: Case, backend: str) -> list[Tensor]:
        arguments, keywords = step_call(op, case)
        *others, lr, steps = arguments
        getattr(ops, op)(*others, lr * 2, steps, **{**keywords, "grad": case.grad * 0.5}, backend=backend)
        return [p * 2 for p in case.params] + [case.exp_avg * 2]

    return call


def step_with_everything(op: str) -> Function:
    def call(case: Case, backend: str) -> list[Tensor]:
        arguments, keywords = step_call(op, case, compact=False, master=True)
        scalars = {"clip_coef": case.lr * 8, "grad_scale": case.lr * 64, "found_inf": case.lr * 0}
        rounding = {"stochastic_rounding": True, "seed": 2**40 + 17}
        getattr(ops, op)(*arguments, **keywords, **scalars, **rounding, backend=backend)
        return [p * 2 for p in case.params] + [case.master * 2]

    return call


def gather(case: Case, backend: str) -> list[Tensor]:
    sum_sq, found_inf = torch.zeros_like(case.steps), torch.zeros_like(case.lr)
    segments = case.indices, case.starts, case.ends
    options = {"scale": case.lr, "accumulate": True, "sum_sq": sum_sq, "found_inf": found_inf, "backend": backend}
    ops.masked_grad_gather_(case.grad, case.dense_grads, *segments, **case.layout, **options)
    return [case.grad * 2, sum_sq * 2, found_inf]


def tile_grad(case: Case, backend: str) -> list[Tensor]:
    matrices = [(g * 0.5, p) for g, p in zip(case.dense_grads, case.params, strict=True) if p.dim() > 1]
    sum_sq, found_inf = case.steps.new_zeros(len(matrices)), torch.zeros_like(case.lr)
    operands = [g for g, _ in matrices], [p for _, p in matrices]
    options = {"scale": case.lr, "accumulate": True, "sum_sq": sum_sq, "found_inf": found_inf, "backend": backend}
    tiles = case.tiles, case.tile_starts, case.tile_ends
    ops.tile_weight_grad_(case.tile_grad, *operands, *tiles, tile_size=64, **options)
    return [case.tile_grad * 2, sum_sq * 2, found_inf]


def swap(case: Case, backend: str) -> list[Tensor]:
    inside, outside = [p * 2 for p in case.params], case.master.to(case.params[0].dtype)
    segments = case.indices, case.starts, case.ends
    for dense in (inside, case.params):
        ops.indexed_swap_(dense, outside, *segments, **case.layout, backend=backend)
    return [*inside, outside]


def replace(case: Case, backend: str) -> list[Tensor]:
    segments = case.indices, case.starts, case.ends
    ops.indexed_replace_(case.params, case.master, case.master * 2, *segments, **case.layout, backend=backend)
    return [p * 2 for p in case.params]


def encode(case: Case, backend: str) -> list[Tensor]:
    old = [torch.where(g > 0.5, -p, p) for p, g in zip(case.params, case.dense_grads, strict=True)]
    indices, values, counts = ops.delta_encode(old, case.params, backend=backend)
    return [indices + 1, values * 2, counts * 2]


def apply(case: Case, backend: str) -> list[Tensor]:
    ops.delta_apply_(case.params, case.indices, case.grad * 2, case.starts, case.ends, backend=backend)
    return [p * 2 for p in case.params]


FUNCTIONS: dict[str, Function] = {
    **{op: step(op) for op in STEP_OPS},
    **{f"{op}, all options": step_with_everything(op) for op in STEP_OPS},
    "masked_grad_gather_": gather,
    "tile_weight_grad_": tile_grad,
    "indexed_swap_": swap,
    "indexed_replace_": replace,
    "delta_encode": encode,
    "delta_apply_": apply,
}
DELTAS = ("delta_encode", "delta_apply_")


def test_every_op_is_here():
    assert {name.split(",")[0] for name in FUNCTIONS} == set(backends.OPS)


def assert_equal_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"result {i}"
        assert torch.equal(bits_of(a), bits_of(b)), f"result {i}"


STORED = {
    "fp32-elements": (torch.float32, "element"),
    "fp32-narrow": (torch.float32, "narrow"),
    "bf16-runs": (torch.bfloat16, "run16"),
}
# What is compiled is the work around an op: with AdamW for each dtype and layout, with the others for one.
COMPILED = [
    pytest.param(op, compiler, *stored, id=f"{op}-{compiler}-{name}")
    for op in FUNCTIONS
    for compiler in COMPILERS
    for name, stored in STORED.items()
    if name == "fp32-elements" or op == "indexed_adamw_, all options"
]


@pytest.mark.parametrize(("op", "compiler", "dtype", "layout"), COMPILED)
def test_one_graph_and_the_bits_of_an_eager_call(op, compiler, dtype, layout, where):
    device, backend = where
    function = FUNCTIONS[op]
    case = make(device, dtype=dtype, layout="element" if op in DELTAS else layout)
    expected, got = case.clone(), case.clone()
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for _ in range(2):  # each call starts from the buffers of the previous one
        assert_equal_bits(compiled(got, backend), function(expected, backend))
        for c in (expected, got):
            c.steps += 1
    assert_same_bits(got, expected)
    if op != "delta_encode":
        assert any(not torch.equal(bits_of(t), bits_of(case.tensors()[n])) for n, t in got.tensors().items())
    assert counters["stats"]["unique_graphs"] == 1


def test_the_break_at_delta_encode_names_the_setting_and_changes_no_result():
    case = make(torch.device("cpu"))
    assert_equal_bits(torch.compile(encode, backend="aot_eager")(case, "cpu"), encode(case, "cpu"))
    assert any("capture_dynamic_output_shape_ops" in reason for reason in counters["graph_break"])


ADAMW = FUNCTIONS["indexed_adamw_"]


def test_inductor_hands_over_the_tensors_themselves(monkeypatch):
    """The compiler makes a mutating op functional; if it cannot undo that, it copies the whole model in each call."""
    seen: list[list[int]] = []  # the addresses of the parameters in the kernel's call
    function = backends.function

    def noted(op: str, device: torch.device, backend: str | None = None) -> Callable[..., None]:
        kernel = function(op, device, backend)

        def call(params: list[Tensor], *args: object, **kwargs: object) -> None:
            seen.append([p.data_ptr() for p in params])
            kernel(params, *args, **kwargs)

        return call

    monkeypatch.setattr(backends, "function", noted)
    case = make(torch.device("cpu"))
    torch.compile(ADAMW, fullgraph=True, backend="inductor")(case, "cpu")
    assert seen == [[p.data_ptr() for p in case.params]]
    assert "possibly_missed_reinplacing_bytes" not in counters["inductor"]


def test_parameters_that_require_gradients():
    case = make(torch.device("cpu"))
    expected, got = case.clone(), case.clone()
    for c in (expected, got):
        c.params = [torch.nn.Parameter(p) for p in c.params]
    eager, compiled = ADAMW(expected, "cpu"), torch.compile(ADAMW, fullgraph=True, backend="aot_eager")(got, "cpu")
    assert_equal_bits(compiled, eager)
    assert_same_bits(got, expected)
    assert [t.requires_grad for t in compiled] == [t.requires_grad for t in eager] == [True] * 6 + [False]
    compiled[0].sum().backward()  # the graph has recorded the weights' new version
    assert torch.equal(got.params[0].grad, torch.full_like(got.params[0], 2.0))


def test_a_wrong_argument_is_named_when_the_function_is_traced():
    case = make(torch.device("cpu"))
    case.exp_avg = case.exp_avg[:3]
    with pytest.raises(TorchRuntimeError, match=r"indexed_adamw_: exp_avg has 3 elements, expected \d+"):
        torch.compile(ADAMW, fullgraph=True, backend="aot_eager")(case, "cpu")


def graphs_of(function: Callable[..., object], calls: list[tuple[object, ...]]) -> int:
    """The number of compiled graphs; more than torch's limit of 8 raise, as a graph break does."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for call in calls:
        compiled(*call)
    return counter.frame_count


def test_device_scalars_make_no_new_graph():
    case = make(torch.device("cpu"))
    calls = []
    for i in range(10):
        case = case.clone()
        case.lr, case.steps = case.lr * 0.9, case.steps + i
        calls.append((case, "cpu"))
    assert graphs_of(ADAMW, calls) == 1


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if op.endswith("all options") or op == "masked_grad_gather_"])
def test_other_masks_of_one_model_share_a_graph(op):
    """The second mask makes sizes and segments dynamic; lengths of 0 and 1 may have a graph of their own."""
    calls = [(make(torch.device("cpu"), seed=seed), "cpu") for seed in range(12)]
    assert graphs_of(FUNCTIONS[op], calls) <= 3


def test_each_length_of_the_lists_has_one_graph():
    cases = [make(torch.device("cpu"), shapes=[(7, 33)] * n) for n in (1, 2, 3)]
    assert graphs_of(ADAMW, [(case, "cpu") for case in cases * 3]) == 3


def states(count: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(old, new), from no change to all elements changed, so that each pair has another number of changes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        new = [torch.randn(40, 50, generator=generator), torch.randn(33, generator=generator)]
        change = [torch.rand(t.shape, generator=generator) < i / (count - 1) for t in new]
        found.append(([torch.where(c, t + 1, t) for t, c in zip(new, change, strict=True)], new))
    return found


def encode_and_apply(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    indices, values, counts = ops.delta_encode(old, new)
    ends = counts.cumsum(0).tolist()
    restored = [t.clone() for t in old]
    ops.delta_apply_(restored, indices, values, [0, *ends[:-1]], ends)
    return restored


def test_the_number_of_changes_makes_no_new_graph():
    assert graphs_of(lambda old, new: ops.delta_encode(old, new)[1] * 2, states(12)) == 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_delta_is_found_and_applied_in_one_graph(compiler):
    compiled = torch.compile(encode_and_apply, fullgraph=True, backend=compiler)
    for old, new in states(5):
        assert_equal_bits(compiled(old, new), new)
    assert counters["stats"]["unique_graphs"] == 1


def test_segments_read_from_a_tensor_are_checked_when_the_graph_runs():
    def apply_counted(dense: list[Tensor], indices: Tensor, values: Tensor, counts: Tensor) -> None:
        ends = counts.cumsum(0).tolist()
        ops.delta_apply_(dense, indices, values, [0, *ends[:-1]], ends)

    dense, indices, values = [torch.zeros(4), torch.zeros(4)], torch.tensor([1, 2, 3]), torch.ones(3)
    compiled = torch.compile(apply_counted, fullgraph=True, backend="aot_eager")
    compiled(dense, indices, values, torch.tensor([2, 1]))
    assert [t.tolist() for t in dense] == [[0, 1, 1, 0], [0, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"delta_apply_: segment 1 is \[2, 5\), expected within \[0, 3\)"):
        compiled(dense, indices, values, torch.tensor([2, 3]))


# CUDA graphs

CAPTURED = [
    *(p for p in COMPILED if p.values[0] != "delta_encode"),
    *((op, "eager", *stored) for op in FUNCTIONS if op != "delta_encode" for stored in STORED.values()),
]


@pytest.fixture(params=["cuda", "triton"])
def gpu_backend(request: pytest.FixtureRequest) -> str:
    if cause := backends.why_unavailable(request.param, "cuda"):
        pytest.skip(f"backend {request.param!r} cannot run: {cause}")
    return request.param


def capture(work: Callable[[], None], warm_up: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, which does not run it; `warm_up` compiles the same kernels for other tensors before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            warm_up()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "compiler", "dtype", "layout"), CAPTURED)
def test_replays_are_eager_calls(op, compiler, dtype, layout, gpu_backend):
    function = FUNCTIONS[op]
    captured = function if compiler == "eager" else torch.compile(function, fullgraph=True, backend=compiler)
    case = make(torch.device("cuda"), dtype=dtype, layout="element" if op in DELTAS else layout)
    expected, got, other = case.clone(), case.clone(), case.clone()
    results: list[Tensor] = []

    def work() -> None:
        results[:] = captured(got, gpu_backend)
        got.steps += 1

    graph = capture(work, lambda: captured(other, gpu_backend))
    assert_same_bits(got, case, "capturing alone")
    for i in range(4):
        eager = function(expected, gpu_backend)
        expected.steps += 1
        graph.replay()
        assert_equal_bits(results, eager)
        assert_same_bits(got, expected, f"replay {i}")
        for c in (expected, got):  # the graph reads the tensors of its capture, with their current content
            c.lr *= 0.5
            c.grad.neg_()
            for g in c.dense_grads:
                g.neg_()


@pytest.mark.gpu
def test_finding_a_delta_inside_a_capture_is_refused(gpu_backend):
    old = [torch.zeros(1000, device="cuda")]
    new = [torch.ones(1000, device="cuda")]
    ops.delta_encode(old, new, backend=gpu_backend)
    with (
        pytest.raises(RuntimeError, match="delta_encode: a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.delta_encode(old, new, backend=gpu_backend)
    assert ops.delta_encode(old, new, backend=gpu_backend)[2].tolist() == [1000]  # the device is still usable
