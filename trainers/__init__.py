"""Minimal training loops, one file per algorithm: `dpo` and `sft`. They drive and measure the optimizer."""
