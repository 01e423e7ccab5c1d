"""Benchmark of training steps on several devices: replicate and FSDP2, sparse and dense."""
