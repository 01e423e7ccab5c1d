"""Minimal training loops, one file per algorithm: `sft`, `dpo`, `grpo`, `ppo`, `rft` and `rlt`.

Each file defines its options, its losses as pure functions of tensors, and `train(config)`, and reads from top to
bottom. Shared code is in `run`, `options`, `data`, `policy`, `rollouts` and `rewards`. The loops drive and measure the
optimizer. docs/trainers.md is the page for users.
"""
