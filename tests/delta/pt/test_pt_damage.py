from __future__ import annotations

import pickle
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from sparse_opt.delta.pt import PtDeltaLog
from sparse_opt.errors import DeltaLogError

from .conftest import assert_same_bits, walk, write_as_tools_do


def load_last(folder: Path, **options):
    log = PtDeltaLog(folder, **options)
    return log.load(log.steps[-1])


def refused(folder: Path, message: str, **options) -> None:
    """Opening the log, or reading its last step, is refused in one line."""
    with pytest.raises(DeltaLogError, match=message) as caught:
        load_last(folder, **options)
    assert "\n" not in str(caught.value)


def test_no_base(bf16_run):
    base = bf16_run.folder / "base_state.pt"
    elsewhere = base.rename(bf16_run.folder.parent / "start.pt")
    refused(bf16_run.folder, r"deltas: holds deltas_step_5\.pt but no base_state\.pt")
    log = PtDeltaLog(bf16_run.folder, base_state=elsewhere, dtype=torch.bfloat16)
    assert_same_bits(log.load(10), bf16_run.states[10])
    refused(bf16_run.folder.parent, r"holds no base_state\.pt")
    refused(bf16_run.folder.parent, r"holds no deltas_step_\*\.pt file, expected at least one", base_state=elsewhere)
    refused(bf16_run.folder, r"never\.pt: file not found", base_state=bf16_run.folder / "never.pt")


def test_two_files_of_a_step(bf16_run):
    shutil.copy(bf16_run.folder / "deltas_step_5.pt", bf16_run.folder / "deltas_step_05.pt")
    refused(bf16_run.folder, r"deltas_step_05\.pt and deltas_step_5\.pt are both of step 5")


def test_a_file_of_step_0(bf16_run):
    shutil.copy(bf16_run.folder / "deltas_step_5.pt", bf16_run.folder / "deltas_step_0.pt")
    refused(bf16_run.folder, r"deltas_step_0\.pt: is of step 0, expected a later step: .*base_state\.pt")


def test_steps_and_names_that_are_not_there(bf16_run):
    log = PtDeltaLog(bf16_run.folder)
    with pytest.raises(DeltaLogError, match="deltas: step 6 is not logged"):
        log.digest(6)
    with pytest.raises(DeltaLogError, match="no tensor nothing in the log"):
        next(log.tensor_states("nothing", [5]))
    with pytest.raises(DeltaLogError, match="against is 'both', expected base or previous"):
        PtDeltaLog(bf16_run.folder, against="both")


def test_a_tensor_that_a_step_lacks_keeps_its_values_and_is_named(bf16_run):
    path = bf16_run.folder / "deltas_step_100.pt"
    deltas = torch.load(path, weights_only=True)
    del deltas["layer.0.bias"]
    torch.save(deltas, path)
    log = PtDeltaLog(bf16_run.folder, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"step 100: holds no difference for 1 of 4 tensors .* layer\.0\.bias"):
        found = log.load(100)
    assert_same_bits(found, bf16_run.states[100] | {"layer.0.bias": bf16_run.states[0]["layer.0.bias"]})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"other": torch.zeros(2)}, r"step 100: holds other, which base_state\.pt does not"),
        ({"layer.0.bias": torch.zeros(9)}, r"layer\.0\.bias is float32 \[9\], in the base it is float32 \[8\]"),
        (
            {"layer.0.bias": torch.zeros(8, dtype=torch.int64)},
            r"layer\.0\.bias is int64 \[8\], in the base it is float32",
        ),
        (
            {"layer.0.bias": torch.zeros(8).to_sparse()},
            r"layer\.0\.bias is torch.sparse_coo on cpu, expected a dense CPU tensor",
        ),
        ({"deltas": {"layer.0.bias": torch.zeros(8)}}, r"entry 'deltas' is dict, expected tensors by name"),
        ({"step": 100}, r"entry 'step' is int, expected tensors by name"),
    ],
    ids=["unknown", "shape", "dtype", "sparse", "nested", "number"],
)
def test_contents_that_do_not_fit(bf16_run, entry, message):
    path = bf16_run.folder / "deltas_step_100.pt"
    torch.save(torch.load(path, weights_only=True) | entry, path)
    refused(bf16_run.folder, message)


