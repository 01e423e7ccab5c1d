"""Damaged checkpoints and shared folders are refused by name, and the run goes on from the last intact checkpoint."""

import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from damage import flip
from transformers import TrainerCallback

from sparse_opt import DeltaLog
from sparse_opt.delta.writer import StepWriter
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.integrations import SparseArguments, VerifiedCheckpointCallback, checkpoints

MANIFEST = checkpoints.MANIFEST
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


@pytest.fixture
def run(lab, tmp_path):
    """`run(changes...)`: a DPO trainer that saves to one folder, `run`, after steps 2, 4 and 6."""
    mask = lab.random_mask(0.1)
    return lambda **changes: lab("DPO", mask=mask, **{**SAVING, "output_dir": str(tmp_path / "run"), **changes})


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    "a bit": (lambda c: flip(c / "optimizer.pt", 3000), "optimizer.pt has .* expected"),
    "the manifest": (lambda c: flip(c / MANIFEST, 200), f"{MANIFEST} does not have its own digest"),
    "no manifest": (lambda c: (c / MANIFEST).unlink(), f"has no {MANIFEST}, so it was not completely written"),
    "truncated": (lambda c: (c / "trainer_state.json").write_text("{"), "trainer_state.json has 1 bytes"),
    "deleted": (lambda c: (c / "rng_state.pth").unlink(), "rng_state.pth is missing"),
    "of another step": (lambda c: shutil.copy(c.with_name("checkpoint-2") / "scheduler.pt", c), "scheduler.pt has"),
    "nothing": (emptied, f"has no {MANIFEST}"),
    "another model": (lambda c: (c / "pytorch_model.bin").touch(), "pytorch_model.bin is not in its"),
}


def test_damage_is_refused_and_the_last_intact_checkpoint_named(run, weights):
    whole = run()
    whole.train()
    newest = Path(whole.args.output_dir, "checkpoint-6")
    kept = newest.with_name("kept")
    newest.rename(kept)
    for damage, message in DAMAGES.values():
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(kept, newest)
        damage(newest)
        for resume in (True, str(newest)):
            with pytest.raises(DataError, match=rf"checkpoint-6: .*{message}.*intact one is checkpoint-4: ") as error:
                run().train(resume_from_checkpoint=resume)
            assert "\n" not in str(error.value)
    named = re.search(r"resume_from_checkpoint='(.*)'", str(error.value))[1]
    resumed = run()
    resumed.train(resume_from_checkpoint=named)
    assert all(map(torch.equal, weights(resumed.model).values(), weights(whole.model).values()))
    for checkpoint in newest.parent.glob("checkpoint-*"):
        emptied(checkpoint)
    with pytest.raises(DataError, match="no other checkpoint in .*run is intact: start again"):
        run().train(resume_from_checkpoint=True)


