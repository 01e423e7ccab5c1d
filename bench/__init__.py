"""Benchmarks: each checks results before timing, interleaves the variants, and writes JSON with machine and versions.

| module | what it measures |
|---|---|
| `kernels.cpu_step` | the optimizer step on a CPU, next to `torch.optim.AdamW(fused=True)` |
| `kernels.table` | every op and optimizer of a 3B model, next to bandwidth bounds, peers and targets |
| `kernels.gpu_check` | all checks on a GPU: tests, `compute-sanitizer`, and the table of `kernels.table` |
| `kernels.plots` | plots of the rows written by `kernels.table` or `kernels.gpu_check` |
| `kernels.host_time` | host time of an optimizer step and of the gradient hooks |
| `kernels.dram_bytes` | the bytes that the ops move, counted by Nsight Compute, next to their minimum |
| `delta` | patches, delta logs and mask finding |
| `training.baseline` | training end to end, sparse, dense and LoRA: time of each part of a step, and peak memory |
| `training.profiles` | RFT's profiles compared with plain training: tokens per second, memory, accuracy |
| `training.delta_logging`, `training.trl_memory` | see their docstrings |
| `report_tables` | the generated tables of the documentation, from the JSON of measured runs |
| `common.harness` | the command line, report and exit code of every benchmark |
| `common.spread` | the spread between runs of the same code, from files of `pytest bench` |
| `test_bench_ops` | every op on every backend, for `pytest bench` (pytest-benchmark) |
"""
