"""Benchmarks. Each checks results before it times them, times variants in turns, and writes rows.

| module | |
|---|---|
| `rows` | a row is one measured value of one case; a run is rows with one environment, as JSON |
| `harness` | the command line of every benchmark; `Work`: something to check and then to time |
| `timing` | times calls in turns |
| `shapes`, `models` | sizes and shapes of models, their configurations, random weights, and texts of random words |
| `ranks` | one of several processes of a benchmark: options, process group, device, mask, times of the slowest |
| `report`, `targets.yaml`, `plot` | tables and verdicts of rows, for a terminal and for the documentation; pictures |
| `kernels` | every op and optimizer |
| `training` | whole steps: `baseline`, also with a delta log; `profiles` |
| `scale`, `grpo_engine`, `distributed`, `verl` | steps by model size; next to vLLM; on several GPUs; in verl |
| `weight_sync`, `delta` | weight updates to an engine; patches |
| `test_bench_ops` | every op on every backend, for `pytest bench` (pytest-benchmark) |

A new benchmark row is a `harness.Work` or a `rows.Row` that a benchmark's `measure` adds to its run.
"""
