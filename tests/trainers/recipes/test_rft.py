"""`sparse-opt train rft`: its stages on small models, killed runs, profiles, option names, and calls that are wrong."""

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_opt.cli.main import main
from sparse_opt.file_lock import FileLock
from sparse_opt.integrations.trl.rewards import load_rewards
from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.recipes import rft

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("rft")

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


@pytest.fixture
def run(command) -> Callable[..., str]:
    """`run("test", "--seed", 1)` in the test's folder -> stdout; with `code=` the error line."""
    return functools.partial(command, "train", "rft")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Generated sums, and an untrained model whose tokenizer has no chat template."""
    return make_arithmetic(
        tmp_path_factory.mktemp("world") / "arithmetic",
        max_operand=9,
        n_train=80,
        n_test=20,
        n_demonstrations=4000,
        hidden_size=96,
        n_layers=2,
    )


@pytest.fixture(scope="module")
def start(world):
    """The model after SFT on demonstrations, of which half are wrong."""
    where = ["--model_name_or_path", world / "model", "--output_dir", world / "sft", "--save_strategy", "no"]
    how = ["--per_device_train_batch_size", 64, "--max_steps", 150, "--learning_rate", 3e-3, "--warmup_steps", 10]
    words = [*where, "--dataset_name", world / "data/demonstrations.jsonl", *how, "--gradient_checkpointing", "false"]
    assert main(["train", "sft", *map(str, words)]) == 0
    return world / "sft"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with an untrained model whose tokenizer has a chat template, and sums in the form of ADL-3's files."""
    folder = make_arithmetic(tmp_path_factory.mktemp("tiny") / "tiny", n_train=4, n_test=1, hidden_size=32, n_layers=1)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    sums = [[f" What is {a} plus {a % 7}? ", float(a + a % 7)] for a in range(12)]
    (folder / "train.json").write_text(json.dumps(sums))
    reasoned = [[q, a, f"It is <answer>{a}</answer>"] for q, a in sums]
    (folder / "rft.json").write_text(json.dumps(reasoned))
    return folder


def rows_of(file: Path) -> list:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [(), ("--mask_density", 0.2), ("--use_peft", "--lora_r", 32)], ids=["dense", "mask", "lora"]
)
def test_a_round_raises_accuracy(world, start, run, what):
    sampled = ("--verifier", "exact_match", "--max_completion_length", 4, "--oversample", 8, "--temperature", 1)
    data = ("--dataset_name", world / "data/train.jsonl", *sampled)

    def accuracy(policy, folder):
        run("test", "--model_name_or_path", policy, "--output_dir", folder, *data)
        return json.loads(Path(folder, "report.json").read_text())["accuracy"]

    run("datagen", "--model_name_or_path", start, "--output_dir", "data", "--keep", "all", *data)
    kept = rows_of(Path("data/rft.jsonl"))
    assert all(eval(row["prompt"].rstrip("=")) == int(row["completion"]) for row in kept)
    assert len({(row["prompt"], row["completion"]) for row in kept}) == len(kept)
    where = ("--model_name_or_path", start, "--dataset_name", "data/rft.jsonl", "--output_dir", "rft")
    how = ("--per_device_train_batch_size", 32, "--max_steps", 60, "--learning_rate", 5e-3 if what else 1e-3)
    run("train", *where, *how, *what)
    gain = accuracy("rft", "after") - accuracy(start, "before")
    # 640 sampled answers a side: three standard errors of a difference of shares are at most 3 * sqrt(2 / 4 / 640).
    assert gain > 3 * (2 / 4 / 640) ** 0.5


def test_the_example_configs_run_on_the_originals_files(tiny, run, monkeypatch):
    data = Path("data")
    data.mkdir()
    for name in ("train.json", "valid.json"):
        (data / name).write_text((tiny / "train.json").read_text())
    folder = CONFIGS / "unit_conversion_rft"
    small = ("--model_name_or_path", tiny / "model", "--max_completion_length", 3)
    run("datagen", "--config", folder / "datagen.yaml", *small, "--oversample=2", "--dataset_split=train[:50%]")
    row = rows_of(data / "samples.jsonl")[5]
    assert [message["role"] for message in row["prompt"]] == ["system", "user", *["assistant", "user"] * 2]
    assert row["prompt"][-1]["content"] == "What is 5 plus 5?"
    assert (row["answer"], len(row["completions"])) == (10.0, 2)
    assert rows_of(data / "rft.json") == []  # of an untrained model
    (data / "rft.json").write_text((tiny / "rft.json").read_text())
    few = ("--model_name_or_path", tiny / "model", "--max_steps", 2, "--lora_r", 2)
    run("train", "--config", folder / "sft.yaml", *few, "--dataset_name", data / "train.json")
    run("train", "--config", folder / "train.yaml", *few, "--report_to", "tensorboard", "--logging_dir", "tb")
    assert list(Path("tb").glob("events*"))
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    shown = run("test", "--config", folder / "test.yaml", "--max_completion_length", 3)  # of the adapter
    assert "accuracy 0." in shown and "(standard error, 12 prompts), answer rate" in shown
    assert [row["prompt"] for row in rows_of(Path("rft_test/results.jsonl"))[:1]] == ["What is 0 plus 0?"]


