"""Shared code of the benchmarks: timing, tables, model shapes, and the description of machine and versions."""
