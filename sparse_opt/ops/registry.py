"""Registration of the ops of schemas.py with torch: their schemas, fakes, and what runs when one is called.

The native ops are defined here and not in the extension, so that the ops exist without a compiled extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..errors import memory_errors
from . import checks
from .namespace import NATIVE, PUBLIC
from .schemas import SCHEMAS, native_schema

_library = torch.library.Library(PUBLIC, "DEF")
_native = torch.library.Library(NATIVE, "FRAGMENT")
# The arguments of which the first that an op has is on the device that it runs on.
_ON_DEVICE = ("indices", "tiles", "new")


def increment_versions(*written: Tensor | Sequence[Tensor] | None) -> None:
    """Increment the version counters of written tensors, since autograd does not see writes through pointers."""
    for value in written:
        tensors = [value] if isinstance(value, Tensor) else value or []
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _unknown_until_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a traced function reads a length or a segment from a tensor; `run` checks the numbers later."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy, as tracing does anyway

    return any(free_unbacked_symbols(value) for value in (*args, *kwargs.values()) if not isinstance(value, str))


def _register(name: str) -> None:
    _library.define(SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    _native.define(native_schema(name))
    check = checks.of(name)
    arguments = getattr(getattr(torch.ops, PUBLIC), name).default._schema.arguments
    positional, named = ([a for a in arguments if a.kwarg_only is kind] for kind in (False, True))
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in positional]
    on_device = names.index(next(n for n in _ON_DEVICE if n in names))

    def with_defaults(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the arguments that the dispatcher leaves out because they equal their default."""
        args = args + tuple(kwargs.get(a.name, a.default_value) for a in positional[len(args) :])
        return args, {a.name: kwargs.get(a.name, a.default_value) for a in named}

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_defaults(args, kwargs)
        backend = kwargs.pop("backend")
        check(*args, **kwargs)
        place = args[on_device]
        device = (place if isinstance(place, Tensor) else place[0]).device
        with memory_errors():
            result = backends.function(name, device, backend)(*args, **kwargs)
        increment_versions(*(args[i] if i < len(args) else kwargs[n] for i, n in written))
        return result

    def fake(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_defaults(args, kwargs)
        kwargs.pop("backend")
        if not _unknown_until_run(args, kwargs):
            check(*args, **kwargs)
        return _fake_delta_encode(*args) if name == "delta_encode" else None

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{PUBLIC}::{name}", fake, lib=_library)


def _fake_delta_encode(old: list[Tensor], new: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    changed = torch.library.get_ctx().new_dynamic_size()
    wide = any(t.numel() > 2**31 - 1 for t in new)
    indices = new[0].new_empty(changed, dtype=torch.int64 if wide else torch.int32)
    return indices, new[0].new_empty(changed), torch.empty(len(new), dtype=torch.int64, device="cpu")


for _name in SCHEMAS:
    _register(_name)
