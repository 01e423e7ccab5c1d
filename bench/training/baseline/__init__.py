"""Benchmark of whole training steps: sparse, dense and LoRA."""
