"""load_state_dict checks a state before it changes anything, and runs torch's hooks."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparse_opt import MaskSet, SparseAdamW


def make_params(device):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": ((4, 6), torch.float32), "b": ((10,), torch.bfloat16), "frozen": ((3,), torch.float32)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(device, d)) for n, (s, d) in shapes.items()}


def build(device, kind=SparseAdamW, **options):
    params = make_params(device)
    mask = MaskSet.random({n: params[n] for n in "ab"}, density=0.5)
    groups = [{"params": [(n, params[n]) for n in ("a", "frozen")]}, {"params": [("b", params["b"])], "lr": 1e-3}]
    return params, kind(groups, mask, lr=1e-2, **options)


def backward(params, seed):
    generator = torch.Generator().manual_seed(seed)
    used = [p for p in params.values() if p.requires_grad]
    sum((p * torch.randn(p.shape, generator=generator).to(p)).float().sum() for p in used).backward()


def trained(device, kind=SparseAdamW, **options):
    params, optimizer = build(device, kind, **options)
    for seed in range(2):
        backward(params, seed)
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


def snapshot(params, optimizer):
    """Everything that a refused load must not change."""
    groups = [
        (i, name, repr(value) if name != "params" else [id(p) for p in value])
        for i, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
    ]
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    tensors = [p.detach().clone() for p in params.values()]
    tensors += [value for values in saved.values() for value in values.values()]
    tensors += [state for p in params.values() for state in optimizer.state.get(p, {}).values()]
    grads = [optimizer.compact_grad(p) if optimizer.grads == "compact" else p.grad for p in params.values()]
    return groups, [t.clone() for t in tensors], [None if g is None else g.clone() for g in grads]


def assert_same(before, after):
    assert before[0] == after[0]
    assert len(before[1]) == len(after[1])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    for a, b in zip(before[2], after[2], strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


DELETE = object()
JUNK = {
    "gone": DELETE,
    "none": None,
    "nan": float("nan"),
    "text": "x",
    "dict": {"x": 1},
    "unhashable": [[]],
    "tensor": torch.ones(2),
    "meta": torch.empty(12, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "double": torch.ones(12, dtype=torch.float64),
}


def paths(node, path=()):
    """Of everything in nested dictionaries and lists."""
    yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, (*path, key))
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from paths(value, (*path, i))


def replaced(node, path, value):
    """A copy in which `value` is at the path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(node, tuple):
        return tuple(replaced(list(node), path, value))
    changed = copy.copy(node)
    if not rest and value is DELETE:
        del changed[key]
    else:
        changed[key] = replaced(node[key], rest, value)
    return changed


def damaged(saved):
    """(what was done, a damaged copy) for every part of a valid state."""
    for path in paths(saved):
        for name, junk in JUNK.items():
            if path or junk is not DELETE:
                yield f"{path} {name}", replaced(saved, path, junk)
        node = saved
        for key in path:
            node = node[key]
        if isinstance(node, dict):
            for key in ("more", 7, None):
                yield f"{path} and {key!r}", replaced(saved, path, {**node, key: torch.ones(3)})
        if isinstance(node, list):
            yield f"{path} longer", replaced(saved, path, [*node, *node[:1]])
            yield f"{path} reversed", replaced(saved, path, node[::-1])
        if isinstance(node, torch.Tensor):
            for change in ("double", "bfloat16", "to_sparse", "neg", "isnan"):
                yield f"{path} {change}", replaced(saved, path, getattr(node, change)())
            if node.dim():
                yield f"{path} shorter", replaced(saved, path, node[:-1])
                yield f"{path} flipped", replaced(saved, path, node.flip(0))


def load_error(optimizer, state):
    """The message of the ValueError that refuses the state, or None if it is loaded."""
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("options", [{}, {"amp_scaling": True}, {"grads": "dense"}], ids=["", "scaler", "dense"])
def test_a_damaged_state_is_refused_or_loaded(sparse_optimizer, options):
    """Only on the CPU: there are thousands of loads, and each would synchronize a GPU."""

    def with_gradients():
        params, optimizer = trained(torch.device("cpu"), sparse_optimizer, **options)
        saved = copy.deepcopy(optimizer.state_dict())
        backward(params, 7)
        optimizer.clip_grad_norm_(0.5)
        return params, optimizer, saved, snapshot(params, optimizer)

    params, optimizer, saved, before = with_gradients()
    refused = loaded = 0
    for what, state in damaged(saved):
        if (error := load_error(optimizer, state)) is not None:
            assert "\n" not in error and len(error) < 500, what
            assert_same(before, snapshot(params, optimizer))
            refused += 1
        else:
            backward(params, 3)
            optimizer.step()  # with what was loaded
            params, optimizer, _, before = with_gradients()
            loaded += 1
    assert refused > 200 and loaded > 10
    optimizer.load_state_dict(saved)


