"""Benchmark of model sizes: the peak memory and time of a DPO step on one GPU, dense, with LoRA, and under a mask."""
