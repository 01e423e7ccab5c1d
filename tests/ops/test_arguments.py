"""Invalid arguments raise an error that names the tensor, the value found and the value expected."""

import inspect

import pytest
import torch
from cases import make, step_call

from sparse_opt import BackendUnavailable, backends, ops
from sparse_opt.ops import STEP_OPS


def step(op, case, **changes):
    """The step op with all arguments by name; `state0` and `state1` are its states."""
    names = list(inspect.signature(getattr(ops, op)).parameters)
    positional, keywords = step_call(op, case)
    states = {f"state{i}": name for i, name in enumerate(STEP_OPS[op].states)}
    changes = {states.get(name, name): value for name, value in changes.items()}
    getattr(ops, op)(**{**dict(zip(names, positional, strict=False)), **keywords, **changes})


BAD = {
    "dtype of a parameter": (
        lambda c: {"params": [c.params[0].double(), *c.params[1:]]},
        r"params\[0\] is torch.float64, expected bfloat16 or float16 or float32",
    ),
    "mixed dtypes": (
        lambda c: {"params": [*c.params[:1], c.params[1].half(), *c.params[2:]]},
        r"params\[1\] is torch.float16, but params\[0\] is torch.float32",
    ),
    "layout": (
        lambda c: {"params": [torch.empty(33, 7).t(), *c.params[1:]]},
        r"params\[0\] of shape \[7, 33\] has strides \[1, 7\], expected contiguous",
    ),
    "device": (lambda c: {"params": [c.params[0].to("meta"), *c.params[1:]]}, r"params\[0\] is on meta, expected cpu"),
    "index dtype": (lambda c: {"indices": c.indices.short()}, r"indices is torch.int16, expected int32 or int64"),
    "segment out of range": (
        lambda c: {"ends": [*c.ends[:-1], c.indices.numel() + 1]},
        r"segment 5 is \[\d+, \d+\), expected within \[0, \d+\)",
    ),
    "overlap": (
        lambda c: {"starts": [c.starts[0], c.starts[0], *c.starts[2:]]},
        "segments overlap at|has .* slots, but",
    ),
    "too many slots": (
        lambda c: {"starts": [1] * 6, "ends": [1, 9, 9, 9, 9, 9]},
        r"segment 1 has 8 slots, but params\[1\] has 1 elements",
    ),
    "list lengths": (lambda c: {"starts": c.starts[1:]}, "starts holds 5 and ends 6 numbers, params holds 6 tensors"),
    "no gradient": (lambda c: {"grad": None}, "neither of grad and dense_grads given, expected exactly one"),
    "gradient shape": (
        lambda c: {"grad": None, "dense_grads": [c.dense_grads[0].view(-1), *c.dense_grads[1:]]},
        r"dense_grads\[0\] has shape \[231\], params\[0\] has \[7, 33\]",
    ),
    "state dtype": (lambda c: {"state0": c.exp_avg.half()}, "STATE0 is torch.float16, expected float32 or bfloat16"),
    "state length": (lambda c: {"state0": c.exp_avg[:-1]}, r"STATE0 has \d+ elements, expected \d+"),
    "master dtype": (lambda c: {"master": c.master.bfloat16()}, "master is torch.bfloat16, expected float32"),
    "weights and master": (
        lambda c: {"weights": c.master, "master": c.master},
        "both of master and weights given, expected at most one",
    ),
    "no master": (lambda c: {"params_hold_master": True}, "params_hold_master is True, but master is None"),
    "lr": (
        lambda c: {"lr": torch.tensor([1e-3, 1e-3])},
        r"lr is torch.float32 of shape \[2\], expected one float32 element",
    ),
    "steps": (lambda c: {"steps": c.steps[:2]}, "steps has 2 elements, expected 6"),
    "seed": (lambda c: {"seed": -1}, "seed is -1, expected 0 <= seed"),
    "run length": (lambda c: {"run_length": 12}, "run_length is 12, expected a power of two from 1 to 1073741824"),
}