def test_a_damaged_best_checkpoint_is_not_loaded(lab, run):
    class Damages(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            flip(Path(args.output_dir, f"checkpoint-{state.global_step}", "model.safetensors"))

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = run(given={"eval_dataset": lab.rows("DPO"), "callbacks": [Damages()]}, **best)
    with pytest.raises(DataError, match=r"checkpoint-\d: damaged: model.safetensors"):
        trainer.train()


def test_a_run_that_has_all_its_steps_trains_no_further_one(run, weights):
    whole = run(lr_scheduler_type="constant")
    whole.train()
    resumed = run(lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert all(map(torch.equal, weights(resumed.model).values(), weights(whole.model).values()))
    assert {int(s["step"]) for s in resumed.sparse_optimizer.state.values()} == {6}


class AtStep(TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function()


def ctrl_c():
    raise KeyboardInterrupt


def test_one_run_at_a_time_saves_to_a_folder(run):
    def second():
        for resume in (True, None):
            with pytest.raises(ConfigError, match="another run is saving checkpoints to .*run: wait for its end"):
                run().train(resume_from_checkpoint=resume)
        run(save_strategy="no", max_steps=1).train()  # saves nothing
        ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        run(given={"callbacks": [AtStep(3, second)]}).train()
    run().train(resume_from_checkpoint=True)  # nobody holds the folder any more


def test_the_next_run_removes_what_a_killed_one_was_writing(run):
    trainer = run(max_steps=2)
    folder = Path(trainer.args.output_dir, "checkpoint-1")
    folder.mkdir(parents=True)
    unfinished = [folder.parent / ".tmpAb3Zx9", folder / ".tmpq1w2e3", folder / f".{MANIFEST}.123.0a1b2c3d.tmp"]
    others = [folder.parent / ".gitattributes", folder / ".metadata", folder.parent / "notes.tmp"]
    for file in (*unfinished, *others):
        file.touch()
    trainer.train()
    assert not any(file.exists() for file in unfinished) and all(file.exists() for file in others)


def test_the_newest_checkpoint_of_an_earlier_run_is_refused(run, weights):
    earlier = run(seed=4)
    earlier.train()
    folder = Path(earlier.args.output_dir)
    for step, hint in ((1, "no other checkpoint"), (3, "the last intact one is checkpoint-2: ")):
        with pytest.raises(KeyboardInterrupt):
            run(given={"callbacks": [AtStep(step, ctrl_c)]}).train()
        with pytest.raises(DataError, match=f"checkpoint-6: is of an earlier run in its folder.*{hint}"):
            run().train(resume_from_checkpoint=True)
    again = run(seed=4)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))  # named, it goes on as that run
    assert all(map(torch.equal, weights(again.model).values(), weights(earlier.model).values()))
    run(seed=4).train(resume_from_checkpoint=True)


def test_the_last_intact_checkpoint_stays_until_the_next_one_is_complete(run, monkeypatch):
    trainer = run(save_total_limit=1)
    write = checkpoints.write_manifest

    def killed(folder, *args):
        if folder.name == "checkpoint-4":
            raise KeyboardInterrupt
        write(folder, *args)

    monkeypatch.setattr(checkpoints, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(DataError, match="checkpoint-4: has no .* the last intact one is checkpoint-2: "):
        run().train(resume_from_checkpoint=True)
    monkeypatch.setattr(checkpoints, "write_manifest", write)
    trainer = run(save_total_limit=1)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-6"]
    saved = torch.load(f"{trainer.args.output_dir}/checkpoint-6/training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 1


def test_a_complete_checkpoint_has_its_steps_in_the_delta_log(run, tmp_path, monkeypatch):
    write_step, write_manifest, seen = StepWriter._write, checkpoints.write_manifest, []

    def slowly(*args, **kwargs):
        time.sleep(0.3)
        return write_step(*args, **kwargs)

    def watched(folder, *args):
        seen.append(DeltaLog.open(tmp_path / "log").steps)
        write_manifest(folder, *args)

    monkeypatch.setattr(StepWriter, "_write", slowly)
    monkeypatch.setattr(checkpoints, "write_manifest", watched)
    run(sparse=SparseArguments(delta_log_dir=tmp_path / "log"), max_steps=4).train()
    assert seen == [(0, 1, 2), (0, 1, 2, 3, 4)]


def test_in_the_original_trainer(lab):
    trainer = lab("DPO", given={"callbacks": [VerifiedCheckpointCallback()]}, **SAVING)
    trainer.train()
    newest = Path(trainer.args.output_dir, "checkpoint-6")
    VerifiedCheckpointCallback.require_intact(newest)
    (newest / "notes.txt").touch()  # another callback's
    VerifiedCheckpointCallback.require_intact(newest)
    flip(newest / "model.safetensors")
    with pytest.raises(DataError, match=r"checkpoint-6: damaged: model.safetensors .* is checkpoint-4: "):
        VerifiedCheckpointCallback.require_intact(newest)
