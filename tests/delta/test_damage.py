"""Damaged, renamed, reordered and foreign files: the right bits or a refusal that names file and step, never others."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_opt import DeltaLog
from sparse_opt.delta import files as delta_files
from sparse_opt.delta.codec.tables import Tables
from sparse_opt.delta.codec.words import word_kind
from sparse_opt.errors import DeltaLogError
from sparse_opt.tensors import metadata_digest

Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
# Which steps a file of the `logged` fixture costs when it is lost: those that are rebuilt by way of it.
COSTS = {0: [0, 1, 2], 1: [1, 2], 2: [2], 5: [5, 7, 8], 7: [7, 8], 8: [8]}


def right_or_refused(logged: Any, step: int, at_fault: Path, same_bits: Compare) -> bool:
    """True for a refusal that names the file at fault and its step; any other exception passes through."""
    try:
        state = logged.load(step)
    except DeltaLogError as refused:
        text = str(refused)
        names = str(at_fault) in text and f"step {int(at_fault.name[5:13])}" in text and "\n" not in text
        return names or pytest.fail(f"does not name {at_fault.name}: {text}")
    same_bits(state, logged.states[step])
    return False


@pytest.mark.parametrize("step", [0, 1, 5], ids=["base", "patch", "keyframe"])
def test_every_flipped_byte(logged, same_bits, step):
    path = logged.file(step)
    content = path.read_bytes()
    source = random.Random(step)
    refused = 0
    # Every third byte, the bit drawn at random: header, metadata, offsets and payload alike.
    tried = range(0, len(content), 3)
    for i in tried:
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << source.randrange(8)]) + content[i + 1 :])
        refused += right_or_refused(logged, COSTS[step][-1], path, same_bits)
    # A flipped space between JSON tokens may be another white space.
    assert refused >= len(tried) - 3


@pytest.mark.parametrize("step", [0, 1], ids=["keyframe", "patch"])
def test_every_length(logged, same_bits, step):
    path = logged.file(step)
    content = path.read_bytes()
    for length in [*range(0, len(content), 23), len(content) - 1]:
        path.write_bytes(content[:length])
        assert right_or_refused(logged, 2, path, same_bits)
    for tail in (b"\0", b"\0" * 8, content):
        path.write_bytes(content + tail)
        assert right_or_refused(logged, 2, path, same_bits)


@pytest.mark.parametrize("step", COSTS)
def test_damage_costs_only_the_steps_behind_it(logged, same_bits, step):
    path = logged.file(step)
    flip(path)
    for other in logged.states:
        assert right_or_refused(logged, other, path, same_bits) == (other in COSTS[step])
    problems = DeltaLog.open(logged.directory).verify()
    assert [(p.file, list(p.lost_steps)) for p in problems] == [(path.name, COSTS[step])]


@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_missing_file(logged, same_bits, step):
    logged.file(step).unlink()
    assert DeltaLog.open(logged.directory).steps == tuple(s for s in logged.states if s != step)
    for other in logged.states:
        if other in COSTS[step]:
            with pytest.raises(DeltaLogError, match=f"step {step}(,| is not logged)"):
                logged.load(other)
        else:
            same_bits(logged.load(other), logged.states[other])
    problems = DeltaLog.open(logged.directory).verify()
    assert [(p.file, list(p.lost_steps)) for p in problems] == [(f"step {step}", COSTS[step])]


def test_a_missing_base(logged):
    logged.file(0).unlink()
    log = DeltaLog.open(logged.directory)
    for step in (1, 5):
        with pytest.raises(DeltaLogError, match=r"step 1: is the first file and a patch: .* missing"):
            log.load(step)
    assert [list(p.lost_steps) for p in log.verify()] == [[1, 2, 5, 7, 8]]


def test_renamed_files(logged, same_bits):
    path = logged.file(8)
    renamed = path.rename(path.with_name("step_00000009.patch.safetensors"))
    with pytest.raises(DeltaLogError, match=f"{renamed}: step 9: the file was written as step 8"):
        logged.load(9)
    disguised = renamed.rename(path.with_name("step_00000008.keyframe.safetensors"))
    with pytest.raises(DeltaLogError, match=f"{disguised}: step 8: the file was written as kind patch"):
        logged.load(8)
    # Files whose names are not steps of a log are ignored by readers and reported by verify.
    for name in ("notes.safetensors", "step_8.patch.safetensors", "step_000000008.patch.safetensors"):
        disguised = disguised.rename(path.with_name(name))
        assert DeltaLog.open(logged.directory).steps == (0, 1, 2, 5, 7)
        assert [(p.file, p.lost_steps) for p in DeltaLog.open(logged.directory).verify()] == [(name, ())]
    same_bits(logged.load(7), logged.states[7])


def test_a_second_file_of_a_step_is_found(logged, same_bits):
    shutil.copy(logged.file(8), logged.directory / "step_00000005.patch.safetensors")
    same_bits(logged.load(8), logged.states[8])
    assert [p.file for p in DeltaLog.open(logged.directory).verify()] == ["step_00000005.patch.safetensors"]


@pytest.mark.parametrize("step", [1, 5], ids=["patch", "keyframe"])
def test_a_file_of_another_run(logged, same_bits, tmp_path, step):
    """The same model from the same start: every digest of the parent fits, and yet the file is not of this log."""
    other = {name: tensor.clone() for name, tensor in logged.states[0].items()}
    with DeltaLog.create(tmp_path / "other", other, keyframe_every=3) as log:
        for n in (1, 2, 5):
            other["n"] += 1
            log.append(n)
    path = logged.file(step)
    shutil.copy(tmp_path / "other" / path.name, path)
    with pytest.raises(DeltaLogError, match=f"{path}: step {step}: belongs to run [0-9a-f]{{32}}, expected run"):
        logged.load(step)
    lost = {p.file: list(p.lost_steps) for p in DeltaLog.open(logged.directory).verify()}
    assert lost == {path.name: COSTS[step]}


def test_a_foreign_safetensors_file(logged):
    path = logged.file(1)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(DeltaLogError, match=f"{path}: step 1: format is None, expected 'sparse-opt delta log'"):
        logged.load(2)


def rewrite(logged: Any, step: int, change: Callable[[dict[str, Tensor]], Any], **fields: Any) -> None:
    """Rewrite a step's file with other content and matching digests, which no digest detects."""
    files, _ = delta_files.list_steps(logged.directory)
    header = replace(delta_files.read_header(files[step]), **fields)
    payload = {name: tensor.clone() for name, tensor in load_file(files[step].path).items()}
    change(payload)
    files[step].path.unlink()
    delta_files.write_step(header, payload, lambda where: None)


