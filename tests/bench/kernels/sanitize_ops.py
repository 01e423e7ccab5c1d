"""The program that runs under `compute-sanitizer`: every op once on every backend of a GPU, on small odd sizes.

Inputs are made and results are compared on the CPU, so that hardly any kernel of another package runs.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparse_opt import backends, ops
from sparse_opt.bench.kernels.cases import Case, WrongResult, check, random_case, tile_weight_grad_case
from sparse_opt.delta import codec as patch_codec
from sparse_opt.delta.digest import StateDigest
from sparse_opt.ops import STEP_OPS
from sparse_opt.tensors import as_bits

# Sizes below, at and above the widths of a vector load, a warp and a block; one is a multiple, one tensor is empty.
SHAPES = {
    "matrix": (37, 61),
    "one": (1,),
    "empty": (0,),
    "aligned": (64, 128),
    "long": (3, 2049),
    "vector": (777,),
}
# Rows of whole 16-byte chunks in every dtype, which have their own copy path; the second has partial tiles.
ALIGNED_SHAPES = ((64, 128), (136, 264))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A few elements, with empty segments and ragged ends; and all elements.
DENSITIES = (0.03, 1.0)
FEW = 0.001  # at most 8 elements of a tensor
# Tile size -> blocks per cluster -> active tiles per multiprocessor for which tile_weight_grad.cu uses clusters of this
# size, with CLUSTER_TOKENS tokens.
CLUSTERS = {64: {8: 0.15, 4: 0.38, 3: 0.55, 2: 0.8}, 128: {8: 0.08, 4: 0.2, 3: 0.57, 2: 0.475}}
CLUSTER_TOKENS = 2101


def find_wrong(device: torch.device) -> list[str]:
    """Run all checks; list what is wrong."""
    names = [name for name in backends.available(device) if name != "reference"]
    wrong: list[str] = []
    n_run = 0
    for op, dtype, density in itertools.product(backends.OPS, DTYPES, DENSITIES):
        for oracle, name in itertools.product(cases_of(op, dtype, density), names):
            n_run += 1
            wrong += [str(error) for error in find_error(oracle, name, device)]
    print(f"{n_run} calls of {len(backends.OPS)} ops on {', '.join(names) or 'no backend'}: {len(wrong)} wrong")
    if not n_run:
        wrong.append(f"no op ran: {device} has no backend except the reference")
    patches = [
        f"patch: {_name(dtype)}, {density:.0%} changed"
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
        for density in (0.0, *DENSITIES)
        if not _patches_agree(dtype, density, device)
    ]
    print(f"patches and digests: {len(patches)} wrong")
    clusters = find_wrong_clusters(device) if "cuda" in names else []
    return [*wrong, *patches, *(f"cluster: {text}" for text in clusters)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_wrong_clusters(device: torch.device) -> list[str]:
    """Run tile products in clusters of each size; return those that are wrong or used another cluster size."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        print(f"clusters: skipped, a GPU of compute capability {'.'.join(map(str, capability))} has none")
        return []
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    wrong, n_run = [], 0
    for dtype in DTYPES:
        for blocks, case in cluster_cases(dtype, multiprocessors):
            n_run += 1
            tile_size, n_tiles = case.arguments["tile_size"], len(case.arguments["tiles"])
            name = f"tile{tile_size}, {_name(dtype)}, {n_tiles} tiles"
            if (found := blocks_in_cluster(case, device)) != blocks:
                wrong.append(f"{name}: {found} blocks in a cluster, expected {blocks}")
            wrong += [f"{name}: {error}, {blocks} blocks in a cluster" for error in find_error(case, "cuda", device)]
    print(f"{n_run} calls of tile_weight_grad_ in clusters of 2, 3, 4 and 8 blocks: {len(wrong)} wrong")
    return wrong


def cluster_cases(dtype: torch.dtype, multiprocessors: int) -> Iterator[tuple[int, Case]]:
    """Yield the blocks per cluster and a product that uses such clusters on a GPU with this many multiprocessors.

    Each product is a row of tiles, partial at both edges; every other one has rows of whole 16-byte chunks.
    """
    for tile_size, densities in CLUSTERS.items():
        for i, (blocks, tiles_each) in enumerate(densities.items()):
            cut = 8 if (i + DTYPES.index(dtype)) % 2 else 3
            shape = (tile_size - cut, round(tiles_each * multiprocessors) * tile_size - cut)
            generator = torch.Generator().manual_seed(0)
            yield (
                blocks,
                tile_weight_grad_case([shape], dtype, 1.0, generator, tokens=CLUSTER_TOKENS, tile_size=tile_size),
            )