def test_a_tensor_that_is_larger_than_its_file(bf16_run):
    # Allocated, it would be 4 TB.
    vast = torch.zeros(1).expand(2**40)
    torch.save({"w": vast}, bf16_run.folder / "base_state.pt")
    refused(
        bf16_run.folder, r"base_state\.pt: step 0: w is float32 \[1099511627776\], more than the file has bytes for"
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=["bool", "complex"])
def test_dtypes_that_no_tool_takes_differences_of(bf16_run, dtype):
    torch.save({"w": torch.zeros(2, dtype=dtype)}, bf16_run.folder / "base_state.pt")
    refused(bf16_run.folder, rf"base_state\.pt: step 0: w is {str(dtype)[6:]}: it has no difference")


def test_no_dictionary(bf16_run):
    torch.save([torch.zeros(2)], bf16_run.folder / "base_state.pt")
    refused(bf16_run.folder, r"base_state\.pt: step 0: holds a list, expected a dictionary of tensors by name")


def test_a_dtype_that_does_not_hold_the_values(tmp_path):
    states = walk(1)
    states[1]["embed.weight"] = states[1]["embed.weight"].float() + 2.0**-20
    folder = write_as_tools_do(tmp_path / "log", states, [7])
    count = int((states[1]["embed.weight"].bfloat16() != states[1]["embed.weight"]).sum())
    assert count
    message = rf"deltas_step_7\.pt: step 7: embed\.weight: {count} of 3072 values have no exact bfloat16 form"
    refused(folder, message, dtype=torch.bfloat16)
    PtDeltaLog(folder).load(7)


