"""A reader of logs, written from docs/formats.md alone, compared with DeltaLog.load."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from delta_reader import apply, parse
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.tensors import as_bits


def rebuild(path: Path, state: dict[str, bytes], layout: list[Any], mask: dict[str, bytes], met: set[str]) -> Any:
    """Name -> bytes at the step of the file, from those of its parent; adds the forms of its records to `met`."""
    _, metadata, parts = parse(path)
    if metadata["kind"] == "keyframe":
        return parts
    masked, found = metadata["space"] == "mask", dict(state)
    for group in {dtype for _, dtype, _ in layout}:
        part = {key.removeprefix(f"{group}."): data for key, data in parts.items() if key.startswith(f"{group}.")}
        specs, tile, at = [(name, shape) for name, dtype, shape in layout if dtype == group], 0, 0
        for i, (name, shape) in enumerate(specs):
            if not state[name]:
                continue
            size = len(state[name]) // prod(shape)
            whole = np.frombuffer(state[name], f"<u{size}").astype(np.uint64)
            chosen = np.frombuffer(mask.get(name, b""), "<u4") if masked else np.arange(len(whole))
            words = whole[chosen]
            tile, at, forms = apply(words, part, size, group, len(specs), i, tile, at)
            met |= forms
            whole[chosen] = words
            found[name] = whole.astype(f"<u{size}").tobytes()
        assert 4 * tile == len(part["sizes"]) and at == len(part["records"])
    return found


def check_digests(metadata: dict[str, str], layout: list[Any], state: dict[str, bytes]) -> None:
    """The page's digests: of each tensor, of the state and of the header."""
    found = []
    for name, _, _ in layout:
        data = state[name]
        chunks = [xxhash.xxh3_128_digest(data[i : i + 65536]) for i in range(0, len(data), 65536)]
        found.append(xxhash.xxh3_128_hexdigest(b"".join(chunks)))
    assert "".join(found) == metadata["tensor_digests"]
    lines = sorted([name, dtype, shape, one] for (name, dtype, shape), one in zip(layout, found, strict=True))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    assert xxhash.xxh3_128_hexdigest(text.encode()) == metadata["result_digest"]
    rest = {key: value for key, value in metadata.items() if key != "header_digest"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert xxhash.xxh3_128_hexdigest(compact.encode()) == metadata["header_digest"]


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def stepped(states: Any, state: dict[str, Tensor], share: float, by: int) -> dict[str, Tensor]:
    """A copy with `share` of the words moved, by up to `by` either way and a few to any bits; or one tensor."""
    new = states.change(state, share / 20 if by else 0.0)
    if not by:
        new["large.int"] = states.bits((8192,), torch.int16)
    for tensor in new.values() if by else ():
        if tensor.dtype not in (torch.bool, torch.complex64) and tensor.numel():
            words = as_bits(tensor)
            where = torch.tensor([states.source.random() < share for _ in range(len(words))])
            words[where] += torch.tensor([states.source.choice((-by, -1, 1, by)) for _ in range(int(where.sum()))]).to(
                words.dtype
            )
    return new


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "mask"])
def test_the_reader_made_from_the_page(tmp_path, states, masked):
    state = states.state() | {
        "large": states.bits((91, 97), torch.bfloat16),
        "large.int": states.bits((8192,), torch.int16),
        "one": states.bits((1,), torch.int64),
        "wide": states.bits((3, 111), torch.float64),
    }
    mask = MaskSet.random({name: state[name] for name in ("large", "wide")}, density=0.5) if masked else None
    kept = {0: state}
    with DeltaLog.create(tmp_path / "log", state, mask=mask) as log:
        for step, (share, by) in enumerate([(0.01, 1), (0.1, 3), (0.4, 2), (0.0, 0), (0.03, 100), (0.0, 1)], start=1):
            new = stepped(states, kept[step - 1], share, by)
            for name, tensor in new.items() if mask is not None and step % 2 else ():
                outside = torch.ones(tensor.numel(), dtype=torch.bool)
                if name in mask.names:
                    outside[mask[name].long()] = False
                tensor.view(-1)[outside] = kept[step - 1][name].view(-1)[outside]
            kept[step] = new
            log.append(step, new)
    _, base, _ = parse(tmp_path / "log" / "step_00000000.keyframe.safetensors")
    layout = json.loads(base["layout"])["tensors"]
    positions = parse(tmp_path / "log" / "mask.safetensors")[2] if masked else {}
    log, met, found, spaces = DeltaLog.open(tmp_path / "log"), set(), {}, set()
    for step, expected in kept.items():
        (path,) = (tmp_path / "log").glob(f"step_{step:08d}.*")
        _, metadata, _ = parse(path)
        spaces.add(metadata.get("space", "keyframe"))
        found = rebuild(path, found, layout, positions, met)
        check_digests(metadata, layout, found)
        assert found == {name: as_bytes(tensor) for name, tensor in expected.items()}
        assert found == {name: as_bytes(tensor) for name, tensor in log.load(step).items()}
    assert spaces == {"keyframe", "dense", *(["mask"] if masked else [])}
    assert met == {"unchanged", "coded", "raw"}
