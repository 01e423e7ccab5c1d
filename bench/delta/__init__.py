"""Benchmarks of patches, delta logs and mask finding."""
