"""`sparse-opt bench kernels --tune` with the reference in place of the kernels, and with a clock of the test."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from sparse_opt import backends
from sparse_opt.bench.kernels import tune
from sparse_opt.bench.kernels.cases import Case, WrongResult
from sparse_opt.bench.rows import Run
from sparse_opt.tuning import ALLOWED, Tuning, files

CPU = torch.device("cpu")
SIZES = tune.Sizes(shapes={"a": (256, 256), "b": (128, 256)}, layer=(128, 256), tokens=16)


class Kernels:
    """The reference, and the table that it was last given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = Tuning()
        self.wrong = lambda table: False  # whether a result is wrong
        self.unlaunchable = lambda table: False
        self.ms = lambda table: 1.0
        run = Case.run

        def run_reference(case: Case, backend: str) -> None:
            assert backend in ("triton", "cuda")
            if self.unlaunchable(self.table):
                raise OverflowError("out of resource: shared memory\nand more")
            run(case, "reference")
            if self.wrong(self.table):
                case.results()[next(iter(case.results()))].view(-1)[0] += 1

        monkeypatch.setattr(Case, "run", run_reference)
        monkeypatch.setattr(backends, "set_tuning", lambda device, table: setattr(self, "table", table))
        monkeypatch.setattr(tune, "_cannot_launch", lambda: (OverflowError,))

    def clock(self, call):
        call.before()
        return (self.ms(self.table),) * 3

    def tune(self, *, names: str = "triton cuda", table: Tuning | None = None) -> tuple[Tuning, list[tune.Row]]:
        generator = torch.Generator(CPU).manual_seed(0)
        tuner = tune.Tuner(CPU, table or Tuning(), names.split(), generator, 1, SIZES, self.clock)
        found = tuner.run()
        assert self.table == found  # the kernels go on with it
        return found, tuner.rows


@pytest.fixture
def fake(monkeypatch) -> Kernels:
    return Kernels(monkeypatch)


def test_only_a_clearly_faster_value_is_chosen(fake):
    times = {256: 0.98, 512: 1.0, 1024: 0.99, 2048: 1.5}
    fake.ms = lambda table: times[table.triton_step_slots]
    assert fake.tune(names="triton")[0] == Tuning()
    times[1024] = 0.96
    found, rows = fake.tune(names="triton")
    assert found == replace(Tuning(), triton_step_slots=1024)
    chosen = {(row["entry"], row["value"]) for row in rows if row["chosen"]}
    assert chosen == {(name, value) for name, value in asdict(found).items() if name.startswith("triton")}
    works = {row["work"] for row in rows if row["entry"] == "triton_step_slots"}
    assert works == {
        "indexed_adamw_, dense gradients, lr 1e+00",
        "indexed_adamw_, dense gradients, lr 1e-06",
        "indexed_adamw_, compact gradients, lr 1e+00",
    }


def test_times_that_overlap_choose_nothing(fake):
    calls = {256: [0.8, 1.2], 512: [1.0, 1.1], 1024: [2.0, 2.0], 2048: [2.0, 2.0]}  # of each round in turns
    fake.ms = lambda table: calls[table.triton_step_slots][0]

    def turn(call):
        found = fake.clock(call)
        calls[fake.table.triton_step_slots].reverse()
        return found

    generator = torch.Generator(CPU).manual_seed(0)
    tuner = tune.Tuner(CPU, Tuning(), ["triton"], generator, 10, SIZES, turn)
    calls[256] = [0.8, 1.1]
    assert tuner.run() == Tuning()
    calls[256] = [0.8, 0.9]
    assert tuner.run() == replace(Tuning(), triton_step_slots=256)