def changes_an_argument_of(op, what):
    names = {*inspect.signature(getattr(ops, op)).parameters, *("state0", "state1")[: len(STEP_OPS[op].states)]}
    return names >= set(BAD[what][0](make(torch.device("cpu"))))


@pytest.mark.parametrize(
    ("op", "what"), [(op, what) for op in STEP_OPS for what in BAD if changes_an_argument_of(op, what)]
)
def test_steps(op, what):
    case = make(torch.device("cpu"))
    before = case.clone()
    change, message = BAD[what]
    for i, name in enumerate(STEP_OPS[op].states):
        message = message.replace(f"STATE{i}", name)
    with pytest.raises(ValueError, match=f"{op}: " + message if "|" not in message else message):
        step(op, case, **change(case))
    assert all(torch.equal(a, b) for a, b in zip(case.params, before.params, strict=True))


@pytest.mark.parametrize("op", STEP_OPS)
def test_a_state_that_the_options_need(op):
    case = make(torch.device("cpu"))
    for state, option in STEP_OPS[op].optional.items():
        with pytest.raises(ValueError, match=f"{op}: {option} is 0.9 but {state} is None"):
            step(op, case, **{option: 0.9, state: None})


@pytest.mark.parametrize("op", STEP_OPS)
def test_tensors_that_are_not_optional(op):
    case = make(torch.device("cpu"))
    for name in {*STEP_OPS[op].states, "lr", "steps"} - STEP_OPS[op].optional.keys():
        with pytest.raises(ValueError, match=f"{op}: {name} is None, expected a tensor"):
            step(op, case, **{name: None})


def test_nesterov_needs_momentum_without_dampening():
    message = "nesterov needs momentum > 0 and dampening 0, found momentum 0.9 and dampening 0.1"
    with pytest.raises(ValueError, match=f"indexed_sgd_: {message}"):
        step("indexed_sgd_", make(torch.device("cpu")), nesterov=True)


def test_other_ops():
    c = make(torch.device("cpu"))
    segments = (c.indices, c.starts, c.ends)
    with pytest.raises(ValueError, match=r"indexed_swap_: compact is torch.bfloat16, expected float32"):
        ops.indexed_swap_(c.params, c.grad.bfloat16(), *segments)
    with pytest.raises(ValueError, match=r"indexed_replace_: after has \d+ elements, expected \d+"):
        ops.indexed_replace_(c.params, c.grad, c.grad[:-1], *segments)
    with pytest.raises(ValueError, match=r"masked_grad_gather_: sum_sq has 2 elements, expected 6"):
        ops.masked_grad_gather_(c.grad, c.dense_grads, *segments, sum_sq=torch.zeros(2))
    with pytest.raises(ValueError, match=r"delta_encode: old\[1\] has shape \[2\], new\[1\] has \[1\]"):
        ops.delta_encode([c.params[0], torch.zeros(2)], c.params[:2])
    with pytest.raises(ValueError, match=r"delta_apply_: values has 4 elements"):
        ops.delta_apply_(c.params, c.indices, c.grad[:4], c.starts, c.ends)


