"""Benchmarks of ops and optimizers: speed, bytes moved, and checks on a GPU."""
