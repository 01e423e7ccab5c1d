"""Ships the weights of a trainer that trains under a mask to inference engines: positions once, then values only.

On the trainer:

    sender = WeightSender(optimizer)                    # or WeightSender(model, mask)
    data = [sender.mask_message().to_bytes()]           # once to every receiver
    for batch in batches:
        train_step(batch)
        data.append(sender.update().to_bytes())         # the active values, or a bitmap and the changed ones

On the inference engine, whose weights are those at which the sender was built:

    receiver = WeightReceiver(model)
    for message in data:
        version = receiver.receive(message)             # verified, then written in place; O(nnz)

An engine with other weights, or one that joins late, gets `sender.state_message()` after the mask. After any number of
updates its active weights have the bits of the trainer's. The remaining weights are never written.

`weight_sync.transports` brings the messages from process to process; docs/formats.md describes their bytes.
"""

from .delta_switch import DeltaSwitch
from .destinations import Destination
from .distributed import DistributedWeightSender
from .encoding import Message
from .receiver import WeightReceiver
from .sender import PendingMessage, WeightSender

__all__ = [
    "DeltaSwitch",
    "Destination",
    "DistributedWeightSender",
    "Message",
    "PendingMessage",
    "WeightReceiver",
    "WeightSender",
]
