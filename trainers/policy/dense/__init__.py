"""Optimizers of all weights, the baselines of the sparse ones, with the same clipping and master weights."""
