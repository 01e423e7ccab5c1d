"""Attacks on DPO and GRPO under `sparse_trainer`: kills, Ctrl-C, damaged checkpoints, two runs in one folder.

    python tests/integrations/attack_trl.py --trials 100 --seed 0

Each trial attacks a small run in processes of its own and then resumes it in a new one. What it must end with are the
bits of an undisturbed run (weights, optimizer state, logged losses, delta log), or an error of one line that names the
checkpoint or the folder; then the run resumes from the checkpoint that the error names as intact.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import argparse
import functools
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.trainer_callback import CallbackHandler
from trl import DPOTrainer, GRPOTrainer  # noqa: F401  both are imported before processes are forked

sys.path.insert(0, str(Path(__file__).parents[1]))
from trainer_lab import WORDS, Lab, make_tokenizer, rows_of

from sparse_opt import DeltaLog, MaskSet, SparseAdamW
from sparse_opt.integrations import SparseArguments, callback, references, trainer
from sparse_opt.ops import BoundOps

STEPS = 8
MASTERS, ROUNDED = {"master_weights": True}, {"stochastic_rounding": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
BEST = {**EVALUATED, "load_best_model_at_end": True, "save_total_limit": 2}


class Case(NamedTuple):
    kind: str
    dtype: str
    pattern: str
    logs: bool
    sparse: dict[str, Any]
    changes: dict[str, Any]


CASES = [
    Case("DPO", "float32", "element", True, {}, {}),
    Case("DPO", "bfloat16", "element", False, MASTERS, {"disable_dropout": False, "dataloader_num_workers": 1}),
    Case("DPO", "bfloat16", "tile64", True, ROUNDED, {"disable_dropout": False}),
    Case("DPO", "float32", "tile64", False, {}, {"gradient_accumulation_steps": 1, **BEST}),
    Case("GRPO", "float32", "element", True, {}, {"beta": 0.3}),
    Case("GRPO", "bfloat16", "tile64", False, MASTERS, {"beta": 0.3, "gradient_accumulation_steps": 1}),
    Case("GRPO", "float32", "element", False, {}, {"num_iterations": 2, "beta": 0.1}),
    Case("GRPO", "bfloat16", "element", True, ROUNDED, {**EVALUATED, "beta": 0.3, "save_total_limit": 1}),
]


def made(case: Case, out: Path, model: Path, *, seed: int = 3, log: bool = True) -> Any:
    """A trainer of the case that saves to `out/run` every second step."""
    lab = Lab(model, make_tokenizer(), out, torch.device("cpu"))
    policy = lab.model(getattr(torch, case.dtype))
    density = 0.1 if case.pattern == "element" else 0.5
    sparse = SparseArguments(**case.sparse, delta_log_dir=out / "log" if case.logs and log else None)
    changes = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, **case.changes, "seed": seed}
    return lab(
        case.kind,
        mask=MaskSet.random(policy, density=density, pattern=case.pattern, seed=7),
        sparse=sparse,
        model=policy,
        given={"eval_dataset": rows_of(case.kind)} if "eval_strategy" in changes else {},
        max_steps=STEPS,
        output_dir=str(out / "run"),
        **changes,
    )


def outcome(trained: Any, out: Path) -> dict[str, Any]:
    """What two equal runs have equal."""
    weights = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    state = trained.sparse_optimizer.state_dict()["state"]
    found = {"weights": weights} | {f"state {i}": dict(values) for i, values in state.items()}
    found["losses"] = [(r["step"], r["loss"], r["grad_norm"]) for r in trained.state.log_history if "loss" in r]
    if (out / "log").exists():
        log = DeltaLog.open(out / "log")
        assert log.verify() == []
        found["log"] = [(step, log.digest(step)) for step in log.steps]
    return found


def difference(a: Any, b: Any) -> str:
    """The first part of two outcomes that differs, or nothing."""
    for name in a.keys() | b.keys():
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            if x.keys() != y.keys() or not all(torch.equal(v, y[k]) for k, v in x.items()):
                return name
        elif x != y:
            return name
    return ""


def complete(case: Case, out: Path, model: Path, resume: Any = None, **options: Any) -> dict[str, Any]:
    trained = made(case, out, model, **options)
    trained.train(resume_from_checkpoint=resume)
    return outcome(trained, out)


def started(work: Callable[[], Any], folder: Path) -> tuple[int, Path]:
    """Fork a process that keeps the result of `work`, or its error, in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(tempfile.mkdtemp(dir=folder)) / "result.pt"
    if pid := os.fork():
        return pid, file
    try:
        log = os.open(file.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = work()
        except (Exception, KeyboardInterrupt) as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        torch.save(result, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)  # it may be killed while it writes
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def ended(process: tuple[int, Path]) -> dict[str, Any] | None:
    """The result of a process, None of a killed one."""
    os.waitpid(process[0], 0)
    return torch.load(process[1], weights_only=False) if process[1].exists() else None


class Failure(Exception):
    """The outcome that was not allowed."""


class Attack:
    """One trial: a case, its undisturbed run in `reference`, and a folder for the disturbed one."""

    def __init__(self, root: Path, number: int, seed: int, kind: str) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.kind, self.which = kind, self.random.randrange(len(CASES))
        self.case, self.model, self.reference = CASES[self.which], root / "model", root / f"case{self.which}"
        self.out = root / f"trial{number}"
        self.what = ""

    def run(self) -> str:
        getattr(self, self.kind)()
        return self.resumed()

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, Path]:
        return started(functools.partial(function, self.case, self.out, self.model, *args, **options), self.out)

    def copy_reference(self) -> None:
        for name in ("run", "log") if self.case.logs else ("run",):
            shutil.copytree(self.reference / name, self.out / name)

    def newest(self) -> list[Path]:
        found = (self.out / "run").glob("checkpoint-*")
        return sorted(found, key=lambda p: int(p.name.partition("-")[2]), reverse=True)

    def resumed(self) -> str:
        """Resume from the newest checkpoint; if it is refused, from the intact one that the error names, or anew."""
        expected, refusals, resume = torch.load(self.reference / "outcome.pt", weights_only=False), 0, True
        if not self.newest():
            resume = None
        while True:
            if resume is None:  # as someone who starts again: in an empty folder
                shutil.rmtree(self.out / "log", ignore_errors=True)
                shutil.rmtree(self.out / "run", ignore_errors=True)
            result = ended(self.start(complete, resume)) or {"error": "killed"}
            if "error" not in result:
                if name := difference(result, expected):
                    raise Failure(f"WRONG {name.split()[0]}")
                return "refused, then the same bits" if refusals else "the same bits"
            message = result["error"]
            self.what += f"; {message}"
            if "\n" in message or not re.search(r"checkpoint-\d|the checkpoint of step \d|trial\d+/run", message):
                raise Failure("ERROR without a name")
            refusals += 1
            named = re.search(r"resume_from_checkpoint='([^']*)'", message)
            older = self.newest()[refusals:]
            resume = named[1] if named else str(older[0]) if older and "no other" not in message else None

    # The attacks

    def kill(self) -> None:
        """SIGKILL before, or soon after, one of the run's file operations, or at any time."""
        if self.random.random() < 0.3:
            process = self.start(complete)
            time.sleep(self.random.uniform(0.3, 1.2) * float((self.reference / "seconds").read_text()))
            os.kill(process[0], signal.SIGKILL)
            self.what = "any time"
        else:
            last = int((self.reference / "operations").read_text())
            operation, delay = self.random.randint(1, last), self.random.choice([0, 0, 3e-4, 2e-3, 1e-2])
            process = self.start(killed, operation, delay * self.random.random())
            self.what = f"file operation {operation} of {last}"
        if ended(process) is not None:
            self.what += ", too late"

    def interrupt(self) -> None:
        """Ctrl-C at a random call in a phase of the run."""
        phases = {
            "beginning": (Trainer, "_prepare_for_training", 1),
            "reference": (references.BaseWeightsReference, "forward", STEPS),
            "swap": (BoundOps, "indexed_swap_", 2 * STEPS),
            "forward": (trainer.SparseTrainer, "training_step", STEPS),
            "backward": (Accelerator, "backward", STEPS),
            "clip": (trainer.SparseTrainer, "_clip", STEPS),
            "step": (SparseAdamW, "step", STEPS),
            "saving": (Trainer, "_save_checkpoint", STEPS // 2),
            "after saving": (CallbackHandler, "on_save", STEPS // 2),
            "end": (Trainer, "_finalize_training", 1),
            "close": (trainer.SparseTrainer, "train", 1),
        }
        if self.case.kind == "GRPO":
            phases["generation"] = (GRPOTrainer, "_generate_single_turn", STEPS // 2)
        if "eval_strategy" in self.case.changes:
            phases["evaluation"] = (Trainer, "evaluate", STEPS // 2)
        if self.case.logs:
            phases["delta log"] = (callback.DeltaLogCallback, "_write", STEPS)
            phases["first of the log"] = (callback.DeltaLogCallback, "_begin", 1)
        resumes = self.random.random() < 0.25
        if resumes:
            self.copy_reference()
            phases = {
                "loading": (Trainer, "_load_from_checkpoint", 1),
                "loading the optimizer": (Trainer, "_load_optimizer_and_scheduler", 1),
                "beginning": phases["beginning"],
            }
        name = self.random.choice(list(phases))
        owner, method, most = phases[name]
        occurrence = self.random.randint(1, most)
        calls = 10**9 if name == "close" else int(10 ** self.random.uniform(0, 4))
        self.what = f"{'resuming, ' if resumes else ''}{name} {occurrence}, call {calls}"
        at = (owner, method, occurrence, calls)
        found = ended(self.start(interrupted, self.newest()[-1] if resumes else None, at, self.reference))
        if found is None or "error" in found:
            raise Failure(f"FAILED after Ctrl-C: {found and found['error']}")
        self.what += "" if found["interrupted"] else ", not reached"

    def damage(self) -> None:
        """Damage the newest checkpoint of a run that ended before its last one, if it keeps several."""
        self.copy_reference()
        checkpoint, rng = self.newest()[0], self.random
        if len(self.newest()) > 1:
            shutil.rmtree(checkpoint)
            checkpoint = self.newest()[0]
        files = sorted((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_mtime_ns, p))
        states = [p for p in files if p.suffix in (".safetensors", ".pt", ".pth") or p.name == "trainer_state.json"]
        file = rng.choice(rng.choice([files, states, states]))
        how = rng.choice(["bit", "bit", "truncated", "deleted", "swapped", "foreign", "empty", "half", "zeros"])
        self.what = f"{how} {file.name}"
        content = bytearray(file.read_bytes())
        at = rng.randrange(len(content))
        if how == "deleted":
            file.unlink()
        elif how in ("bit", "zeros", "truncated"):
            if how == "bit":
                content[at] ^= 1 << rng.randrange(8)
            else:
                content[at:] = bytes(len(content) - at) if how == "zeros" else b""
            file.write_bytes(content)
        elif how in ("swapped", "foreign"):
            other = self.newest()[-1]
            if how == "foreign" or other == checkpoint:
                ended(started(functools.partial(complete, self.case, self.out / "other", self.model, seed=4), self.out))
                other = next((self.out / "other" / "run").glob("checkpoint-*"))
            self.what += f" from {other.name}"
            shutil.copy(other / file.relative_to(checkpoint), file)
        elif how == "empty":
            shutil.rmtree(checkpoint)
            checkpoint.mkdir()
        else:
            kept = rng.randrange(len(files))
            self.what = f"half: {kept} of {len(files)} files"
            for later in files[kept + 1 :]:
                later.unlink()
            os.truncate(files[kept], rng.randrange(files[kept].stat().st_size))

    def share(self) -> None:
        """Another run, with another seed, in the same folder: at the same time, or before."""
        how = self.random.choice(["at once", "at once", "before"])
        if how == "before":
            if ended(self.start(complete, seed=4, log=False)) is None:
                raise Failure("FAILED before the attack")
            half = int((self.reference / "operations").read_text()) // 2
            mine = self.start(killed, self.random.randint(5, half), 0)  # before, it has not written its name
            self.what = f"the other run before; mine {'finished' if ended(mine) else 'killed'}"
            return
        mine = self.start(slowed)
        while not self.newest() and os.waitpid(mine[0], os.WNOHANG) == (0, 0):
            time.sleep(0.02)
        resume = self.random.choice([True, None])
        other = ended(self.start(complete, resume, seed=4, log=False))
        error = (other or {}).get("error", "no error")
        refused = "trial" in error and "\n" not in error
        self.what = f"at once: the other {error if refused else 'ran: ' + error}"
        if self.random.random() < 0.5:
            os.kill(mine[0], signal.SIGKILL)
            self.what += ", mine killed"
        result = ended(mine)
        if result is not None and difference(result, torch.load(self.reference / "outcome.pt", weights_only=False)):
            raise Failure("WRONG bits of the first run")
        if not refused:
            raise Failure("TWO RUNS at once")


# What the forked processes run


def killed(case: Case, out: Path, model: Path, operation: int, delay: float) -> dict[str, Any]:
    count_operations(out, operation, delay)
    return complete(case, out, model)


def count_operations(out: Path, kill_at: int = 0, delay: float = 0.0) -> list[str]:
    """Count what this process does to files below `out`; kill it at one of them, or `delay` seconds later."""
    seen: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str | None) and (args[1] or "w")[0] in "wxa"
        if not (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree")):
            return
        if not str(args[0]).startswith((str(out / "run"), str(out / "log"))):
            return
        seen.append(event)
        if len(seen) == kill_at:
            if delay:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    return seen


def slowed(case: Case, out: Path, model: Path) -> dict[str, Any]:
    step = SparseAdamW.step
    SparseAdamW.step = lambda *args, **kwargs: (time.sleep(0.5), step(*args, **kwargs))[1]
    return complete(case, out, model)


def undisturbed(case: Case, out: Path, model: Path) -> None:
    """A whole run, with the weights after each step, and how long it takes."""
    begin, seen, weights = time.monotonic(), count_operations(out), []
    step = SparseAdamW.step
    trained = made(case, out, model)

    def watched(*args: Any, **kwargs: Any) -> Any:
        weights.append({n: p.detach().clone() for n, p in trained.model.named_parameters()})
        return step(*args, **kwargs)

    SparseAdamW.step = watched
    trained.train()
    found = outcome(trained, out)
    weights.append(found["weights"])
    torch.save(found, out / "outcome.pt")
    torch.save(weights, out / "weights.pt")
    (out / "operations").write_text(str(len(seen)))
    (out / "seconds").write_text(str(time.monotonic() - begin))


def hooks(model: torch.nn.Module) -> dict[str, Any]:
    """What training changes in a model besides its weights."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found: dict[str, Any] = {
        # transformers leaves a hook of checkpointing of activations behind
        n: [sum(not h.__module__.startswith("transformers.") for h in vars(m)[kind].values()) for kind in kinds]
        for n, m in model.named_modules()
    }
    for name, p in model.named_parameters():
        found[name] = (p.requires_grad, p.grad is None, len(p._backward_hooks or ()))
    return found | {f"{n}.forward": "forward" in vars(m) for n, m in model.named_modules() if n}


def interrupted(case: Case, out: Path, model: Path, resume: Any, at: tuple[Any, ...], reference: Path) -> Any:
    """Press Ctrl-C in a phase, then examine the model."""
    owner, method, occurrence, calls = at
    function, count = getattr(owner, method), Counter()

    def press(frame: Any = None, event: str = "", arg: Any = None) -> None:
        count["calls"] += 1
        if count["calls"] == calls:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def phase(*args: Any, **kwargs: Any) -> Any:
        count["entered"] += 1
        if count["entered"] != occurrence:
            return function(*args, **kwargs)
        sys.setprofile(press)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
            if count["calls"] < calls:
                count["calls"] = calls
                signal.raise_signal(signal.SIGINT)

    trained = made(case, out, model)
    setattr(owner, method, phase)
    before, handler, stopped = hooks(trained.model), signal.getsignal(signal.SIGINT), False
    try:
        trained.train(resume_from_checkpoint=resume and str(resume))
    except KeyboardInterrupt:
        traceback.print_exc()
        stopped = True
    after = hooks(trained.model)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"left in the model: {changed[:3]}"
    assert signal.getsignal(signal.SIGINT) is handler, "the handler of Ctrl-C is another one"
    weights, step = torch.load(reference / "weights.pt"), trained.state.global_step
    # Its last step may have been interrupted between two parameters, and so may be loading a checkpoint.
    near = weights if resume or "load_best_model_at_end" in case.changes else weights[step : step + 2]
    for name, p in trained.model.named_parameters():
        assert any(torch.equal(p, known[name]) for known in near), f"{name} has no weights of step {step} or the next"
    return {"interrupted": stopped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="attack_trl_"))
    datasets.config.HF_DATASETS_CACHE = root / "datasets"
    sizes = {"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "attention_dropout": 0.1}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).save_pretrained(root / "model")

    kinds = ["kill"] * 3 + ["interrupt"] * 4 + ["damage"] * 3 + ["share"] * 2
    attacks = {n: Attack(root, n, options.seed, kinds[n % len(kinds)]) for n in range(options.trials)}
    used = sorted({attack.which for attack in attacks.values()})
    undisturbed_runs = {i: functools.partial(undisturbed, CASES[i], root / f"case{i}", root / "model") for i in used}
    in_pairs(undisturbed_runs, root)
    counts: Counter[tuple[str, str]] = Counter()

    def report(number: Any, result: Any) -> None:
        attack = attacks[number]
        label, what = result if isinstance(result, tuple) else ("HARNESS", str(result))
        counts[attack.kind, label] += 1
        case = f"{attack.case.kind} {attack.case.dtype} {attack.case.pattern}"
        print(f"{number:3} {attack.kind:9} {label:28} case {attack.which} ({case}): {what}", flush=True)
        if label.islower():
            shutil.rmtree(attack.out, ignore_errors=True)

    in_pairs({n: functools.partial(tried, attack) for n, attack in attacks.items()}, root, report)
    print(f"\nseed {options.seed}, {len(attacks)} trials; files of failed ones in {root}")
    for (kind, label), n in sorted(counts.items()):
        print(f"{kind:10} {label:40} {n:4}")
    sys.exit(any(not label.islower() for _, label in counts))


def tried(attack: Attack) -> tuple[str, str]:
    try:
        return attack.run(), attack.what
    except Failure as failure:
        return str(failure), attack.what


def in_pairs(work: dict[int, Callable[[], Any]], root: Path, report: Callable[..., None] | None = None) -> None:
    """Run the functions in forked processes, two at a time, and report each number with its result."""
    waiting, running = list(work.items()), {}
    while waiting or running:
        while waiting and len(running) < 2:
            number, function = waiting.pop(0)
            pid, file = started(function, root / "results")
            running[pid] = number, file
        number, file = running.pop(os.wait()[0])
        result = torch.load(file, weights_only=False) if file.exists() else {"error": "killed"}
        if report is not None:
            report(number, result)
        elif result is not None:
            sys.exit(f"case {number}: {result}; see {file.parent}")


if __name__ == "__main__":
    main()
