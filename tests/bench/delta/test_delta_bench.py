"""The benchmark of patches at a size that takes no time, and the sizes that it computes against plain loops."""

import math
from collections import Counter

import pytest
import torch

from sparse_opt.bench import report, rows
from sparse_opt.bench.delta import bench as delta
from sparse_opt.bench.delta import peers as delta_peers
from sparse_opt.bench.delta.data import KINDS, entropy_bytes, make_step
from sparse_opt.delta import codec as patch_codec

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--numel", "200000", "--peer_numel", "50000", "--n_rounds", "2"]


def bits(tensor: torch.Tensor) -> list[int]:
    return [word & 0xFFFF for word in tensor.view(torch.int16).tolist()]


def ordered(word: int) -> int:
    return 0xFFFF - word if word >> 15 else word | 0x8000


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=lambda kind: kind.name)
def test_the_computed_entropy_is_that_of_a_plain_loop(kind):
    step = make_step(kind, {"a": (37, 80), "b": (500,)}, CPU)
    given, joint = Counter(), Counter()
    for old, new in zip(step.old, step.new, strict=True):
        for a, b in zip(bits(old.view(-1)), bits(new.view(-1)), strict=True):
            given[a >> 7 & 0xFF] += 1
            joint[a >> 7 & 0xFF, ordered(b) - ordered(a)] += 1
    entropy = -sum(count * math.log2(count / given[c]) for (c, _), count in joint.items())
    assert 8 * entropy_bytes(step.old, step.new) == pytest.approx(entropy, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_steps_change_the_share_that_their_kind_says(kind):
    step = make_step(kind, {"a": (512, 512), "b": (2**17,)}, CPU)
    density = kind.density or 1.0
    assert step.changed / step.numel == pytest.approx(kind.share * density, rel=0.05)
    if step.mask is not None:
        for name, old, new in zip(step.mask.names, step.old, step.new, strict=True):
            changed = (old.view(-1) != new.view(-1)).nonzero().view(-1)
            assert set(changed.tolist()) <= set(step.mask[name].tolist())


def test_every_coder_is_checked_timed_compared_and_written(tmp_path, capsys, needs_extension):
    path = tmp_path / "new" / "delta.json"
    threads = torch.get_num_threads()
    assert delta.main([*SMALL, "--output", str(path)]) == 0
    assert torch.get_num_threads() == threads
    run = rows.read(path)
    assert run.completed and run.wrong == []
    for kind in KINDS:
        coders = {row.case["coder"] for row in run.matching(change=kind.name)}
        assert "patch" in coders
        assert ("patch, over the mask" in coders) == (kind.name == "mask")
    values = {row.metric: row for row in run.matching(coder="patch", change="1.2%")}
    numel = 200_000
    assert values["of raw"].value == pytest.approx(values["size"].value * values["changed"].value * numel / (2 * numel))
    assert values["encode rate"].value == pytest.approx(2 * numel / values["encode"].value / 1e6)
    assert values["size"].value > values["size"].peers["entropy"] > 0
    (masked,) = [row for row in run.matching(coder="patch, over the mask") if row.metric == "size"]
    assert report.ratio(run, masked, "whole") < 1
    peers = {peer.name for peer in delta_peers.PEERS}
    absent = {note.split(": ")[1] for note in run.notes if note.startswith("not timed")}
    assert peers <= absent | {row.case["coder"] for row in run.rows}
    assert "patch, over the mask" in capsys.readouterr().out
    # At this size tables weigh so much that the entropy is missed.
    assert any(verdict.target == "<= 1.05 x entropy" and not verdict.met for verdict in report.judge(run))


def test_a_wrong_patch_is_not_timed(monkeypatch, tmp_path, capsys, needs_extension):
    true_apply = patch_codec.apply_

    n_calls = 0

    def apply_(dense, patch, **options):
        nonlocal n_calls
        true_apply(dense, patch, **options)
        n_calls += 1
        if n_calls == 1:
            dense[0].view(torch.int16)[7] ^= 1

    monkeypatch.setattr(patch_codec, "apply_", apply_)
    path = tmp_path / "delta.json"
    assert delta.main([*SMALL, "--cases", "1.2%,2.6%", "--output", str(path)]) == 1
    assert "WRONG RESULT: patch, 1.2%: 1 of 200000 elements are wrong" in capsys.readouterr().err
    assert {row.case["change"] for row in rows.read(path).matching(coder="patch")} == {"2.6%"}


def test_a_peer_that_breaks_is_told_and_the_rest_goes_on(monkeypatch, tmp_path, needs_extension):
    class Broken(delta_peers.Peer):
        name, package, module = "broken", "torch", "torch"

        def __init__(self, threads):
            raise MemoryError("no room\nfor it")

    class Away(Broken):
        name, package, module = "away", "no-such", "no_such_package"

    monkeypatch.setattr(delta, "PEERS", (Broken, Away))
    path = tmp_path / "delta.json"
    delta.main([*SMALL, "--cases", "1.2%", "--output", str(path)])
    run = rows.read(path)
    assert run.notes[-2:] == [
        "not timed: broken: FAILED: MemoryError: no room",
        "not timed: away: not installed (no-such)",
    ]
    assert run.completed


def test_activation_of_a_delta(tmp_path):
    out = tmp_path / "rows.json"
    words = ["--activate", "--device", "cpu", "--numel", "100000", "--n_rounds", "1", "--output", str(out)]
    assert delta.main(words) == 0
    found = {(row.case["pattern"], row.case["from"]) for row in rows.read(out).rows}
    assert found == {(p, f) for p in ("element", "tile64") for f in ("the base", "another delta")}
