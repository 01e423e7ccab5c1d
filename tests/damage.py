"""Damage to files."""

from pathlib import Path


def flip(file: Path, at: int = -1, bits: int = 1) -> None:
    """Flip bits of the byte at this place."""
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)
