"""Updates of experts, one parameter for each layer in the trainer, on a stand-in for an engine that slices each expert.

tests/vllm_engine has them in a real vLLM.
"""

import re

import pytest
import torch
from moe_models import moe_model
from safetensors.torch import load_file
from torch import Tensor, nn

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.loader_trace import trace_destinations, trace_layout
from sparse_opt.weight_sync import Destination, WeightReceiver, WeightSender

EXPERTS, SIZE, LAYERS = 5, 64, (0, 1)
_CHECKPOINT_NAME = re.compile(r"model\.layers\.(\d)\..*experts\.(\d)\.(w[123]|gate_proj|up_proj|down_proj)\.weight")


class Engine(nn.Module):
    """Rank `rank` of `ranks` has its rows of gate and up projections in `w13`, and its columns of the down projection.

    Args:
        rearranged: the loader computes another order of the values.
    """

    def __init__(self, rank: int, ranks: int, rearranged: bool = False) -> None:
        super().__init__()
        self.rank, self.ranks, self.rearranged = rank, ranks, rearranged
        own = SIZE // ranks
        for layer in LAYERS:
            self.register_buffer(f"w13_{layer}", torch.zeros(EXPERTS, 2 * own, SIZE, dtype=torch.bfloat16))
            self.register_buffer(f"w2_{layer}", torch.zeros(EXPERTS, SIZE, own, dtype=torch.bfloat16))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if (match := _CHECKPOINT_NAME.fullmatch(name)) is None:
                continue
            layer, expert, projection = match.groups()
            weight = weight.flip(0) if self.rearranged else weight
            if projection in ("w2", "down_proj"):
                own = weight.chunk(self.ranks, 1)[self.rank]
                self.get_buffer(f"w2_{layer}")[int(expert)].copy_(own.contiguous())  # as loaders do for a faster copy
            else:
                half = self.get_buffer(f"w13_{layer}")[int(expert)].chunk(2)[projection in ("w3", "up_proj")]
                half.copy_(weight.chunk(self.ranks, 0)[self.rank])


def loaded(folder, model, *where: int) -> Engine:
    model.save_pretrained(folder)
    engine = Engine(*where)
    engine.load_weights(list(load_file(folder / "model.safetensors").items()))
    return engine


def masks_of(model) -> list[MaskSet]:
    fused = {name: p for name, p in model.named_parameters() if ".experts." in name}
    return [
        MaskSet.random(fused, density=0.4, pattern="tile64", seed=0),
        MaskSet.random(fused, density=0.1, seed=0),
        MaskSet.experts(model, {0: [1, 4], 1: [0]}),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])  # mixtral's checkpoint has other names than its parameters
def test_updates_of_fused_experts_equal_a_fresh_load(family, ranks, tmp_path):
    model = moe_model(family, torch.bfloat16)
    engines = [loaded(tmp_path / "base", model, rank, ranks) for rank in range(ranks)]
    for i, mask in enumerate(masks_of(model)):
        sender = WeightSender(model, mask)
        receivers = [
            WeightReceiver(None, destinations=lambda layout, e=engine: trace_layout(e, layout, config=model.config))
            for engine in engines
        ]
        for receiver in receivers:
            receiver.receive(sender.mask_message())
            receiver.receive(sender.state_message())
        with torch.no_grad():
            for name, indices in mask.indices.items():
                model.get_parameter(name).view(-1)[indices.long()[::2]] += 0.5
        message = sender.update()
        for rank, (engine, receiver) in enumerate(zip(engines, receivers, strict=True)):
            assert receiver.receive(message) == 1
            assert receiver.is_whole == (ranks == 1)
            if receiver.is_whole:
                receiver.verify()
            fresh = loaded(tmp_path / f"{i}", model, rank, ranks)
            assert all(torch.equal(own, fresh.get_buffer(name)) for name, own in engine.named_buffers())


def places_of(engine: Engine, model) -> dict[str, list[Destination]]:
    fused = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters() if ".experts." in name}
    return trace_destinations(engine, fused, config=model.config)


def test_the_experts_of_a_layer_are_one_place_where_the_engine_has_them_in_order():
    places = places_of(Engine(0, 1), moe_model("mixtral", torch.bfloat16))
    assert [len(pieces) for pieces in places.values()] == [1] * 4


def test_a_loader_that_rearranges_experts_is_refused_by_name():
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.experts\.\w+ cannot be .* computes new values"):
        places_of(Engine(0, 1, rearranged=True), moe_model("qwen3", torch.bfloat16))