@pytest.mark.parametrize("file", ["train.json", "rft.json"])
def test_arrays_are_demonstrations_of_the_question(tiny, run, monkeypatch, file):
    found = []
    monkeypatch.setattr(rft, "train_with_trl", lambda algorithm, options, rows: found.append(rows) or 0)
    run("train", "--model_name_or_path", "m", "--dataset_name", tiny / file)
    start = "" if file == "train.json" else "It is "
    assert found[0][3] == {"prompt": "What is 3 plus 3?", "completion": f" {start}<answer>6.0</answer>"}


@pytest.mark.parametrize("rows", ["train.json", "data/train.jsonl"], ids=["arrays", "objects"])
def test_a_killed_datagen_continues_to_the_same_rows(tiny, run, monkeypatch, rows):
    batches = []

    def half(completions, **columns):
        """Accepts half of the completions, and is interrupted in the third batch of the folder `killed`."""
        batches.append(completions)
        if len(batches) == interrupted:
            raise KeyboardInterrupt
        return [float(random.Random(repr(completion)).random() < 0.5) for completion in completions]

    def datagen(folder, *more, code=0):
        batches.clear()
        where = ("--model_name_or_path", tiny / "model", "--dataset_name", tiny / rows, "--output_dir", folder)
        how = ("--max_completion_length", 3, "--batch_size", 6, "--oversample", 6)
        return run("datagen", *where, *how, *more, code=code)

    monkeypatch.setattr(rft, "load_rewards", lambda names: [half])
    monkeypatch.setattr("sparse_opt.trainers.recipes.rft._completions", ended(rft._completions))
    interrupted = 0
    datagen("whole")
    n = len(batches)
    interrupted = 3
    assert "killed/samples.jsonl is kept: repeat the command" in datagen("killed", code=130)
    samples = Path("killed/samples.jsonl")
    with samples.open("a") as file:
        file.write('{"index": 3, "pro')  # as a kill leaves it
    interrupted = 0
    datagen("killed")
    assert len(batches) == n - 2  # what was written is not sampled again
    kept = "rft.json" if rows == "train.json" else "rft.jsonl"
    for name in ("samples.jsonl", kept):
        assert Path("killed", name).read_bytes() == Path("whole", name).read_bytes(), name
    assert 0 < len(rows_of(Path("whole", kept))) <= n

    datagen("whole", "--keep", "shortest")
    assert not batches
    right = [[t for t, good in zip(row["completions"], row["right"], strict=True) if good] for row in rows_of(samples)]
    texts = [row[2] if isinstance(row, list) else row["completion"] for row in rows_of(Path("whole", kept))]
    assert texts == [min(of, key=len).strip() if kept == "rft.json" else min(of, key=len) for of in right if of]


def ended(completions):
    """`_completions` of a model that ends every completion, as an untrained one does not."""

    def call(*args):
        return [{**row, "finished": [True] * len(row["finished"])} for row in completions(*args)]

    return call


def test_of_another_run_is_refused_and_of_two_at_once_one(tiny, run):
    where = ("--model_name_or_path", tiny / "model", "--dataset_name", tiny / "train.json", "--output_dir", "out")
    run("test", *where, "--max_completion_length", 2)
    for option, message in (
        ("--seed=1", "seed 42, and this one has 1"),
        ("--dataset_split=train[:3]", "dataset_split"),
    ):
        line = run("test", *where, "--max_completion_length", 2, option, code=2)
        assert message in line and "choose another --output_dir, or remove the file" in line
    Path("out/results.jsonl").write_text("[\n")
    assert "out/report.json cannot be read" in run("test", *where, "--max_completion_length", 2, code=1)
    lock = FileLock(Path("out/_run.lock"))
    try:
        assert "another run" in run("test", *where, "--max_completion_length", 2, code=2)
    finally:
        lock.release()


@pytest.fixture
def options(run, monkeypatch, tiny) -> Callable[..., object]:
    """`options("--profile", "balanced")`: the options of `train` with these words, without training."""
    found = []
    monkeypatch.setattr(rft, "train_with_trl", lambda algorithm, options, rows: found.append(options) or 0)

    def parse(*words: object):
        run("train", "--model_name_or_path", "m", "--dataset_name", tiny / "rft.json", *words)
        return found[-1]

    return parse


