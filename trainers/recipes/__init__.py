"""Recipes: what research code did that TRL does not, each with the option names and defaults of the original."""
