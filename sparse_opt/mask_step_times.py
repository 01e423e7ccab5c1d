"""How long a step takes under each pattern, as measured; the others of `mask_patterns` were not.

Made from bench/results/gpu_check.json: python -m sparse_opt.bench.mask_step_times
"""

from __future__ import annotations

MACHINE = "NVIDIA H200"
DATE = "2026-11-22"
# Elements of the stepped bf16 weights, and the share of them that is active.
NUMEL = 3212574720
DENSITY = 0.025
# Pattern -> milliseconds of `SparseAdamW.step, dense gradients`, median.
STEP_MS = {
    "element": 3.281,
    "run16": 0.722,
    "run32": 0.541,
    "tile64": 0.483,
    "tile128": 0.443,
}
# Of `torch.optim.AdamW(fused=True).step` on all of the weights.
DENSE_STEP_MS = 16.458
