"""A small model, its training, and comparisons of models and of optimizers bit by bit."""

import copy

import torch


def make_model(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device, dtype)


def loss_of(model, seed):
    """Of random rows, as many elements wide as the rows of the model's first weight."""
    p = next(model.parameters())
    x = torch.randn(8, p.shape[1], generator=torch.Generator().manual_seed(seed)).to(p.device, p.dtype)
    return model(x).square().mean()


def train(model, optimizer, seeds):
    for seed in seeds:
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def same_state(a, b):
    """Whether two optimizers have the same state."""
    return same_entries(a.state_dict()["state"], b.state_dict()["state"])


def same_entries(a, b):
    assert a.keys() == b.keys()
    for key, state in a.items():
        assert state.keys() == b[key].keys()
        for name, value in state.items():
            assert torch.equal(value, b[key][name]) and value.dtype == b[key][name].dtype, (key, name)
    return True


def snapshot(params, optimizer):
    """Everything that a step may change."""
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])


def assert_same(a, b):
    """Of two snapshots."""
    assert all(torch.equal(p, q) for p, q in zip(a[0], b[0], strict=True))
    assert same_entries(a[1], b[1])
