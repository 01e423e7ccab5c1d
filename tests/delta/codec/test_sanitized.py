"""The CPU's codec stays within its memory for any input: sanitized_codec.cpp under gcc's sanitizers."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from patch_words import any_words, as_op_arguments, changed_words, damaged
from torch import Tensor

from sparse_opt.delta.codec import Patch, encode, sampled_tables
from sparse_opt.delta.codec.words import LANE_ROWS, RAW_BIT, TILE

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]
CPU = torch.device("cpu")
N_DAMAGED = 100  # patches for each sound one
NUMELS = [301, 0, LANE_ROWS + 1, 1]
ANY_NUMBER = {np.dtype(t): np.iinfo(t) for t in (np.uint8, np.uint16, np.uint32, np.int64)}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[bytes], list[int]]:
    """`run(groups)`: the tiles that the program prints."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ on PATH")
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    built = subprocess.run([compiler, *FLAGS, "empty.cpp"], cwd=tmp_path, capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"needs g++ with its sanitizers: {built.stderr.strip().splitlines()[-1]}")
    sources = [CSRC / name for name in ("delta/patch_cpu.cpp", "delta/delta_codec_cpu.cpp")]
    sources.append(HERE / "sanitized_codec.cpp")
    subprocess.run([compiler, *FLAGS, f"-I{CSRC}", *sources, "-o", tmp_path / "codec"], check=True)

    def call(groups: bytes) -> list[int]:
        ended = subprocess.run([tmp_path / "codec"], input=groups, capture_output=True, timeout=300)
        assert ended.returncode == 0, ended.stderr.decode()
        return [int(line) for line in ended.stdout.split()]

    return call


def arrays(patch: Patch) -> list[np.ndarray]:
    """sizes, offsets, records, and the tables: what the decoder reads, and what may be damaged."""
    return [part.numpy().copy() for part in as_op_arguments(patch, CPU) if isinstance(part, Tensor)]


def content(parts: list[np.ndarray]) -> bytes:
    return b"".join(np.int64(part.size).tobytes() + np.ascontiguousarray(part).tobytes() for part in parts)


def with_damaged_frame(source: np.random.Generator, patch: Patch) -> list[np.ndarray]:
    """One number of sizes, offsets or tables fits nothing, or the records end too early."""
    parts = arrays(patch)
    part = parts[source.choice([i for i, found in enumerate(parts) if found.size])]
    if part is parts[2]:
        parts[2] = part[: source.integers(part.size)]
    else:
        bounds = ANY_NUMBER[part.dtype]
        drawn = source.integers(bounds.min, bounds.max, endpoint=True, dtype=part.dtype)
        part.reshape(-1)[source.integers(part.size)] = source.choice([bounds.min, bounds.max - 3, bounds.max, drawn])
    return parts


def group(source: np.random.Generator, old: list[Tensor], new: list[Tensor]) -> tuple[bytes, list[set]]:
    """Tensors, their patch and damaged ones; and the tiles that the decoder may name of each, empty where it is any."""
    sound = encode(old, new, tables=sampled_tables(old, new), backend="native")
    kind = as_op_arguments(sound, CPU)[3:5]
    found, tiles, none = [content(arrays(sound))], [{len(sound.sizes)}], len(sound.sizes)
    for i in range(N_DAMAGED):
        patch, tile = damaged(source, sound)
        found.append(content(with_damaged_frame(source, sound) if i % 4 == 0 else arrays(patch)))
        tiles.append(set() if i % 4 == 0 else {tile, none})
    numbers = [len(found), old[0].element_size(), *map(int, kind)]
    words = [tensor.view(torch.uint8).numpy() for tensor in (*old, *new)]
    numels = np.array([tensor.numel() for tensor in old], np.int64)
    tensors = b"".join(np.int64(w.size).tobytes() + w.tobytes() for w in words)
    head = b"".join(np.int64(a.size).tobytes() + a.tobytes() for a in (np.array(numbers, np.int64), numels))
    return head + tensors + b"".join(found), tiles


def test_damaged_patches_stay_within_memory(run):
    source, groups, expected, met = np.random.default_rng(18), b"", [], set()
    for dtype in (torch.uint8, torch.float8_e5m2, torch.int16, torch.bfloat16, torch.float32, torch.int64):
        for density, step in ((0.012, 2), (0.3, None), (1.0, None)):
            old = [any_words(source, numel, dtype) for numel in NUMELS]
            new = [changed_words(source, tensor, density, step) for tensor in old]
            made, tiles = group(source, old, new)
            groups, expected = groups + made, expected + tiles
            sizes = encode(old, new, tables=sampled_tables(old, new), backend="native").sizes
            met |= {"raw" if int(size) & RAW_BIT else "coded" for size in sizes if size}
    # All lanes of a tile, and more than half of those of the next.
    old = [any_words(source, TILE + 17 * LANE_ROWS + 5, torch.bfloat16)]
    made, tiles = group(source, old, [changed_words(source, old[0], 0.012, 2)])
    found = run(groups + made)
    assert all(bad in named for bad, named in zip(found, expected + tiles, strict=True) if named)
    assert met == {"coded", "raw"}
