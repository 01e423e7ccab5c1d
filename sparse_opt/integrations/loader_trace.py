"""Where an inference engine keeps the weights of a checkpoint: a trace of the engine's own weight loaders.

vLLM and SGLang fuse checkpoint tensors (q_proj, k_proj and v_proj into qkv_proj), slice them for tensor parallelism,
pad vocabularies and tie heads, differently in each model. Their loaders know all of that: each of them takes views of
the checkpoint tensor and copies them to views of runtime tensors. Here the loaders run on checkpoint tensors of the
meta device, and their copies are recorded and not executed: offset and strides of the two views give the rows and
columns of the checkpoint tensor and their place. No table of names is needed, and nothing is written to the model.

A trainer's parameters are not always the tensors of a checkpoint: transformers 5 has the experts of a layer in one
parameter, and saves most models with a tensor for each expert, some under other names. With the model's configuration
its own conversion runs before the loader, within the trace, as `save_pretrained` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ForeignMessage, WeightSyncError
from ..masks.patterns import matrix_shape
from ..weight_sync import Destination
from ..weight_sync.encoding import DTYPES, Layout

_aten = torch.ops.aten
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # of vLLM and of SGLang


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists, also on the meta device."""
    return tensor.untyped_storage()._cdata


def trace_destinations(
    model: nn.Module, weights: Mapping[str, tuple[Sequence[int], torch.dtype]], *, config: Any = None
) -> dict[str, list[Destination]]:
    """Return the places to which `model.load_weights` copies each weight.

    Args:
        model: a model of vLLM or SGLang, whose `load_weights` takes (name, tensor) pairs. It is not changed.
        weights: name in the checkpoint -> shape and dtype of the checkpoint tensor.
        config: the model's configuration of transformers. With it, `weights` may also be parameters of transformers'
            model.

    Returns:
        name -> destinations, with rows and columns, whose tensors are views of the model's, on the meta device if the
        model's are. The list is empty for weights that this process does not hold (other pipeline stages), and for
        names that the model's loader ignores.

    Raises:
        WeightSyncError: a loader does something else than copy views of the checkpoint tensor to tensors of the same
            dtype: it computes new values, converts the dtype, reads values or replaces a parameter. Names the weight.
    """
    with torch.no_grad():
        return {name: _trace(model, name, tuple(shape), dtype, config) for name, (shape, dtype) in weights.items()}


def trace_layout(
    model: nn.Module, layout: Layout, *, is_whole: bool = True, config: Any = None
) -> dict[str, list[Destination]]:
    """`trace_destinations` for the weights of a mask message.

    Args:
        is_whole: False if other processes have other layers or experts of the model (pipeline, expert parallelism).

    Raises:
        ForeignMessage: the whole model has no place for a weight; names it.
    """
    weights = {t.name: (t.shape, DTYPES[t.dtype]) for t in layout.tensors if t.nnz}
    found = trace_destinations(model, weights, config=config)
    for name, pieces in found.items():
        if is_whole and not pieces:
            raise ForeignMessage(f"{type(model).__name__} has no weight {name!r}, which the mask names")
    return found


def require_plain_method(name: str, layer_name: str, layer: nn.Module) -> None:
    """Raise WeightSyncError if a layer has a quantization method that may store weight `name` in another layout."""
    method = type(getattr(layer, "quant_method", None))
    if method is not type(None) and not any(base.__name__ in _PLAIN_METHODS for base in method.__mro__):
        raise WeightSyncError(
            f"weight {name} belongs to layer {layer_name} with {method.__name__}, which may store it in another "
            f"layout: expected {' or '.join(_PLAIN_METHODS)}"
        )