def put(name: str, index: int, value: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda payload: payload[name].__setitem__(index, value)


def with_tables(index: int, value: int) -> Callable[[dict[str, Tensor]], None]:
    """Tables, which so small a patch does not have, with another value at one byte."""
    uniform = Tables.uniform(1, word_kind(torch.bfloat16))
    content = bytearray(replace(uniform, present=np.ones((1, 256), bool)).to_bytes())
    content[index] = value
    return lambda payload: payload.update({"bfloat16.tables": torch.frombuffer(content, dtype=torch.uint8)})


def flipped(name: str, index: int, bits: int = 255) -> Callable[[dict[str, Tensor]], None]:
    return lambda payload: payload[name].__setitem__(index, payload[name][index] ^ bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("bfloat16.counts", 0, -1), "the patch of bfloat16: a count is larger than its tensor or below 0"),
        (put("bfloat16.sizes", 0, 2**16 - 1), r"its records have \d+ bytes, expected 131070"),
        (put("bfloat16.sizes", 0, 2**31 + 7), "tile 0 of tensor 0 is damaged"),
        (with_tables(0, 0), "the patch of bfloat16: found 0 rows and 1 value tables"),
        (with_tables(6, 1), "the patch of bfloat16: its tables refer to a row or a value table that does not exist"),
        (lambda p: p.update({"bfloat16.tables": p["bfloat16.tables"].new_zeros(3)}), "its tables end at byte 3"),
        (flipped("bfloat16.records", 0), "damaged"),
        (lambda p: p.update({"bfloat16.counts": p["bfloat16.counts"].int()}), "its counts is int32"),
        (lambda p: p.pop("float32.tables"), "the patch of float32: it holds .*, expected .*tables"),
    ],
)
def test_forged_patches_write_nowhere(logged, same_bits, change, message):
    rewrite(logged, 1, change)
    with pytest.raises(DeltaLogError, match=f"{logged.file(1)}: step 1: damaged: .*{message}"):
        logged.load(1)
    for name in logged.states[0]:  # each is right, or refused too
        refusal, tensor = "", logged.states[1][name]
        try:
            tensor = next(DeltaLog.open(logged.directory).tensor_states(name, [1]))[1]
        except DeltaLogError as error:
            refusal = str(error)
        assert refusal.startswith(f"{logged.file(1)}: step 1: damaged: ") or not refusal
        same_bits({name: tensor}, {name: logged.states[1][name]})
    same_bits(logged.load(0), logged.states[0])


def test_forged_records_that_decode_to_other_words(logged):
    """The codec does not notice some of them: the digests of the tensors do."""
    content, said = logged.file(1).read_bytes(), ""
    for i in range(len(load_file(logged.file(1))["bfloat16.records"])):
        rewrite(logged, 1, flipped("bfloat16.records", i, 1))
        with pytest.raises(DeltaLogError, match=f"{logged.file(1)}: step 1: damaged: ") as error:
            logged.load(1)
        said += str(error.value)
        logged.file(1).write_bytes(content)
    assert "a.w has digest" in said


