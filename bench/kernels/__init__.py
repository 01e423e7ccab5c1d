"""Benchmarks of ops and optimizers."""
