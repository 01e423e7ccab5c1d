"""Benchmarks. Each checks a result before timing it, times variants side by side, and writes JSON with where it ran.

| module | what it measures |
|---|---|
| `cpu_step` | the optimizer step on a CPU, beside `torch.optim.AdamW(fused=True)` |
| `kernels` | every op and optimizer on the weight shapes of a 3B model, beside floors, peers and targets |
| `gpu_check` | everything on a GPU: tests, `compute-sanitizer`, and the table of `kernels` |
| `tile_gradients` | weight gradients under masks of tiles, beside torch's dense products: rows of `kernels` |
| `tile_plot` | a figure of those rows |
| `dram_bytes` | the bytes that the ops really move, counted by Nsight Compute, beside their floors |
| `roofline` | a figure of the rows that `kernels` or `gpu_check` wrote |
| `report_tables` | the tables of docs/performance.md, from the JSON of measured runs |
| `spread` | how far runs of one state lie apart, from files of `pytest bench` |
| `baseline` | training end to end, sparse beside dense and LoRA: the time of each part of a step, and peak memory |
| `learning` | what the loops learn on generated arithmetic: dense, LoRA and sparse, by learning rate and mask pattern |
| `profiles` | RFT's profiles and each of their settings, beside plain training: time, memory and accuracy |
| `test_bench_ops` | every op on every backend, for `pytest bench` (pytest-benchmark) |
"""