class Payload:
    """Unpickled without `weights_only`, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run(bf16_run, tmp_path):
    torch.save({"w": Payload(tmp_path / "ran")}, bf16_run.folder / "deltas_step_100.pt")
    refused(bf16_run.folder, r"deltas_step_100\.pt: step 100: damaged: it is not a file that torch\.save wrote: .*")
    assert not (tmp_path / "ran").exists()


def test_the_form_of_old_torch_has_no_checksums(bf16_run):
    torch.save(bf16_run.states[0], bf16_run.folder / "base_state.pt", _use_new_zipfile_serialization=False)
    refused(bf16_run.folder, r"base_state\.pt: step 0: damaged: it is not a file that torch\.save wrote")


def test_a_compressed_archive_is_refused(bf16_run):
    path = bf16_run.folder / "deltas_step_100.pt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content + bytes(10_000_000) if name.endswith(".pkl") else content)
    refused(bf16_run.folder, r"its record deltas_step_100/data\.pkl is not as torch\.save writes one")


def offset_of(path: Path, tensor: torch.Tensor) -> int:
    return path.read_bytes().index(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("step", [0, 10])
@pytest.mark.parametrize("against", ["base", "previous"])
def test_a_file_that_is_written_to_after_its_checksums_were_compared(bf16_run, step, against):
    log = PtDeltaLog(bf16_run.folder, against=against)
    for _ in log.tensor_states("embed.weight", log.steps):
        pass
    path = log.file(step)
    name = "layer.0.weight"
    with path.open("r+b") as file:
        file.seek(offset_of(path, torch.load(path)[name]))
        file.write(b"\x41")
    with pytest.raises(DeltaLogError, match=rf"{path.name}: step {step}: the file was written to or replaced"):
        list(log.tensor_states(name, [step]))
    if step == 0:
        with pytest.raises(DeltaLogError, match=r"base_state\.pt: step 0: the file was written to or replaced"):
            log.exact_dtype()
    with pytest.raises(DeltaLogError, match="damaged: its record .* does not have its checksum"):
        PtDeltaLog(bf16_run.folder, against=against).load(step)


def test_tensors_that_are_not_aligned_in_their_file(bf16_run):
    """Repack an archive."""
    path = bf16_run.folder / "deltas_step_10.pt"
    expected = PtDeltaLog(bf16_run.folder).load(10)
    for pad in (1, 2, 3):
        with zipfile.ZipFile(path) as archive:
            records = {record.filename: archive.read(record) for record in archive.infolist()}
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{path.stem}/{'pad'[:pad]}", b"")
            for name, data in records.items():
                archive.writestr(name, data)
        assert_same_bits(PtDeltaLog(bf16_run.folder).load(10), expected)


def test_lazily_negated_tensors(bf16_run):
    """torch.save keeps a lazily negated tensor as one."""
    path = bf16_run.folder / "deltas_step_10.pt"
    expected = PtDeltaLog(bf16_run.folder).load(10)
    torch.save({name: torch._neg_view(-tensor) for name, tensor in torch.load(path).items()}, path)
    assert all(tensor.is_neg() for tensor in torch.load(path).values())
    log = PtDeltaLog(bf16_run.folder)
    assert_same_bits(log.load(10), expected)
    assert log.verify() == []
    assert len(log.info()) == 4


def test_verify_names_files_and_the_steps_that_are_lost(bf16_run):
    seen: list[int] = []
    assert PtDeltaLog(bf16_run.folder).verify(on_step=seen.append) == []
    assert seen == [0, 5, 10, 100]
    old, new = (bf16_run.states[step]["embed.weight"].float() for step in (0, 10))
    flip(bf16_run.folder / "deltas_step_10.pt", (new - old).numpy().tobytes())
    (problem,) = PtDeltaLog(bf16_run.folder).verify()
    assert (problem.file, problem.lost_steps) == ("deltas_step_10.pt", (10,))
    assert "step 10: damaged: its record deltas_step_10/data/" in problem.message
    (problem,) = PtDeltaLog(bf16_run.folder, against="previous").verify()
    assert problem.lost_steps == (10, 100)
    flip(bf16_run.folder / "base_state.pt", old.numpy().tobytes())
    assert [p.lost_steps for p in PtDeltaLog(bf16_run.folder).verify()] == [(0, 5, 10, 100), (10,)]


def flip(path: Path, where: bytes) -> None:
    """Flip one bit of the file at the first occurrence of these bytes."""
    content = bytearray(path.read_bytes())
    content[content.index(where)] ^= 1
    path.write_bytes(content)


def mutate(content: bytes, source: random.Random) -> bytes:
    kind = source.randrange(5)
    place = source.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + source.randbytes(source.randrange(1, 9)) + content[place:]
    changed = bytearray(content)
    if kind == 2:
        changed[place] ^= 1 << source.randrange(8)
    elif kind == 3:
        changed[place : place + 8] = source.randbytes(min(8, len(content) - place))
    else:  # lengths and offsets of the archive, at its end
        place = len(content) - source.randrange(1, 400)
        changed[place] = source.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("name", ["base_state.pt", "deltas_step_100.pt"])
def test_mutated_files_give_the_right_bits_or_an_error(bf16_run, name):
    source = random.Random(name)
    path = bf16_run.folder / name
    whole = path.read_bytes()
    log = PtDeltaLog(bf16_run.folder)
    expected = log.load(100)
    refusals: list[str] = []
    for _ in range(600):
        # A new file each time: an open one is mapped.
        path.unlink()
        path.write_bytes(mutate(whole, source))
        try:
            found = load_last(bf16_run.folder)
        except DeltaLogError as error:
            refusals.append(str(error))
        else:
            assert_same_bits(found, expected)
    assert len(refusals) > 300
    assert all(name in refusal and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize("content", [pickle.dumps({"w": 1}, 2), pickle.dumps(7, 2), b"", b"garbage"])
def test_a_pickle_of_something_else_in_a_sound_archive(bf16_run, content):
    path = bf16_run.folder / "deltas_step_100.pt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, content if name.endswith(".pkl") else record)
    refused(bf16_run.folder, r"deltas_step_100\.pt: step 100: ")
