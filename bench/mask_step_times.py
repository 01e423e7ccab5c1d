"""Write the step times that `sparse-opt mask find` quotes from a report of `make gpu-check`.

python -m sparse_opt.bench.mask_step_times bench/results/gpu_check.json sparse_opt/mask_step_times.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.atomic_files import written_aside
from sparse_opt.mask_patterns import PATTERNS

WORK = "SparseAdamW.step, dense gradients"
DENSITY = 0.025
DENSE_WORK = "torch.optim.AdamW(fused=True).step"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON of make gpu-check")
    parser.add_argument("output", type=Path, help="the module to write")
    args = parser.parse_args(argv)
    text = source(json.loads(args.report.read_text()))
    with written_aside(args.output) as aside:
        aside.write_text(text, encoding="utf-8")
    print(args.output)
    return 0


def source(report: Mapping[str, Any]) -> str:
    """The module's text."""
    kernels = report["kernels"]
    times: dict[str, float] = {}
    for row in kernels["rows"]:
        for pattern in PATTERNS:
            work = WORK if pattern == "element" else f"{WORK}, {pattern}"
            if row["work"] == work and row["density"] == DENSITY and row["is_auto"]:
                times[pattern] = round(row["ms"], 3)
    dense = next(round(row["ms"], 3) for row in kernels["rows"] if row["work"] == DENSE_WORK)
    environment = report["environment"]
    listed = "".join(f'    "{pattern}": {times[pattern]},\n' for pattern in PATTERNS if pattern in times)
    return f'''"""How long a step takes under each pattern, as measured; the others of `mask_patterns` were not.

Made from bench/results/gpu_check.json: python -m sparse_opt.bench.mask_step_times
"""

from __future__ import annotations

MACHINE = "{environment["machine"]["gpu"]["name"]}"
DATE = "{environment["date"][:10]}"
# Elements of the stepped bf16 weights, and the share of them that is active.
NUMEL = {kernels["numel"]}
DENSITY = {DENSITY}
# Pattern -> milliseconds of `{WORK}`, median.
STEP_MS = {{
{listed}}}
# Of `{DENSE_WORK}` on all of the weights.
DENSE_STEP_MS = {dense}
'''


if __name__ == "__main__":
    raise SystemExit(main())
