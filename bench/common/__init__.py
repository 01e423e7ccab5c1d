"""Shared by the benchmarks: timing, tables, model shapes, and where a run was made."""
