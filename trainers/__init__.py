"""Minimal training loops, one file per algorithm: `sft`, `dpo`, `grpo`, `ppo`, `rft` and `rlt`.

Each has its options, its losses as pure functions of tensors, and `train(config)`, read from top to bottom; what they
share is in `loop`, `options`, `rollouts` and `rewards`. They drive and measure the optimizer. docs/trainers.md is the
users' page.
"""
