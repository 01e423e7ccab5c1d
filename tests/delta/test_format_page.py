"""A reader of whole logs at the levels `fast` and `packed`, written from docs/formats.md alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from sparse_opt import DeltaLog, MaskSet

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int16": 2, "uint8": 1, "bool": 1}


def safetensors(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return metadata, {
        n: (header[n]["dtype"], header[n]["shape"], data[start + a : start + b]) for n, (a, b) in places.items()
    }


def words(data: bytes, size: int) -> list[int]:
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(
        b"".join(xxhash.xxh3_128_digest(data[i : i + 65536]) for i in range(0, len(data), 65536))
    )


def fast(record: bytes, mode: int, n: int, tile: list[int], size: int) -> list[int]:
    t = len(tile)
    if mode == 2:
        return words(record[: t * size], size)
    if mode == 1:
        bits = words(record[: -(-t // 32) * 4], 4)
        places = [k for k in range(t) if bits[k // 32] >> k % 32 & 1]
        values = words(record[len(bits) * 4 :][: n * size], size)
    else:
        values, runs = words(record[: n * size], size), record[n * size :][: -(-t // 256)]
        ends = record[n * size + len(runs) :]
        places = [256 * run + ends[sum(runs[:run]) + i] for run in range(len(runs)) for i in range(runs[run])]
    changed = dict(zip(places, values, strict=True))
    return [changed.get(k, word) for k, word in enumerate(tile)]


def packed(record: bytes, mode: int, n: int, tile: list[int], size: int, b: int, is_float: bool) -> list[int]:
    t, top, every = len(tile), 1 << 8 * size - 1, (1 << 8 * size) - 1
    if mode == 2:
        return words(record[: t * size], size)
    stream, at = int.from_bytes(record, "little"), 0

    def take(bits: int) -> int:
        nonlocal at
        at += bits
        return stream >> at - bits & (1 << bits) - 1

    if mode == 0:
        k = (t // n).bit_length() - 1
        low = [take(k) for _ in range(n)]
        high = [i for i in range(n + (t - 1 >> k)) if take(1)]
        places = [high[i] - i << k | low[i] for i in range(n)]
    else:
        places = [i for i in range(t) if take(1)]
    signs, far = [take(1) for _ in range(n)], [take(1) for _ in range(n)]
    fields = iter([take(b) for _ in range(sum(far))])
    tile = list(tile)
    for place, sign, more in zip(places, signs, far, strict=True):
        step = next(fields) if more else -1
        if step == (1 << b) - 1:
            tile[place] = -1  # the word follows behind all fields
            continue
        ordered = tile[place] if not is_float else tile[place] ^ (every if tile[place] >= top else top)
        ordered = ordered + (-1 if sign else 1) * (step + 2) & every
        tile[place] = ordered if not is_float else ordered ^ (top if ordered >= top else every)
    return [take(8 * size) if word < 0 else word for word in tile]


def read(log: Path, step: int) -> dict[str, bytes]:
    metadata, tensors = safetensors(next(log.glob(f"step_{step:08d}.*")))
    if metadata["kind"] == "keyframe":
        return {name: data for name, (_, _, data) in tensors.items()}
    state = read(log, int(metadata["parent_step"]))
    layout = json.loads(safetensors(next(log.glob("step_*.keyframe.*")))[0]["layout"])["tensors"]
    mask = safetensors(log / "mask.safetensors")[1] if metadata["space"] == "mask" else None
    for dtype in {dtype for _, dtype, _ in layout}:
        part = {name.split(".")[1]: data for name, (_, _, data) in tensors.items() if name.split(".")[0] == dtype}
        size, heads, tile_at, at = SIZES[dtype], words(part["heads"], 2), 0, 0
        for name in (name for name, other, _ in layout if other == dtype):
            whole = words(state[name], size)
            chosen = range(len(whole)) if mask is None else words(mask[name][2], 4) if name in mask else []
            for begin in range(0, len(chosen), 8192):
                places, head = chosen[begin : begin + 8192], heads[tile_at]
                tile, mode, n = [whole[i] for i in places], head >> 14, head & 16383
                tile_at += 1
                if n == 0:
                    continue
                if metadata["level"] == "packed":
                    end = at + 4 * words(part["sizes"], 2)[tile_at - 1]
                    new = packed(part["records"][at:end], mode, n, tile, size, part["width"][0], "float" in dtype)
                else:
                    t = len(tile)
                    end = at + -(-(n * size + -(-t // 256) + n, -(-t // 32) * 4 + n * size, t * size)[mode] // 4) * 4
                    new = fast(part["records"][at:end], mode, n, tile, size)
                for place, word in zip(places, new, strict=True):
                    whole[place] = word
                at = end
            state[name] = b"".join(word.to_bytes(size, "little") for word in whole)
    found = [digest(state[name]) for name, _, _ in layout]
    assert "".join(found) == metadata["tensor_digests"]
    lines = sorted([name, dtype, shape, one] for (name, dtype, shape), one in zip(layout, found, strict=True))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    assert xxhash.xxh3_128_hexdigest(text.encode()) == metadata["result_digest"]
    rest = {key: value for key, value in metadata.items() if key != "header_digest"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert xxhash.xxh3_128_hexdigest(compact.encode()) == metadata["header_digest"]
    return state


@pytest.mark.parametrize("level", ["fast", "packed"])
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "mask"])
def test_the_page_says_enough_to_read_a_log(tmp_path: Path, states: Any, level: str, masked: bool) -> None:
    state = {
        "a": states.bits((90, 100), torch.bfloat16),
        "b": states.bits((300,), torch.bfloat16),
        "c": states.bits((20, 30), torch.float32),
        "n": states.bits((500,), torch.int64),
        "nothing": torch.empty(0, 4),
    }
    mask = MaskSet.random({name: state[name] for name in ("a", "c")}, density=0.4)
    kept = {0: state}
    with DeltaLog.create(tmp_path / "log", state, level=level, mask=mask if masked else None) as log:
        for step, share in enumerate((0.001, 0.05, 0.3, 0.02), start=1):
            new = states.change(kept[step - 1], share)
            # Far changes, and near ones; the first tensor's second tile stays as it is.
            near = kept[step - 1]["a"].clone().view(torch.int16)
            near.view(-1)[: 8000 * step : 7] += step
            new["a"] = near.view(torch.bfloat16)
            if masked and step != 3:
                for name, old in kept[step - 1].items():
                    flat, was = new[name].view(-1), old.view(-1)
                    outside = torch.ones(old.numel(), dtype=torch.bool)
                    if name in mask:
                        outside[mask[name].long()] = False
                    flat[outside] = was[outside]
            kept[step] = new
            info = log.append(step, new).wait()
            assert (info.kind, info.masked) == ("patch", masked and step != 3)
    for step, wanted in kept.items():
        found = read(tmp_path / "log", step)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name] == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), (step, name)
