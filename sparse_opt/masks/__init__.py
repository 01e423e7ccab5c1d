"""Masks: which elements of a model's weights may change."""

from .mask_set import MaskSet

__all__ = ["MaskSet"]
