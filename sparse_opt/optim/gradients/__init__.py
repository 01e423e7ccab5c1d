"""Collects compact gradients while autograd runs: hooks, buffers, tile gradients, and their average over ranks."""