def test_narrow_indices():
    case = make(torch.device("cpu"), layout="narrow")
    segments = (case.indices, case.starts, case.ends)
    swap = ops.indexed_swap_
    with pytest.raises(ValueError, match=r"indices is torch.uint16, expected int32 or int64"):
        swap(case.params, case.grad, *segments)
    with pytest.raises(ValueError, match=r"index_bases has \d+ elements, expected \d+"):
        swap(case.params, case.grad, *segments, index_bases=case.index_bases[1:])
    with pytest.raises(ValueError, match=r"run_length is 2, expected 1 with index_bases"):
        swap(case.params, case.grad, *segments, index_bases=case.index_bases, run_length=2)
    with pytest.raises(ValueError, match="expected ascending segments with index_bases"):
        swap(
            case.params[:2],
            case.grad[:4],
            torch.zeros(4, dtype=torch.uint16),
            [3, 1],
            [4, 2],
            index_bases=torch.zeros(2, dtype=torch.int32),
        )
    far = torch.tensor([0, 70_000, 3, 2**31], dtype=torch.int64)
    with pytest.raises(ValueError, match=r"segment 0 has positions .* from 0 to 70000 past the first"):
        ops.narrow_indices(far, [0], [2])
    with pytest.raises(ValueError, match=r"segment 1 has .* up to 2147483648; expected"):
        ops.narrow_indices(far, [2, 3], [3, 4])
    assert not ops.can_narrow(far[:2]) and not ops.can_narrow(far[3:])
    assert ops.can_narrow(far[:1]) and ops.can_narrow(far[:0])
    even = torch.arange(0, 1 << 20, 257)  # 256 of them reach 65535
    assert ops.can_narrow(even) and not ops.can_narrow(even + torch.arange(even.numel()))


@pytest.mark.parametrize(
    ("run_length", "ends", "message"),
    [
        (12, [32], "run_length is 12, expected a power of two from 1 to 1073741824"),
        (16, [24], r"segment 0 is \[0, 24\), expected multiples of run_length 16"),
        (16, [48], r"segment 0 is \[0, 48\), expected within \[0, 32\)"),
        (8, [16], "compact has 32 elements, expected 16"),
    ],
)
def test_runs_are_checked_also_past_the_python_layer(run_length, ends, message):
    if backends.native_module()[0] is None:
        pytest.skip("needs the extension: " + backends.native_module()[1])
    dense, compact, indices = torch.zeros(64), torch.ones(32), torch.tensor([0, 40])
    with pytest.raises(ValueError, match=message):
        torch.ops.sparse_opt_native.indexed_swap_([dense], compact, indices, [0], ends, run_length=run_length)
    assert not dense.any()
    torch.ops.sparse_opt_native.indexed_swap_([dense], compact, indices, [0], [32], run_length=16)
    assert dense.nonzero().view(-1).tolist() == [*range(16), *range(40, 56)]


def test_an_explicit_backend_runs_or_raises(monkeypatch):
    case = make(torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="'cuda' .* cannot run: it runs on cuda tensors, these are on cpu"):
        step("indexed_adamw_", case, backend="cuda")
    with pytest.raises(
        BackendUnavailable, match="'fast' .* no backend has this name; there are reference, cpu, triton, cuda"
    ):
        step("indexed_adamw_", case, backend="fast")
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "cuda")
    with pytest.raises(BackendUnavailable, match="SPARSE_OPT_BACKEND"):
        step("indexed_adamw_", case)
    step("indexed_adamw_", case, backend="reference")  # the argument outranks the environment


def test_a_missing_extension_keeps_its_cause(monkeypatch):
    monkeypatch.setattr(backends, "native_module", lambda: (None, "undefined symbol: torch_something"))
    with pytest.raises(BackendUnavailable, match="undefined symbol: torch_something"):
        backends.choose("cpu", "cpu")
    backends._warn_slow_auto.cache_clear()
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    with pytest.warns(UserWarning, match="runs backend 'reference' on cpu: 'cpu' is unavailable: undefined symbol"):
        assert backends.choose("cpu") == "reference"


def keyword_arguments(function):
    """Name -> default, None without one, as in a schema."""
    keywords = (p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
    return {p.name: None if p.default is p.empty else p.default for p in keywords}


@pytest.mark.parametrize("op", backends.OPS)
def test_the_arguments_and_defaults_of_an_op_are_those_of_its_triton_launcher(op):
    triton, cause = backends.triton_module()
    if triton is None:
        pytest.skip(f"needs triton for the launchers: {cause}")
    expected = keyword_arguments(getattr(ops, op))
    required_there = {"backend", *(STEP_OPS[op].options if op in STEP_OPS else ())}
    launched = {name: default for name, default in expected.items() if name not in required_there}
    assert keyword_arguments(getattr(triton, op)) == launched
