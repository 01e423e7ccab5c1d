"""Weight updates of a masked run for SGLang, by its hook for custom weight loaders.

It has run with SGLang 0.5.17 on CPUs; `tests` have a stand-in for its models.

SGLang calls a loader of the user, named by `--custom-weight-loader`, for requests `update_weights_from_tensor` with
that `load_format`. Start it with this package in its environment:

    python -m sglang.launch_server --model-path ... --custom-weight-loader sparse_opt.integrations.sglang.load_message

and send, with `engine` an `sglang.Engine` of the trainer's process, the mask and the state first, then the updates:

    sender = WeightSender(optimizer)
    for message in (sender.mask_message(), sender.state_message()):
        engine.update_weights_from_tensor(named_tensors(message), load_format=LOAD_FORMAT)
    for batch in batches:
        ...
        optimizer.step()
        engine.update_weights_from_tensor(named_tensors(sender.update()), load_format=LOAD_FORMAT)

SGLang drops its KV cache after each request (`flush_cache`, which is on by default). A refused message leaves the
weights as they were, but SGLang does not handle exceptions of a loader: the engine ends, and with it the process that
holds an `sglang.Engine`. A restarted engine needs the mask and the state again. Pipeline parallelism is not supported.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..errors import DamagedMessage, WeightSyncError
from ..weight_sync import Destination, Message, PendingMessage, WeightReceiver
from ..weight_sync.encoding import Layout
from .loader_trace import require_plain_method, storage_key, trace_layout

LOAD_FORMAT = "sparse_opt.integrations.sglang.load_message"
_HEADER = "sparse_opt.header"
_receivers: weakref.WeakKeyDictionary[nn.Module, WeightReceiver] = weakref.WeakKeyDictionary()


def named_tensors(message: Message | PendingMessage) -> list[tuple[str, Tensor]]:
    """Return a message as the (name, tensor) pairs that `update_weights_from_tensor` takes.

    The header is a uint8 tensor of UTF-8 JSON on the CPU; the other tensors stay on their device.
    """
    message = message.wait()
    header = torch.frombuffer(bytearray(json.dumps(message.header()).encode()), dtype=torch.uint8)
    return [(_HEADER, header), *message.tensors.items()]


def load_message(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check a message and apply it to a model of SGLang, which keeps its receiver until it is freed.

    Args:
        model: of SGLang, whose weights are written in place.
        tensors: as `named_tensors` has made them, on any device.

    Raises:
        WeightSyncError: the message is damaged, out of order or foreign, or a weight of the mask cannot be updated in
            this model. The weights have not changed.
    """
    content = dict(tensors)
    if _HEADER not in content:
        raise DamagedMessage(f"a message without {_HEADER} reached {LOAD_FORMAT}: send `named_tensors(message)`")
    header = content.pop(_HEADER)
    try:
        fields = json.loads(bytes(header.cpu().numpy()))
    except ValueError as error:
        raise DamagedMessage(f"the header of a message is malformed: {error}") from error
    message = Message.from_header(fields, content)
    receiver = _receivers.get(model)
    if receiver is None:
        reference = weakref.ref(model)  # the dictionary would never release a model that its own value refers to
        receiver = _receivers[model] = WeightReceiver(None, destinations=lambda layout: _find(reference(), layout))
    receiver.receive(message)


def _find(model: nn.Module | None, layout: Layout) -> dict[str, list[Destination]]:
    """Return where SGLang has the weights of a mask."""
    assert model is not None  # load_message holds it
    places = trace_layout(model, layout)
    for name, pieces in places.items():
        keys = {storage_key(piece.tensor) for piece in pieces}
        for layer_name, layer in model.named_modules():
            if not any(storage_key(parameter) in keys for parameter in layer.parameters(recurse=False)):
                continue
            require_plain_method(name, layer_name, layer)
            if getattr(layer, "use_intel_amx_backend", False):
                raise WeightSyncError(
                    f"weight {name} belongs to layer {layer_name}, which SGLang has packed for the CPU"
                )
    return places
