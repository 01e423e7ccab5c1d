"""Benchmarks. Each checks a result before timing it, times variants side by side, and writes JSON with where it ran.

| module | what it measures |
|---|---|
| `cpu_step` | the optimizer step on a CPU, beside `torch.optim.AdamW(fused=True)` |
| `gpu_check` | everything on a GPU: tests, `compute-sanitizer`, and every op on the weight shapes of a 3B model |
| `dpo_step` | DPO end to end, dense beside sparse: step time and peak memory |
| `test_bench_ops` | every op on every backend, for `pytest bench` (pytest-benchmark) |
"""