def test_a_threshold_is_the_lowest_from_which_on_the_other_kernel_wins(fake):
    def ms(table: Tuning) -> float:
        # Faster with few elements in flight if there are at least 64 bytes per element, or exactly 32 of a swap.
        n_bytes = table.cuda_scattered_step_bytes or table.cuda_scattered_swap_bytes
        return 0.5 if n_bytes >= 64 else 1.0

    fake.ms = ms
    found, rows = fake.tune(names="cuda")
    assert (found.cuda_scattered_step_bytes, found.cuda_encode_blocks) == (64, 2)
    measured = [row["value"] for row in rows if row["entry"] == "cuda_scattered_step_bytes"]
    assert set(measured) == {0, 256, 128, 64, 32}
    fake.ms = lambda table: 0.5 if table.cuda_scattered_swap_bytes in (256, 64) else 1.0
    assert fake.tune(names="cuda")[0].cuda_scattered_swap_bytes == 256
    fake.ms = lambda table: 0.5 if table.cuda_scattered_swap_bytes in (128, 64, 32) else 1.0
    assert fake.tune(names="cuda")[0].cuda_scattered_swap_bytes == 0


@pytest.mark.parametrize("entry", ["triton_tile64_stages", "triton_encode_elements", "cuda_scattered_swap_bytes"])
def test_a_value_that_changes_a_bit_is_an_error(fake, entry):
    fake.wrong = lambda table: getattr(table, entry) == max(ALLOWED[entry])
    with pytest.raises(WrongResult, match=f"with {entry} {max(ALLOWED[entry])}"):
        fake.tune()


def test_a_value_that_cannot_be_launched_is_left_out(fake):
    fake.unlaunchable = lambda table: table.triton_tile128_stages == 3
    fake.ms = lambda table: 1.0 / table.triton_tile128_stages
    found, rows = fake.tune(names="triton")
    assert found == Tuning()
    assert [(row["value"], row["ms"], row["why"]) for row in rows if row["why"]] == [
        (3, None, "out of resource: shared memory")
    ]
    fake.unlaunchable = lambda table: True
    with pytest.raises(OverflowError):
        fake.tune(names="triton")


def test_the_command_saves_and_prints_the_table(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = files.Key("NVIDIA A100", "8.0", "2.13.0", "3.7.0")
    fake.ms = lambda table: 1.0 / table.cuda_encode_blocks
    monkeypatch.setattr(backends, "tuning_key", lambda index: key)
    monkeypatch.setattr(backends, "why_unavailable", lambda name, device: "")
    monkeypatch.setattr(tune, "Sizes", lambda: SIZES)
    tuner = tune.Tuner
    monkeypatch.setattr(
        tune,
        "Tuner",
        lambda device, table, names, generator, n_rounds, on_row: tuner(
            CPU, table, names, torch.Generator(CPU), n_rounds, SIZES, fake.clock, on_row
        ),
    )
    tuner.n_rounds = 1
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator("cpu"))
    run = Run({})
    tune.measure_and_save(run, torch.device("cuda", 0), seed=0, n_rounds=1)
    saved = files.load(key)
    assert saved.tuning == replace(Tuning(), cuda_encode_blocks=3)
    measured = {(row["entry"], row["value"]) for row in json.loads(saved.path.read_text())["measurements"]}
    assert measured == {(row.case["entry"], row.case["value"]) for row in run.rows}
    (chosen,) = run.matching(entry="cuda_encode_blocks", value=3)
    assert run.peer(chosen, "built-in").case["value"] == 2
    assert any(note.startswith("cuda_encode_blocks: 3 instead of 2 (blocks of delta_encode") for note in run.notes)
    assert any(str(saved.path) in note for note in run.notes)
    assert "cuda_encode_blocks 3, delta_encode: 0.333 ms" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bits_with_every_value(monkeypatch, tmp_path):
    """The times of small inputs mean nothing; each value runs, and is checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    table = backends.tuning_of(device.index).tuning
    names = [name for name in ("triton", "cuda") if not backends.why_unavailable(name, device)]
    sizes = tune.Sizes(shapes={"a": (1024, 1024), "b": (512, 1024)}, layer=(512, 1024), tokens=1000)
    generator = torch.Generator(device).manual_seed(0)
    try:
        tuner = tune.Tuner(device, table, names, generator, n_rounds=2, sizes=sizes)
        tuner.run()
    finally:
        backends.set_tuning(device, table)
    assert {row["entry"].partition("_")[0] for row in tuner.rows} == set(names)
