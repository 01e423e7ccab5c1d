"""Mask finding: scores of elements, from a delta log or from a model, and the selection of the best ones."""
