"""Benchmark of verl's actor update: the sparse engine compared with verl's own FSDP2 engine."""
