"""Check that what `make release-check` has built may be published: one version, which the changelog describes."""

import re
import sys
from pathlib import Path


def problems(root: Path, dist: Path) -> list[str]:
    """Return what is wrong, one line each; empty if the files in `dist` may be published."""
    version = re.search(r'^__version__ = "(.+)"$', (root / "sparse_opt/__init__.py").read_text(), re.MULTILINE)
    if version is None:
        return ["sparse_opt/__init__.py has no line __version__ = ..."]
    found = []
    changelog = (root / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    if first is None or first[1] != version[1]:
        found.append(f"CHANGELOG.md begins with {first[1] if first else 'no version'}, expected {version[1]}")
    archives = [path.name for path in dist.iterdir() if path.is_file()]
    kinds = {"a manylinux abi3 wheel": r"-cp311-abi3-manylinux\S*\.whl$", "a source distribution": r"\.tar\.gz$"}
    for kind, pattern in kinds.items():
        if not any(re.search(pattern, name) for name in archives):
            found.append(f"{dist} has no {kind}")
    found += [
        f"{name} is not of version {version[1]}" for name in archives if not name.startswith(f"sparse_opt-{version[1]}")
    ]
    return found


if __name__ == "__main__":
    lines = problems(Path(__file__).resolve().parents[1], Path(sys.argv[1]))
    print("\n".join(lines) or "the version, the changelog and the archives agree")
    sys.exit(bool(lines))