@pytest.mark.parametrize("profile", rft.PROFILES)
def test_a_profile_sets_options_that_are_not_given(options, tmp_path, profile):
    values = {name: of[rft.PROFILES.index(profile)] for name, (of, _) in rft.TRAINING.items() if name != "tf32"}
    found = options("--profile", profile)
    assert {name: found.values[name] for name in values} == values
    args = found.training
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    (tmp_path / "mine.yaml").write_text(f"profile: {profile}\noptim: sgd\nbf16: false\nmax_steps: 3\n")
    found = options("--config", tmp_path / "mine.yaml", "--per_device_train_batch_size=3", "packing=true")
    given = {"optim": "sgd", "bf16": False, "per_device_train_batch_size": 3, "packing": True}
    assert {name: found.values[name] for name in values} == values | given
    (tmp_path / "options.yaml").write_text(found.to_yaml())
    again = options("--config", tmp_path / "options.yaml")
    assert {**again.values, "learning_rate": 0} == {**found.values, "learning_rate": 0}


def test_a_profile_leaves_the_mask_to_adapters_and_files(options, tiny):
    assert options("--profile=aggressive").mask.mask_density == 0.1
    assert options("--profile=aggressive", "--mask_pattern", "tile64").mask.mask_pattern == "tile64"
    assert options("--profile=aggressive", "--use_peft").mask.mask_density is None
    assert options("--profile=aggressive", "--mask", "file.safetensors").mask.mask_density is None
    half = options("--profile=aggressive", "--fp16=True")
    assert (half.training.fp16, half.training.bf16, half.model.dtype) == (True, False, "float32")


WHERE = "--model_name_or_path MODEL --dataset_name ROWS --output_dir out"


@pytest.mark.parametrize(
    ("words", "content", "code", "message"),
    [
        ("", [], 2, "the stage is missing: sparse-opt train rft datagen | train | test | show_optimizations"),
        (f"train {WHERE}".replace("ROWS", "data/rft.json"), [], 2, "folder: 'sparse-opt train rft datagen' writes it"),
        (f"train {WHERE}", [["q"]], 1, 'row 1: found ["q"], expected [question, answer] or'),
        (f"test {WHERE}", [{"prompt": "q"}], 1, "'number'"),
        (f"test {WHERE}", [["q", "unknown"]], 1, "--verifier number judges none of 1 completions"),
        (f"test {WHERE} --max_completion_length 600", [["q", 1]], 2, "the model takes 512"),
        (f"test {WHERE} --oversample 2", [], 2, "--temperature is 0.0, expected more than 0, or 0 with --oversample 1"),
    ],
)
def test_a_wrong_call_is_refused_by_name(tiny, run, words, content, code, message):
    Path("rows.json").write_text(json.dumps(content))
    words = words.replace("MODEL", str(tiny / "model")).replace("ROWS", "rows.json")
    assert message in run(*words.split(), code=code)
    assert not Path("out", "rft.json").exists()


def test_thoughts_that_the_template_strips_are_refused(tiny, run):
    shutil.copytree(tiny / "model", "model")
    strips = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}{% endfor %}"
    Path("model", "chat_template.jinja").write_text(strips)
    prompt, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>two</think>4"}
    Path("rows.jsonl").write_text(json.dumps({"prompt": [prompt], "completion": [answer]}))
    words = ("--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", "out")
    assert "<think>two</think>4\" of the assistant is not in the labels of 'completion'" in run("train", *words, code=2)
    assert not Path("out", "model.safetensors").exists()


def test_chat_prompts_need_a_template(world, run, tiny):
    where = ("--dataset_name", tiny / "train.json", "--output_dir", "out")
    line = run("datagen", "--model_name_or_path", world / "model", *where, code=2)
    assert "no chat template" in line and "--style plain" in line


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("60 * 4 = <answer>240</answer>", "240.0", 1.0),
        ("<answer>251</answer>", 240, 1.0),
        ("<answer>252</answer>", 240, 0.0),  # 5 % away
        ("240, so <answer>24 h", 240, 0.0),  # without the closing tag
        ("it is 1,200.5 m", "1200", 1.0),
        ("-2e3", -2000.0, 1.0),
        ("no number", 1, 0.0),
        ("<answer>0</answer>", 0, 0.0),
        ("<answer>1</answer>", "unknown", None),
    ],
)
def test_the_verifier_of_numbers(completion, answer, reward):
    (verify,) = load_rewards(["number"])
    messages = [{"role": "assistant", "content": completion}]
    assert verify(completions=[completion, messages], answer=[answer, answer]) == [reward, reward]
