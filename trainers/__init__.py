"""Minimal training loops, one file per algorithm: `dpo` and `sft`. They drive and measure the optimizer.

Of `grpo` there are the loss, the advantages and the rollout, which `sparse-opt bench baseline grpo`
measures; no loop yet.
"""
