"""Check that what `make release-check` has built may be published: one version, which the changelog describes."""

import re
import sys
from pathlib import Path

MANYLINUX = r"-cp311-abi3-manylinux\S*\.whl$"


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
    kinds = {"a manylinux abi3 wheel": MANYLINUX, "a source distribution": r"\.tar\.gz$"}
    for kind, pattern in kinds.items():
        if not any(re.search(pattern, name) for name in archives):
            found.append(f"{dist} has no {kind}")
    # The archives of PyPI, which takes no local versions.
    found += [
        f"{name} is not of version {version[1]}"
        for name in archives
        if not re.match(rf"sparse_opt-{re.escape(version[1])}(-|\.tar\.gz$)", name)
    ]
    for path in cuda_wheels(dist):
        of_it = path.name.split("-")[1]
        if not re.fullmatch(rf"{re.escape(version[1])}\+cu\d+", of_it):
            found.append(f"cuda/{path.name} has the version {of_it}, expected {version[1]}+cu and a version of CUDA")
        if not re.search(MANYLINUX, path.name):
            found.append(f"cuda/{path.name} is not a manylinux abi3 wheel")
    return found


def cuda_wheels(dist: Path) -> list[Path]:
    """The wheels of `make wheel-cuda`, which needs nvcc."""
    return sorted((dist / "cuda").glob("*.whl"))


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    lines = problems(Path(__file__).resolve().parents[1], dist)
    print("\n".join(lines) or "the version, the changelog and the archives agree")
    if not cuda_wheels(dist):
        print(f"{dist}/cuda has no CUDA wheel: make wheel-cuda")
    sys.exit(bool(lines))
