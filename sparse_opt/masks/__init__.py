"""Masks: the active elements of a model, their patterns, files, set algebra and random sampling.

`mask_set.py` is the type, `mask_files.py` its files; `positions.py` checks positions and has the set operations on
them; `parameters.py` knows the names of models' parameters.
"""

from .algebra import intersect, invert, union
from .mask_set import MaskSet, MaskStats, RandomMask
from .patterns import PATTERNS

__all__ = ["PATTERNS", "MaskSet", "MaskStats", "RandomMask", "intersect", "invert", "union"]