def blocks_in_cluster(case: Case, device: torch.device) -> int:
    """The number of blocks that add up each tile of the call on backend cuda."""
    arguments = case.mapped(lambda t: t.to(device)).arguments
    names = ("out", "grad_outputs", "inputs", "tiles", "starts", "ends", "tile_size")
    parts: int = torch.ops.sparse_opt_native.tile_weight_grad_parts(*(arguments[name] for name in names))
    return parts


def _patches_agree(dtype: torch.dtype, density: float, device: torch.device) -> bool:
    """Whether the device encodes, decodes and hashes some changes as the reference does."""
    generator = torch.Generator().manual_seed(0)

    def any_bits(shape: Sequence[int]) -> Tensor:
        size = (math.prod(shape) * dtype.itemsize,)
        return torch.randint(256, size, generator=generator, dtype=torch.uint8).view(dtype).view(shape)

    old = [any_bits(shape) for shape in SHAPES.values()]
    # Random bits leave a few elements unchanged.
    new = [torch.where(torch.rand(t.shape, generator=generator) < density, any_bits(t.shape), t) for t in old]
    expected = patch_codec.encode(old, new, backend="reference")
    here_old, here_new = [t.to(device) for t in old], [t.to(device) for t in new]
    found = patch_codec.encode(here_old, here_new)
    same_bytes = all(torch.equal(part, found.parts()[name].cpu()) for name, part in expected.parts().items())
    patch_codec.apply_(here_old, found)
    same_words = all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(here_old, here_new, strict=True))
    return same_bytes and same_words and StateDigest.start(here_new).result() == StateDigest.start(new).result()


def cases_of(op: str, dtype: torch.dtype, density: float) -> list[Case]:
    """The cases of an op; sparse steps use dense gradients, full ones compact gradients and stochastic rounding.

    Steps that do not read the parameters have compact gradients at FEW, too: CUDA kernels list so few changes.
    """
    sparse = density < 1
    if op == "tile_weight_grad_":
        # More tokens than a block takes, or so many that each tile is split into parts, which form a cluster on a GPU.
        tile_size, few_tokens = (64, 301) if sparse else (128, 2101)
        return [
            tile_weight_grad_case(
                shapes, dtype, density, torch.Generator().manual_seed(0), tokens=tokens, tile_size=tile_size
            )
            for shapes, tokens in ((SHAPES.values(), few_tokens), (ALIGNED_SHAPES, 2101))
        ]
    case = random_case(op, SHAPES, dtype, density, torch.Generator().manual_seed(0), dense_grads=sparse)
    if op not in STEP_OPS:
        return [case]
    if not sparse:
        case = case.changed(stochastic_rounding=True, seed=1)
        return [case, *cases_with_known_weights(case)]
    compact = random_case(op, SHAPES, dtype, FEW, torch.Generator().manual_seed(0), dense_grads=False)
    return [case, *cases_with_known_weights(case), *cases_with_known_weights(compact)]


def cases_with_known_weights(case: Case) -> list[Case]:
    """Copies of a step's case that do not read the parameters: with a copy of their weights, and with masters."""
    given = case.arguments
    weights = torch.empty(given["indices"].numel(), dtype=given["params"][0].dtype)
    segments = (given[name] for name in ("indices", "starts", "ends"))
    ops.masked_grad_gather_(
        weights, given["params"], *segments, index_bases=given.get("index_bases"), backend="reference"
    )
    known: dict[str, dict[str, Any]] = {
        "weights": {"weights": weights},
        "master": {"master": weights.float(), "params_hold_master": True},
    }
    return [replace(case.changed(**more), written=(*case.written, name)) for name, more in known.items()]


def find_error(oracle: Case, backend: str, device: torch.device) -> list[str]:
    """Run the case on the device; return the error, or an empty list if the result is right."""
    try:
        # The reference runs on a copy, so that each backend starts from the same inputs.
        check(oracle.mapped(lambda t: t.to(device, copy=True)), backend, oracle.mapped(torch.clone))
    except WrongResult as error:
        return [str(error)]
    return []


def main(device: str = "cuda") -> int:
    wrong = find_wrong(torch.device(device))
    for line in wrong:
        print(f"WRONG RESULT: {line}", file=sys.stderr)
    print(f"{len(wrong)} wrong results in total")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
