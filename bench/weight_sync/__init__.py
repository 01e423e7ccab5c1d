"""Benchmark of weight updates from a trainer to an inference engine on another GPU."""
