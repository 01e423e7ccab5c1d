"""Options that a benchmark refuses before any work: exit code 2, and one line that names the option."""

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[test]'")

from sparse_opt import backends
from sparse_opt.cli.main import main

REFUSED = {
    "grpo_engine": [
        ("--small --modes dense,other", "--modes dense,other: expected some of dense, lora, tiles, tiles_sent"),
        ("--device cpu", "on a CPU only --small runs"),
        ("--device cpu --n_prompts 1 --micro_batch_size 3", "--micro_batch_size 3 does not divide 8"),
    ],
    "scale --small": [
        ("--base nf4", "--base nf4 is not valid with trl, and needs --modes of lora,sparse,tiles"),
        ("--shapes 32b", "--shapes 32b: expected some of tiny, tiny_qwen2, tiny_moe"),
        ("--sequence_length 7", "--sequence_length is 7, expected at least 8"),
    ],
    "distributed --small": [
        ("--networks sockets", "--networks sockets: expected some of default"),
        ("--gpus 0", "--gpus 0: expected 1"),
        ("--dpo", "--dpo needs --variants with sparse variants only"),
    ],
    "weight_sync --small": [
        ("--variants element", "--variants element: expected some of"),
    ],
    "verl --small": [
        ("--batch_size 3", "--batch_size 3 is no multiple of --micro_batch_size 2"),
        ("--gpus 1", "--gpus is 1, expected at least 2"),
    ],
    "delta --device cpu": [
        ("--cases 1.2%,3%", "--cases 1.2%,3%: expected some of 1.2%, 2.6%"),
        ("--peer_numel 4095", "--peer_numel is 4095, expected at least 4096"),
    ],
    "baseline trl --small": [
        ("--modes lora", "--modes lora: expected some of dense, sparse, tiles"),
        ("--compile", "--compile is not valid with trl"),
    ],
    "baseline dpo --small": [
        ("--modes dense,fast", "--modes dense,fast: expected some of dense, adamw8bit, galore, sparse,"),
        ("--modes tiles --density 0.001", "density 0.001 is less than one unit of tile64 in each tensor"),
        ("--modes dense,lora --mlp_only", "--modes dense,lora draws none"),
        ("--delta_log --modes dense,lora", "--delta_log: --modes dense,lora: expected some of"),
        ("--modes dense --lean", "--lean is of sparse, tiles, attention, experts; "),
        ("--modes experts --density 0.25", "the model has no parameter of experts"),
        ("--exclude *", "no tensor of the model is chosen by include, exclude and mlp_only"),
        ("--dataset pairs.jsonl", "--dataset pairs.jsonl needs a model"),
        ("--modes lora --cuda_graphs", "--cuda_graphs is of dpo, and needs --modes of sparse"),
        ("--sequence_length 8 --prompt_share 0.9", "0.9 of 8 tokens is a prompt of 7, expected 1 to 6"),
    ],
    "baseline grpo": [
        ("--small --sequence_length 64", "--sequence_length is 64, expected at least 129"),
        ("--device cpu --model_name m --dataset /nowhere.jsonl", "--dataset /nowhere.jsonl: no such file"),
    ],
    "profiles": [
        ("--repeats 0", "--repeats is 0"),
        ("--profiles balance", "balance"),
        ("--model_name_or_path m", "expected all of --model_name_or_path, --dataset_name and --test_dataset_name, or"),
        ("--model_name_or_path m --dataset_name d --test_dataset_name t", "expected --max_completion_length with"),
        ("--repeat 2", "the nearest is 'repeats'"),
    ],
}
CASES = [(suite, words, message) for suite, cases in REFUSED.items() for words, message in cases]


@pytest.mark.parametrize(("suite", "words", "message"), CASES)
def test_options_that_are_refused(suite, words, message, tmp_path, monkeypatch, capsys):
    if suite.startswith("delta") and (cause := backends.why_unavailable("cpu", "cpu")):
        pytest.skip(f"needs the native extension: {cause}")
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)
    command = ["bench", *suite.split(), *words.split(), "--output", str(tmp_path / "rows.json")]
    assert main(command) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "warning: " not in line]  # of packages that are imported
    assert out == "" and len(lines) == 1 and message in lines[0], err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("verl") is not None, reason="needs an environment without verl")
def test_the_package_of_a_benchmark_that_is_missing(capsys):
    assert main(["bench", "verl", "--small"]) == 2
    assert "verl is not installed here: `make test-verl`" in capsys.readouterr().err