MESSAGES = {
    "no-state": (lambda s: {"param_groups": s["param_groups"]}, "the saved state has no 'state'"),
    "option": (lambda s: replaced(s, ("param_groups", 1, "lr"), DELETE), "group 1 of the saved state has no .* 'lr'"),
    "lr": (lambda s: replaced(s, ("param_groups", 1, "lr"), "x"), "group 1 of the saved state: lr is 'x', expected"),
    "twice": (lambda s: replaced(s, ("param_groups", 1, "params"), [0]), "names parameter 0 twice"),
    "foreign": (lambda s: replaced(s, ("state",), {**s["state"], 9: {}}), "a state for 9, which is in no"),
    "value": (lambda s: replaced(s, ("state", 0, "exp_avg"), 1.0), "'a': 'exp_avg' was saved as a float, expected"),
    "groups": (lambda s: replaced(s, ("param_groups", 0, "params"), [0]), r"of \[1, 1\] .* optimizer of \[2, 1\]"),
    "mask": (lambda s: replaced(s, ("state", 0, "indices"), s["state"][0]["indices"] ^ 1), "'a' was .* another mask"),
    "dtype": (
        lambda s: replaced(s, ("state", 0, "exp_avg"), s["state"][0]["exp_avg"].bfloat16()),
        r"exp_avg was saved as torch.bfloat16 .* expected torch.float32",
    ),
    "base": (lambda s: replaced(s, ("state", 0, "base"), DELETE), "'a' was saved without base"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_wrong_is_named(name, device):
    damage, message = MESSAGES[name]
    params, optimizer = trained(device)
    backward(params, 7)
    before = snapshot(params, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damage(copy.deepcopy(optimizer.state_dict())))
    assert_same(before, snapshot(params, optimizer))


def test_a_refused_load_leaves_a_scalers_gradients(device):
    """The parameter that a GradScaler sees stays at the end of the first group, and the scale is still removed."""
    runs = [trained(device, amp_scaling=True) for _ in range(2)]
    saved = copy.deepcopy(runs[0][1].state_dict())
    del saved["state"][0]["exp_avg"]
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    for i, (params, optimizer) in enumerate(runs):
        scaler.scale(sum(p.float().square().sum() for p in params.values() if p.requires_grad)).backward()
        if i == 0:
            n = len(optimizer.param_groups[0]["params"])
            with pytest.raises(ValueError, match="'a' was saved with"):
                optimizer.load_state_dict(saved)
            assert len(optimizer.param_groups[0]["params"]) == n == 3
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(runs[0][0].values(), runs[1][0].values(), strict=True))


def test_options_of_schedulers_and_users_are_loaded_too(device):
    _, optimizer = trained(device)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    optimizer.param_groups[0]["note"] = ["mine"]
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = build(device)
    other.load_state_dict(saved)
    for group, expected in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}
    saved["param_groups"][0]["note"].append("changed")
    assert other.param_groups[0]["note"] == ["mine"]


def test_an_option_that_cannot_be_copied(device):
    params, optimizer = trained(device)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["note"] = (i for i in range(3))
    before = snapshot(params, optimizer)
    with pytest.raises(ValueError, match="group 0 of the saved state: option 'note' can't be copied"):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(params, optimizer))


def test_load_hooks_run_as_in_torch(device):
    _, optimizer = trained(device)
    saved = copy.deepcopy(optimizer.state_dict())
    calls = []

    def halve(opt, state):
        assert opt is optimizer and state is not saved
        calls.append("halve")
        state["param_groups"] = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]

    def replace(opt, state):
        calls.append("replace")
        return {**state, "param_groups": [{**group, "lr": group["lr"] + 1} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_pre_hook(halve, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append(opt.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert calls == ["halve", "replace", 1 + 1e-2 / 2]
    assert [group["lr"] for group in saved["param_groups"]] == [1e-2, 1e-3]
    assert [group["lr"] for group in optimizer.param_groups] == [1 + 1e-2 / 2, 1 + 1e-3 / 2]


def test_a_load_hook_that_fails_changes_nothing_and_no_post_hook_runs(device):
    params, optimizer = trained(device)
    backward(params, 7)
    before, after = snapshot(params, optimizer), []
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: {"state": {}})
    optimizer.register_load_state_dict_post_hook(after.append)
    with pytest.raises(ValueError, match="the saved state has no 'param_groups'"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert not after
    assert_same(before, snapshot(params, optimizer))


def test_state_dict_hooks_run_as_in_torch(device):
    _, optimizer = trained(device)
    calls = []

    def before(opt):
        calls.append("before")
        opt.param_groups[0]["lr"] = 0.25

    def after(opt, state):
        calls.append("after")
        assert all("indices" in values for values in state["state"].values())
        return {**state, "more": 1}

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after)
    saved = optimizer.state_dict()
    assert calls == ["before", "after"]
    assert saved["more"] == 1 and saved["param_groups"][0]["lr"] == 0.25
    assert all("indices" not in values for values in optimizer.state.values())
    optimizer.load_state_dict(saved)


def test_step_hooks_run_as_in_torch(sparse_optimizer, device):
    params, optimizer = trained(device, sparse_optimizer)
    steps, everywhere = [], []

    def before(opt, args, kwargs):
        steps.append(opt.state[params["a"]]["step"].item())
        return (opt,), {"closure": lambda: 5.0}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: steps.append(opt.state[params["a"]]["step"].item()))
    handle = register_optimizer_step_pre_hook(lambda opt, *_: everywhere.append(opt))
    try:
        backward(params, 5)
        assert optimizer.step() == 5.0
    finally:
        handle.remove()
    assert steps == [2.0, 3.0] and everywhere == [optimizer]
