"""Invalid files and options: an error of one line that names them, exit code 2 or 1, and never a traceback.

A wrong call ends with 2, a file that cannot be used with 1.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile

import pytest
import torch

from sparse_opt.tensors import metadata_digest

DEEP = b"[" * 100_000
LARGE = "1" + "0" * 23
ROLLOUT = ("--n_generations", 2, "--max_completion_length", 4, "--reward_functions", "boxed_format")
WORDS = {"sft": (), "dpo": (), "grpo": ROLLOUT, "ppo": (*ROLLOUT, "--gradient_accumulation_steps", 1)}


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return file


@pytest.fixture
def train(sparse_opt, files, prompts, tmp_path):
    """`train("sft", *words)`: a run of a step on the tiny model into tmp_path/out."""

    def call(algorithm, *words, dataset=None, model=files.model):
        data = dataset or (prompts if algorithm in ("grpo", "ppo") else files.pairs)
        where = ("--policy_name", model, "--dataset", data, "--output_dir", tmp_path / "out", "--delta_log_dir", "none")
        shape = ("--n_steps", 1, "--batch_size", 2, "--device", "cpu", "--dtype", "fp32", "--max_length", 64)
        return sparse_opt("train", algorithm, *where, *shape, *WORDS[algorithm], *words)

    return call


# Options


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "1e39"])
@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        *(("sft", name) for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")),
        ("sft", "max_grad_norm"),
        *(("dpo", name) for name in ("beta", "label_smoothing")),
        *(("grpo", name) for name in ("temperature", "top_p", "epsilon", "epsilon_high", "reward_weights")),
        *(("grpo", name) for name in ("eval_temperature", "vllm_gpu_memory_utilization")),
        *(("ppo", name) for name in ("gamma", "gae_lambda", "clip_range", "value_clip_range", "value_coefficient")),
        *(("ppo", name) for name in ("value_head_learning_rate", "kl_coefficient", "kl_target", "kl_horizon")),
    ],
)
def test_a_float_that_is_none_to_compute_with(train, algorithm, option, value):
    assert f"option '{option}'" in train(algorithm, f"--{option}={value}").failed_in_one_line(2)


@pytest.mark.parametrize(
    ("algorithm", "option", "value", "said"),
    [
        ("sft", "seed", LARGE, "expected -9223372036854775808 to 18446744073709551615"),
        ("sft", "seed", f"-{LARGE}", "expected -9223372036854775808 to 18446744073709551615"),
        ("sft", "seed", "1" * 5000, "expected int"),
        *(("sft", name, LARGE, "expected at most 2147483647") for name in ("n_steps", "batch_size", "max_length")),
        ("sft", "gradient_accumulation_steps", 2**31 - 1, "expected at most 2147483647"),
        ("sft", "save_steps", 0, "expected at least 1"),
        ("sft", "adam_beta1", 1, "expected at least 0, less than 1"),
        ("grpo", "n_minibatches", 2**31 - 1, "expected at most 2147483647"),
        ("grpo", "temperature", "1e-300", "expected at least 1e-06"),
        ("sft", "delta_log_steps", "9" * 5000, "cannot read"),
        *(("sft", "device", name, "expected auto, cpu, cuda or") for name in ("meta", "tpu:x", "mps", "xpu", "")),
        ("sft", "resume_step", -1, "expected at least 0"),
        ("sft", "resume_step", 3, "it is used with --resume only"),
    ],
)
def test_an_option_out_of_range(train, algorithm, option, value, said):
    line = train(algorithm, f"--{option}={value}").failed_in_one_line(2)
    assert said in line and len(line) < 700


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("quickstart", ("--seed", LARGE)),
        ("quickstart", ("--device", "meta")),
        ("mask", ("random", "--density", "nan", "--seed", LARGE)),
        ("bench", ("baseline", "dpo", "--small", "--seed", LARGE)),
        ("bench", ("baseline", "dpo", "--small", "--learning_rate", "nan")),
        ("bench", ("baseline", "dpo", "--device", "meta")),
        ("bench", ("baseline", "dpo", "--device", "gpu")),
    ],
)
def test_numbers_and_devices_of_other_commands(sparse_opt, files, tmp_path, command, words):
    rest = ("--model_name", files.model, "--output", tmp_path / "x.safetensors") if command == "mask" else ()
    sparse_opt(command, *words, *rest).failed_in_one_line(2)


# Configuration files

# Each key is a list of nine times the one before: a few hundred bytes for 9^8 values.
ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b",".join([b"*%c" % (letter - 1)] * 9)) for letter in b"bcdefghi"
)


@pytest.mark.parametrize(
    "content",
    [
        b"text", b"- 1\n", b"3", bytes(range(256)), b"\0" * 100, "seed: é".encode("latin-1"), DEEP, b"{a: " * 20_000,
        b"seed: &a [*a]\n", b"seed: *x\n", b"run_name: 2020-99-99\n", b"seed: " + b"9" * 5000, b"seed: !x 1\n",
        b"learning_rate: .inf\n", b"learning_rate: " + b"9" * 400, b'output_dir: "a\\0b"\n', b'output_dir: "\\udcff"\n',
        b"seed: true\n", b"report_to: [[1]]\n", b"3: 4\n", b"? [a, b]\n: 1\n", b"seed: 1\n---\nseed: 2\n",
        ALIASES,
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_a_config_file_that_is_none(train, tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    line = train("sft", "--config", file).failed_in_one_line(2)
    assert str(file) in line and len(line) < 1000


@pytest.mark.parametrize("content", [b"", b"text", bytes(range(256)), DEEP], ids=lambda content: repr(content[:20]))
def test_a_profile_that_is_none(sparse_opt, files, tmp_path, content):
    file = tmp_path / "profile.yaml"
    file.write_bytes(content)
    words = ("--policy_name", files.model, "--dataset", files.pairs, "--profile", file)
    assert str(file) in sparse_opt("train", "rft", "train", *words).failed_in_one_line(2)


def test_a_folder_in_place_of_a_config_file(train, tmp_path):
    assert f"config file {tmp_path}: Is a directory" in train("sft", "--config", tmp_path).failed_in_one_line(2)


# Datasets

PAIR = b'{"prompt": "What?", "chosen": "a", "rejected": "b"}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "no rows, only blank lines"),
        (PAIR * 3 + PAIR.replace(b"What", b"Wh\xe9t"), "line 4: not UTF-8: byte 0xe9 at column 15"),
        ((PAIR.decode() * 2).encode("utf-16"), "line 1: not UTF-8: byte 0xff at column 1"),
        (b"\0" * 5000, "line 1: has a NUL byte"),
        (PAIR * 3 + b"\0" * 100, "line 4: has a NUL byte"),
        (bytes(range(1, 256)), "line 1: begins with"),
        (b"text\n", "line 1: begins with 't', expected JSON rows"),
        (b"null\n", "line 1: begins with 'n', expected JSON rows"),
        (PAIR + b"null\n", "row 1: found null"),
        (PAIR * 3 + PAIR[:-20], "rows.jsonl"),
        (b"[1, 2]\n", "rows.jsonl"),
        (DEEP, "rows.jsonl"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n", "rows.jsonl"),
        (b"{}\n{}\n", "rows.jsonl"),
        (b'{"prompt": 1, "chosen": 2, "rejected": 3}\n', "row 0: found 1; expected a string"),
        (
            b'{"prompt": [{"role": ["x"], "content": "a"}], "chosen": "b", "rejected": "c"}\n',
            "row 0: found the message",
        ),
        (b'{"prompt": [[1]], "chosen": "b", "rejected": "c"}\n', "row 0: found the message"),
        (b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}\n', "rows.jsonl"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_dataset_that_is_none(train, tmp_path, content, said):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    line = train("dpo", dataset=file).failed_in_one_line(1)
    assert said in line and str(file) in line


@pytest.mark.parametrize("harm", ["empty", "NULs", "cut", "bytes", "no rows", "folder"])
def test_a_parquet_file_that_is_none(train, tmp_path, harm):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    if harm == "folder":
        file.mkdir()
    else:
        strings = [] if harm == "no rows" else [b"\xff\xfe" if harm == "bytes" else b"text"]
        values = pyarrow.array(strings, pyarrow.binary()).view(pyarrow.string())
        table = pyarrow.table(dict.fromkeys(("prompt", "chosen", "rejected"), values))
        pyarrow.parquet.write_table(table, file)
        if harm in ("empty", "NULs"):
            file.write_bytes(b"\0" * (500 if harm == "NULs" else 0))
        elif harm == "cut":
            file.write_bytes(file.read_bytes()[:-10])
    assert str(file) in train("dpo", dataset=file).failed_in_one_line(1)


def test_a_dataset_without_a_name(train):
    assert "its name is empty" in train("dpo", "--eval_dataset=").failed_in_one_line(1)


# Rewards


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("def f(:", 2, "cannot import own_rewards: SyntaxError"),
        ("raise ValueError('a\\nb')", 2, "cannot import own_rewards: ValueError: a b (own_rewards.py:1)"),
        ("import sys; sys.exit(5)", 2, "cannot import own_rewards: SystemExit"),
        ("f = 3", 2, "own_rewards has no function f"),
        ("def f(**columns): 1 / 0", 1, "'f' failed: ZeroDivisionError: division by zero (own_rewards.py:1)"),
        ("f = dict", 1, "'f': no signature found for builtin type"),
        ("def f(**columns): return 3", 1, "'f' failed: TypeError"),
        ("def f(completions, **columns): return ['x'] * len(completions)", 1, "returned 'x'; expected a finite number"),
    ],
)
def test_a_reward_function_that_fails(train, tmp_path, monkeypatch, source, code, said):
    (tmp_path / "own_rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_rewards", raising=False)
    assert said in train("grpo", "--reward_functions", "own_rewards:f").failed_in_one_line(code)
    monkeypatch.delitem(__import__("sys").modules, "own_rewards", raising=False)


@pytest.mark.parametrize("name", ["", ":f", "..:f", "os:nope", "os:path", "nowhere:f"])
def test_a_reward_function_that_is_not_there(train, name):
    assert "reward" in train("grpo", f"--reward_functions={name}").failed_in_one_line(2)


# Models


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "the folder has no config.json"),
        ("config.json", b"{}", "model_type"),
        ("config.json", bytes(range(256)), "is not a valid JSON file"),
        ("model.safetensors", b"\0" * 100, "cannot load a causal language model from"),
        ("model.safetensors", struct.pack("<Q", 2**63) + b"{}", "cannot load a causal language model from"),
        ("tokenizer.json", DEEP, "cannot load a tokenizer from"),
        ("tokenizer_config.json", b"[]", "cannot load a tokenizer from"),
    ],
)
def test_a_model_that_is_none(train, sparse_opt, files, tmp_path, file, content, said):
    model = shutil.copytree(files.model, tmp_path / "model")
    (model / file).unlink()
    if content is not None:
        (model / file).write_bytes(content)
    assert said in train("sft", model=model).failed_in_one_line(1)


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("tokenizer_config.json", {"chat_template": "{% for"}, "the tokenizer's chat template refuses the messages"),
        ("tokenizer_config.json", {"chat_template": "{{ 1 + 'a' }}"}, "the tokenizer's chat template refuses"),
        ("tokenizer_config.json", {"eos_token": "<new>"}, "and the model has embeddings for"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id of the generation settings"),
        ("config.json", {"pad_token_id": 99999}, "Padding_idx must be within num_embeddings"),
        ("config.json", {"num_hidden_layers": 1}, "tensors that a causal language model of its config.json lacks"),
    ],
)
def test_settings_that_do_not_fit_the_model(train, files, tmp_path, file, changes, said):
    model = shutil.copytree(files.model, tmp_path / "model")
    settings = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps({**settings, **changes}))
    rows = tmp_path / "messages.jsonl"
    message = [{"role": "user", "content": "1+1="}]
    rows.write_text(json.dumps({"prompt": message if "template" in said else "1+1=", "completion": "2"}) + "\n")
    assert said in train("sft", dataset=rows, model=model).failed_in_one_line(1)


# Masks


def safetensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def mask_file(shapes, positions=b"\0\0\0\0", dtype="I32", **changes):
    """A mask of one position whose metadata have their digest."""
    metadata = {
        "format": "sparse-opt mask",
        "format_version": "1",
        "shapes": shapes if isinstance(shapes, str) else json.dumps(shapes),
        "pattern": "element",
        "sparsity": "90",
        "digest": "0" * 32,
        **changes,
    }
    metadata["metadata_digest"] = metadata_digest(metadata)
    tensor = {"dtype": dtype, "shape": [1], "data_offsets": [0, len(positions)]}
    return safetensors_file({"__metadata__": metadata, "w": tensor}, positions)


def pt_file(content):
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def repacked(pickled=None, *, compression=zipfile.ZIP_STORED, data=None):
    """A `.pt` file of one mask with another pickle, or other bytes of its tensor, under sound checksums."""
    source = zipfile.ZipFile(io.BytesIO(pt_file({"w": torch.zeros(4, dtype=torch.bool)})))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as target:
        for name in source.namelist():
            content = source.read(name)
            if pickled is not None and name.endswith("data.pkl"):
                content = pickled
            if data is not None and name.endswith("data/0"):
                content = data
            target.writestr(name, content)
    return stream.getvalue()


ONE = torch.zeros(1, dtype=torch.bool)
SAFETENSORS_MASKS = {
    "empty": b"",
    "short": b"abc",
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header longer than the file": safetensors_file(b"{}", length=10**8),
    "deep header": safetensors_file(DEEP),
    "binary header": safetensors_file(bytes(range(256))),
    "list header": safetensors_file(b"[]"),
    "deep shapes": mask_file(DEEP.decode()),
    "deep objects as shapes": mask_file('{"a":' * 50_000),
    "long integer": mask_file('{"w":[' + "9" * 5000 + "]}"),
    "negative size": mask_file({"w": [-2, 3]}),
    "large size": mask_file({"w": [2**62, 2**62]}),
    "bool size": mask_file({"w": [True]}),
    "many dimensions": mask_file({"w": [1] * 100_000}),
    "negative position": mask_file({"w": [4]}, struct.pack("<i", -1)),
    "float positions": mask_file({"w": [4]}, dtype="F32"),
    "another digest": mask_file({"w": [4]}),
    "unknown pattern": mask_file({"w": [4]}, pattern="none"),
    "no text": mask_file({"w": [4]}, method="\ud800"),
}
PT_MASKS = {
    "empty": b"",
    "text": b"text",
    "NULs": b"\0" * 1000,
    "cut": pt_file({"w": ONE})[:-30],
    "expanded": pt_file({"w": ONE.expand(800, 10**9)}),
    "expanded under masks": pt_file({"masks": {"w": ONE.expand(10**12)}}),
    "overlapping": pt_file({"w": torch.zeros(2000, dtype=torch.bool).as_strided((1000, 1000), (1, 1))}),
    "sparse": pt_file({"w": torch.ones(3, 3, dtype=torch.bool).to_sparse()}),
    "large and sparse": pt_file(
        {
            "w": torch.sparse_coo_tensor(
                torch.tensor([[0], [0]]), torch.tensor([True]), (2**40, 2**20), check_invariants=False
            )
        }
    ),
    "meta": pt_file({"w": torch.zeros(10**12, dtype=torch.bool, device="meta")}),
    "floats": pt_file({"w": torch.ones(3)}),
    "list": pt_file([1]),
    "tensor": pt_file(ONE),
    "no masks": pt_file({}),
    "numbered": pt_file({3: ONE}),
    "nested": pt_file({"w": {"x": ONE}}),
    "text in place of a mask": pt_file({"w": "x"}),
    "name that is no text": pt_file({"\ud800": ONE}),
    "no pickle": repacked(b"hello"),
    "pop from nothing": repacked(b"\x80\x020."),
    "frame of 2^63 bytes": repacked(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f."),
    "string of 2^32 bytes": repacked(b"\x80\x02X\xff\xff\xff\xff."),
    "deep pickle": repacked(b"\x80\x02" + b"}X\x01\0\0\0w" * 20_000 + b"}" + b"s" * 20_000 + b"."),
    "compressed": repacked(compression=zipfile.ZIP_DEFLATED, data=b"\0" * 10_000_000),
}


@pytest.mark.parametrize(
    ("suffix", "name"),
    [*((".safetensors", name) for name in SAFETENSORS_MASKS), *((".pt", name) for name in PT_MASKS)],
)
def test_a_mask_that_is_none(sparse_opt, train, tmp_path, suffix, name):
    file = tmp_path / f"mask{suffix}"
    file.write_bytes((SAFETENSORS_MASKS if suffix == ".safetensors" else PT_MASKS)[name])
    assert str(file) in sparse_opt("mask", "info", file).failed_in_one_line(1)


def test_a_mask_that_is_none_to_train_under(train, tmp_path):
    file = tmp_path / "mask.pt"
    file.write_bytes(PT_MASKS["expanded"])
    line = train("sft", "--mode", "sparse", "--mask", file).failed_in_one_line(1)
    assert "w is [800, 1000000000] with strides [0, 0] over 1 stored bytes, expected 800000000000" in line
    assert not (tmp_path / "out").exists()


def test_a_quantized_mask(sparse_opt, tmp_path):
    file = tmp_path / "mask.pt"
    with pytest.warns(UserWarning, match="quantize"):
        torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)}, file)
    assert "expected a dense tensor" in sparse_opt("mask", "info", file).failed_in_one_line(1)


# Runs to resume


@pytest.fixture
def stopped(train, tmp_path):
    """A run that ended after its only checkpoint: as a kill before the last step leaves it."""
    train("dpo", "--n_steps", 2, "--save_steps", 1).done()
    (tmp_path / "out" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "out" / "final")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("file", "content", "code", "said"),
    [
        ("options.yaml", b"", 2, "options.yaml is empty"),
        ("options.yaml", bytes(range(256)), 2, "options.yaml is not valid YAML"),
        ("options.yaml", b"- 1\n", 2, "options.yaml holds a list"),
        ("metrics.jsonl", b"garbage\n", 1, "metrics.jsonl: line 1 is not JSON"),
        ("metrics.jsonl", b"\xff\xfe\n", 1, "metrics.jsonl: line 1 is not JSON"),
        ("metrics.jsonl", b"\0" * 100 + b"\n", 1, "metrics.jsonl: line 1 is not JSON"),
        ("metrics.jsonl", DEEP + b"\n", 1, "metrics.jsonl: line 1 is not JSON"),
        ("metrics.jsonl", b"[1]\n", 1, "metrics.jsonl: line 1 is not an object with a step"),
        ("metrics.jsonl", b'{"loss": 1}\n', 1, "metrics.jsonl: line 1 is not an object with a step"),
        ("metrics.jsonl", b'{"step": -1}\n', 1, "metrics.jsonl: line 1 is not an object with a step"),
        ("metrics.jsonl", b'{"step": 1}\n', 1, "metrics.jsonl: step 1: step_time_s is not a number"),
        ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', 1, "metrics.jsonl: step 1: loss is not a number"),
        ("metrics.jsonl", b"", 1, "metrics.jsonl: has no row of step 1"),
        ("samples.jsonl", b"garbage\n", 1, "samples.jsonl: line 1 is not JSON"),
        ("checkpoints/step_00000001/training_state.pt", b"text", 1, "damaged: training_state.pt has 4 bytes"),
        ("checkpoints/step_00000001/config.json", None, 1, "damaged: config.json is missing"),
        ("checkpoints/step_00000001/manifest.json", b"[]", 1, "manifest.json does not have its own digest"),
    ],
)
def test_a_run_that_is_none_to_go_on_with(train, stopped, file, content, code, said):
    if content is None:
        (stopped / file).unlink()
    else:
        (stopped / file).write_bytes(content)
    line = train("dpo", "--n_steps", 2, "--save_steps", 1, "--resume").failed_in_one_line(code)
    assert said in line and str(stopped) in line


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\0" * 100, b"\xff\xfe"])
def test_a_torn_last_row_is_dropped(train, stopped, torn):
    file = stopped / "metrics.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + torn)
    train("dpo", "--n_steps", 2, "--save_steps", 1, "--resume").done()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