def test_forged_headers(logged):
    where = f"{logged.file(2)}: step 2: "
    for fields, message in [
        ({"parent_digest": "0" * 32}, "was coded against the state 0{32}, but the state of step 1 is [0-9a-f]{32}"),
        ({"parent_step": 2}, "parent step is 2, expected an earlier step"),
        ({"result_digest": "0" * 32}, "its tensor digests give the digest [0-9a-f]{32}, expected 0{32}"),
        ({"tensor_digests": ()}, "0 tensor digests, expected 3"),
        ({"mask_digest": "0" * 32}, "belongs to a log with the mask 0{32}, expected none"),
        ({"masked": True}, "needs the mask of the log: .*mask.safetensors: no such mask file"),
    ]:
        original = logged.file(2).read_bytes()
        rewrite(logged, 2, lambda payload: None, **fields)
        with pytest.raises(DeltaLogError, match=where + message):
            logged.load(2)
        assert [p.lost_steps for p in DeltaLog.open(logged.directory).verify()] == [(2,)]
        logged.file(2).write_bytes(original)


def rewrite_metadata(path: Path, **fields: str) -> None:
    """Write other metadata to a file, with a matching digest."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    metadata.update(fields)
    metadata.pop("header_digest")
    save_file(load_file(path), path, {**metadata, "header_digest": metadata_digest(metadata)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([["a.w", "bfloat16", [2**40]]], "its layout has 2199023255552 bytes of tensors, the file has"),
        ([["a.w", "bfloat16", [2**62, 2**62]]], "a.w has an invalid shape"),
        ([["a.w", "complex128", [6, 5]]], "a.w has the dtype 'complex128'"),
        ([["a.w", "bfloat16", [6, 5]]] * 2, "a tensor is listed twice"),
    ],
)
def test_hostile_layouts(logged, tensors, message):
    for step in (5, 0):
        layout = json.dumps({"tensors": tensors, "aliases": {}, "buffers": []})
        rewrite_metadata(logged.file(step), layout=layout)
        with pytest.raises(DeltaLogError, match=f"{logged.file(step)}: step {step}: damaged: .*{message}"):
            logged.load(step)
        rewrite_metadata(logged.file(step), layout="[" * 100_000)
        with pytest.raises(DeltaLogError, match=f"{logged.file(step)}: step {step}: damaged: its header"):
            logged.load(step)


def test_a_log_of_the_first_format(logged):
    for step in logged.states:
        rewrite_metadata(logged.file(step), format_version="1")
    log = DeltaLog.open(logged.directory, logged.states[0])
    message = f"{logged.file(0)}: step 0: format version is '1', expected '2': write the log again with the version of "
    for call in (lambda: log.load(8), lambda: log.append(9), log.info, lambda: log.layout):
        with pytest.raises(DeltaLogError) as error:
            call()
        assert str(error.value).startswith(message)


def test_a_log_at_a_level_that_can_no_longer_be_read(logged):
    """A log names the level of its patches in a keyframe's settings and in each patch; `tight` is the format now."""
    fields = {0: {"settings": '{"keyframe_every":null,"level":"LEVEL"}'}, 1: {"level": "LEVEL"}}
    for step, by_name in fields.items():
        for level in ("tight", "fast", "packed"):
            rewrite_metadata(logged.file(step), **{key: text.replace("LEVEL", level) for key, text in by_name.items()})
            log = DeltaLog.open(logged.directory)
            if level == "tight":
                assert log.verify() == []
                continue
            with pytest.raises(DeltaLogError) as error:
                log.load(1)
            assert str(error.value) == (
                f"{logged.file(step)}: step {step}: its patches are of level '{level}', which can no longer be read: "
                "write the log again with the version of sparse-opt that wrote it: "
                "sparse-opt delta convert --from DIR --to NEW_DIR --level tight"
            )
        rewrite_metadata(logged.file(step), **{key: text.replace("LEVEL", "tight") for key, text in by_name.items()})


def test_a_tensor_is_read_by_its_own_records_alone(tmp_path, states, same_bits):
    """Damage in the records of another tensor does not matter; reading that tensor is refused."""
    before = {name: states.bits((9000,), torch.bfloat16) for name in ("a", "b")}
    after = states.change(before, 0.1)
    with DeltaLog.create(tmp_path / "log", before) as log:
        log.append(1, after)
    path = tmp_path / "log" / "step_00000001.patch.safetensors"
    content = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        records = file.get_tensor("bfloat16.records").numpy().tobytes()
    end = content.index(records) + len(records)
    path.write_bytes(content[: end - 700] + bytes(byte ^ 85 for byte in content[end - 700 : end]) + content[end:])
    log = DeltaLog.open(tmp_path / "log")
    same_bits({"a": next(log.tensor_states("a", [1]))[1]}, {"a": after["a"]})
    for read in (lambda: next(log.tensor_states("b", [1])), lambda: log.load(1)):
        with pytest.raises(DeltaLogError, match=f"{path}: step 1: damaged: its payload has digest"):
            read()


def test_a_chain_that_is_broken_for_one_tensor_names_the_file(logged):
    """The wrong digest is found at the end of the chain; the error names the damaged file."""
    with safe_open(logged.file(1), framework="pt") as file:
        records = file.get_tensor("bfloat16.records").numpy().tobytes()
    flip(logged.file(1), logged.file(1).read_bytes().index(records))
    with pytest.raises(DeltaLogError, match=f"{logged.file(1)}: step 1: damaged: "):
        next(DeltaLog.open(logged.directory).tensor_states("a.w", [2]))
