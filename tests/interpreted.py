"""Triton's interpreter without work that it repeats for every launch, operation or tensor; no result is another."""

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Patch `triton.language` once for all kernels, and make equal things once: numpy types, shapes.

    The interpreter patches it in each launch, and in each call of a function in the kernel, which takes longer than
    most functions. In each operation it makes a table of all numpy types, and several objects for every shape.
    """
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}
    scopes: dict[frozenset[str], Any] = {}

    @functools.cache
    def patched_by(fn: Callable[..., Any]) -> frozenset[str]:
        """The Triton modules that `_patch_lang` patches for a function: those named in the function's module."""
        found = [getattr(value, "__name__", None) for value in fn.__globals__.values()]
        return frozenset({"triton.language", "triton.language.core"}.intersection(found))

    def patch_once(fn: Callable[..., Any]) -> Any:
        if (modules := patched_by(fn)) not in scopes:
            scopes[modules] = patch(fn)
        return interpreter._LangPatchScope()  # restores nothing when the kernel has finished

    def cached_numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", cached_numpy_type)
        _share_shapes(monkeypatch)
        _leave_out_unused_checks(monkeypatch)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


def _share_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one shape share its objects, and of two blocks that share them none is broadcast."""
    from triton._utils import validate_block_shape
    from triton.language import core, semantic

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    @functools.cache
    def shared(sizes: builtins.tuple[int, ...]) -> tuple[Any, Any, int, Any]:
        """Of a block: its type's shape, its shape, and its number of elements as these two have it."""
        numel = validate_block_shape(sizes)
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return core.tuple(list(sizes)), shape, numel, core.constexpr(numel)

    of_scalars = core.tuple([]), core.constexpr(1)

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        sizes = builtins.tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.element_ty = element_ty
        self.shape, self.of_tensor, self.numel, self.numel_of_tensor = shared(sizes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.of_tensor, type.numel_of_tensor
        else:
            self.shape, self.numel = of_scalars

    def broadcast_unless_shared(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    monkeypatch.setattr(core.block_type, "__init__", init_type)
    monkeypatch.setattr(core.block_type, "name", name, raising=False)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_unless_shared)


def _leave_out_unused_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its option `debug` the interpreter looks for overflows of each sum and product, and drops the answer."""
    from triton.language import semantic

    check = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_used(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    monkeypatch.setattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", check_if_used)