def _trace(model: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, config: Any) -> list[Destination]:
    source = torch.empty(shape, dtype=dtype, device="meta")
    trace = _CopyTrace(name, source)
    try:
        with _RefuseReplacedData(name), trace:
            saved = _as_saved(name, source, config)
            model.load_weights(saved)  # type: ignore[operator]  # nn.Module has no such method
    except WeightSyncError:
        raise
    except Exception as error:  # loaders raise anything; the message names the weight
        raise WeightSyncError(
            f"the engine's loader of {type(model).__name__} fails for weight {name} of shape {list(shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    rows, columns = matrix_shape(shape)
    return _joined(piece for target, view in trace.copies for piece in _as_matrices(name, target, view, rows, columns))


def _as_saved(name: str, parameter: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors as which `save_pretrained` writes a parameter of a model with this configuration."""
    if config is None:
        return [(name, parameter)]
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    architecture = (getattr(config, "architectures", None) or [None])[0]
    conversions = get_checkpoint_conversion_mapping(architecture) or get_checkpoint_conversion_mapping(
        config.model_type
    )
    # transformers reverses them: one that makes several parameters of a tensor would need all of these at once.
    usable = [c for c in conversions or () if len(c.target_patterns) == 1 and not isinstance(c, PrefixChange)]
    model: Any = SimpleNamespace(config=config, _weight_conversions=usable)
    return list(revert_weight_conversion(model, {name: parameter}).items())


class _CopyTrace(TorchDispatchMode):
    """Record copies from views of `source`, and execute no operation that writes to a tensor."""

    def __init__(self, name: str, source: Tensor) -> None:
        super().__init__()
        self.name = name
        self.key = storage_key(source)
        self.dtype = source.dtype
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.copy_.default:
            return self._record(args[0], args[1])
        if func in (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default):
            if self._of_source(args[0]):
                self._refuse(f"writes to the checkpoint tensor ({func})")
            return args[0]  # padding of the vocabulary
        # A copy of a view has its values, and no operation can write to it here.
        if func in (_aten.clone.default, _aten.contiguous.default) and self._of_source(args[0]):
            return args[0]
        if func._schema.is_mutable:
            self._refuse(f"calls {func}")
        given = any(self._of_source(leaf) for leaf in tree_leaves((args, kwargs)))
        if given and func is _aten._local_scalar_dense.default:
            self._refuse("reads values of the checkpoint tensor")
        result = func(*args, **(kwargs or {}))
        if given and not all(self._of_source(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self._refuse(f"computes new values ({func})")
        return result

    def _of_source(self, value: Any) -> bool:
        return isinstance(value, Tensor) and storage_key(value) == self.key

    def _record(self, target: Tensor, source: Tensor) -> Tensor:
        if self._of_source(target):
            self._refuse("writes to the checkpoint tensor (aten.copy_)")
        if not self._of_source(source):
            self._refuse("copies values that are not in the checkpoint tensor")
        if target.dtype != source.dtype:
            self._refuse(f"converts {source.dtype} to {target.dtype}")
        if target.shape != source.shape:
            self._refuse(f"copies shape {list(source.shape)} to shape {list(target.shape)}")
        self.copies.append((target, source))
        return target

    def _refuse(self, action: str) -> None:
        raise WeightSyncError(
            f"weight {self.name} cannot be updated in place: the engine's loader {action}, expected copies of slices"
        )


class _RefuseReplacedData(TorchFunctionMode):
    """Refuse `parameter.data = tensor`, which is no operation of the dispatcher."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]  # a property, which stubs hide
            raise WeightSyncError(
                f"weight {self.name} cannot be updated in place: the engine's loader replaces the data of a parameter, "
                "expected copies of slices only"
            )
        return func(*args, **(kwargs or {}))


def _as_matrices(name: str, target: Tensor, view: Tensor, rows: int, columns: int) -> list[Destination]:
    """Split a copy into blocks of the [rows, columns] checkpoint matrix, each with one stride per dimension."""
    if view.numel() == 0:
        return []
    # (size, stride in the checkpoint tensor, stride in the runtime tensor), the checkpoint's outermost dimension first.
    dims = sorted(
        (d for d in zip(view.shape, view.stride(), target.stride(), strict=True) if d[0] > 1), key=lambda d: -d[1]
    )
    inner = [d for d in dims if d[1] < columns]
    outer = [d for d in dims if d[1] >= columns]
    row, column = divmod(int(view.storage_offset()), columns)
    if inner and column + inner[0][0] * inner[0][1] > columns:  # one dimension that runs over several whole rows
        size, stride, step = inner.pop(0)
        if column or columns % stride or size * stride % columns or outer:
            raise _not_a_block(name, view)
        outer = [(size * stride // columns, columns, step * (columns // stride))]
        inner.insert(0, (columns // stride, stride, step))
    outer, inner = _merged(outer), _merged(inner)
    if len(inner) > 1 or any(stride != 1 for _, stride, _ in inner) or any(d[1] % columns for d in outer):
        raise _not_a_block(name, view)
    width, _, column_step = inner[0] if inner else (1, 1, 1)
    if outer and outer[-1][1] == columns:
        height, _, row_step = outer.pop()
    else:
        height, row_step = 1, width
    pieces = [(row, target.storage_offset())]
    for size, stride, step in outer:
        pieces = [(r + i * stride // columns, offset + i * step) for r, offset in pieces for i in range(size)]
    return [
        Destination(
            rows=(r, r + height),
            columns=(column, column + width),
            tensor=target.as_strided((height, width), (row_step, column_step), offset),
        )
        for r, offset in pieces
    ]


def _joined(pieces: Iterable[Destination]) -> list[Destination]:
    """Join blocks whose rows follow each other in the weight and in memory, as those of a layer's experts."""
    joined: list[Destination] = []
    for piece in sorted(pieces, key=lambda piece: (piece.columns or (), piece.rows or ())):
        whole = _join(joined[-1], piece) if joined else None
        if whole is None:
            joined.append(piece)
        else:
            joined[-1] = whole
    return joined


def _join(a: Destination, b: Destination) -> Destination | None:
    assert a.rows is not None and b.rows is not None  # of every block
    (height, width), step = a.tensor.shape, a.tensor.stride()
    end = a.tensor.storage_offset() + height * step[0]
    if (a.columns, a.rows[1], step, end) != (b.columns, b.rows[0], b.tensor.stride(), b.tensor.storage_offset()):
        return None
    if storage_key(a.tensor) != storage_key(b.tensor):
        return None
    tensor = a.tensor.as_strided((height + b.tensor.shape[0], width), step)
    return Destination(tensor, (a.rows[0], b.rows[1]), a.columns)


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring dimensions that are one dimension in both tensors."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, step in dims:
        if merged and merged[-1][1] == size * stride and merged[-1][2] == size * step:
            merged[-1] = (merged[-1][0] * size, stride, step)
        else:
            merged.append((size, stride, step))
    return merged


def _not_a_block(name: str, view: Tensor) -> WeightSyncError:
    return WeightSyncError(
        f"weight {name} cannot be updated in place: the engine's loader copies a view of shape {list(view.shape)} with "
        f"strides {list(view.stride())}, expected a block of rows and columns"
    )
