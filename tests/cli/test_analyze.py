from __future__ import annotations

import json

import pytest
import torch

from sparse_opt.analysis import ChangeCounts, count_changes, sum_changes


def test_counts_bits_at_tolerance_zero_and_distances_above():
    inf, nan = float("inf"), float("nan")
    base = torch.tensor([0.0, 1.0, 1.0, 1.0, nan, inf, 1.0, inf])
    now = torch.tensor([-0.0, 1.0, 1.5, 1.001, nan, inf, nan, 1.0])
    # -0 is a change of bits but of no distance; what was NaN or inf and still is did not change.
    assert count_changes(base, now, [0.0, 0.01, 1.0]) == ChangeCounts(numel=8, changed=5, above=(4, 3, 2))


def test_small_steps_of_bf16_are_measured_in_fp32():
    base = torch.tensor([1.0, 256.0], dtype=torch.bfloat16)
    now = torch.tensor([1.0078125, 258.0], dtype=torch.bfloat16)  # one unit in the last place each
    assert count_changes(base, now, [0.0078, 0.0079, 1.9]).above == (2, 1, 1)


def test_empty_tensors_have_share_zero():
    empty = count_changes(torch.empty(0), torch.empty(0), [1e-6])
    assert (empty.share, empty.shares_above) == (0.0, (0.0,))
    assert sum_changes([empty, ChangeCounts(4, 2, (1,))]).share == 0.5


def test_table_and_json_say_what_changed(sparse_opt, files):
    words = ("analyze", "sparsity", "--delta_log_dir", files.delta_log, "--tolerance", 1e-3, "--steps", 1, 3)
    found = json.loads(sparse_opt(*words, "--json").done())
    assert found["tolerances"] == [1e-3]
    assert [step["step"] for step in found["steps"]] == [1, 3]
    last, base, names = files.states[3], files.states[0], files.states[0].keys() - {"lm_head.weight"}
    for name in names:
        moved = (last[name].float() - base[name].float()).abs()
        tensor = found["steps"][1]["tensors"][name]
        assert tensor["changed"] == int((moved != 0).sum()) / moved.numel()
        assert tensor["above"] == [int((moved > 1e-3).sum()) / moved.numel()]
    numel = sum(last[name].numel() for name in names)
    changed = sum(int((last[name] != base[name]).sum()) for name in names)
    assert found["steps"][1]["changed"] == changed / numel
    text = sparse_opt(*words, "--per_tensor", "--include", "*norm*").done()
    assert "> 0.001" in text
    assert "model.norm.weight" in text
    assert "q_proj" not in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--steps", 9), 1, "step 9 is not logged"),
        (("--tolerance", -1), 2, "'tolerance'"),
        (("--include", "nothing*"), 1, "no tensor"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_refuses_in_one_line(sparse_opt, files, words, code, said):
    call = ("analyze", "sparsity", "--delta_log_dir", files.delta_log, *words)
    assert said in sparse_opt(*call).failed_in_one_line(code)
