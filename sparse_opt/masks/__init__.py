"""Masks: the active elements of a model, their patterns, files, set algebra and random sampling."""

from .mask_set import MaskSet

__all__ = ["MaskSet"]
