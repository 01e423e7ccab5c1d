"""Benchmark of what the training loops learn on generated arithmetic."""
