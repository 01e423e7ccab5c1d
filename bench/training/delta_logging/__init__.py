"""Benchmark of logging every step of a training loop."""
