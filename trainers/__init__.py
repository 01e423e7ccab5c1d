"""Minimal training loops to read and to measure, one file per algorithm: `sft`, `dpo` and `grpo`, on one device.

Each file reads from top to bottom: options, loss, step, and the run. People train with `sparse-opt train`, which is TRL
under a mask; `recipes` has the original research code's other algorithms.
"""
