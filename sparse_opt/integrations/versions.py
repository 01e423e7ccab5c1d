"""Which versions of other people's packages the subclasses here fit."""

from __future__ import annotations

from importlib import metadata

# transformers: the first with Trainer._clip_grad_norm and Trainer._get_grad_norm, by its source.
# TRL: the first with the fused LM head, through which DPO and GRPO call their reference.
FIRST = {"transformers": "5.3.0", "trl": "1.16.0"}


def require(package: str) -> None:
    """Raises ImportError, in one line, where `package` is missing or older than `FIRST` says."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"sparse_opt.integrations wants {package} >= {FIRST[package]}, which is not installed: "
            "pip install 'sparse-opt[integrations]'"
        ) from None
    from packaging.version import Version  # transformers depends on it

    if Version(found) < Version(FIRST[package]):
        raise ImportError(
            f"sparse_opt.integrations wants {package} >= {FIRST[package]}, found {found}: "
            f"pip install '{package}>={FIRST[package]}'"
        )
