"""Parses parameter names of language models into layer and part (attention, MLP, norm, ...), and selects names.

Supports the names of transformers' models (GPT-2, GPT-NeoX, GPT-J, OPT, Bloom, Llama, Mistral, Mixtral, Qwen 2 and 3,
Gemma 2 and 3, Phi, GPT-OSS and their relatives), under any prefix, and those of Mixtral's experts in checkpoints, where
w1 is the gate, w3 up and w2 down. The part `other` is for unknown names, the routers of experts, and heads other than
the language model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

Part = Literal[
    "embeddings",
    "attention_q",
    "attention_k",
    "attention_v",
    "attention_qkv",
    "attention_o",
    "mlp_gate",
    "mlp_up",
    "mlp_gate_up",
    "mlp_down",
    "norms",
    "lm_head",
    "other",
]
# In the order in which data flows through a model; tables and plots list them in this order.
PARTS: tuple[Part, ...] = get_args(Part)
PART_LABELS: dict[Part, str] = {
    "embeddings": "embeddings",
    "attention_q": "attention q",
    "attention_k": "attention k",
    "attention_v": "attention v",
    "attention_qkv": "attention qkv",
    "attention_o": "attention o",
    "mlp_gate": "MLP gate",
    "mlp_up": "MLP up",
    "mlp_gate_up": "MLP gate+up",
    "mlp_down": "MLP down",
    "norms": "norms",
    "lm_head": "lm_head",
    "other": "other",
}

_MODULES: dict[str, Part] = {
    "q_proj": "attention_q",
    "k_proj": "attention_k",
    "v_proj": "attention_v",
    "qkv_proj": "attention_qkv",
    "c_attn": "attention_qkv",
    "query_key_value": "attention_qkv",
    "o_proj": "attention_o",
    "gate_proj": "mlp_gate",
    "up_proj": "mlp_up",
    "gate_up_proj": "mlp_gate_up",
    "down_proj": "mlp_down",
    "c_fc": "mlp_up",
    "fc1": "mlp_up",
    "fc_in": "mlp_up",
    "dense_h_to_4h": "mlp_up",
    "fc2": "mlp_down",
    "fc_out": "mlp_down",
    "dense_4h_to_h": "mlp_down",
    "embed_tokens": "embeddings",
    "embed_positions": "embeddings",
    "embed_in": "embeddings",
    "word_embeddings": "embeddings",
    "wte": "embeddings",
    "wpe": "embeddings",
    "lm_head": "lm_head",
    "embed_out": "lm_head",
}
# Names whose meaning depends on the block.
_IN_ATTENTION: dict[str, Part] = {"c_proj": "attention_o", "out_proj": "attention_o", "dense": "attention_o"}
_IN_MLP: dict[str, Part] = {"c_proj": "mlp_down", "w1": "mlp_gate", "w2": "mlp_down", "w3": "mlp_up"}
_ATTENTION_BLOCKS = frozenset({"attn", "self_attn", "attention", "self_attention"})
_MLP_BLOCKS = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "experts"})
_CONV1D = frozenset({"c_attn", "c_proj", "c_fc"})
_NORM = re.compile(r"norm|^ln_")
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Component:
    """A parameter's place in its model.

    Attributes:
        layer: number of the layer; None outside of all layers.
        part: one of `PARTS`; a bias has the part of its weight.
        conv1d: True for a weight of GPT-2's c_attn, c_proj and c_fc, which transformers' Conv1D stores transposed,
            [in, out] instead of the [out, in] of a Linear. Wrong for GPTBigCode and GPT-Neo, which use some of these
            names for a Linear.
    """

    layer: int | None
    part: Part
    conv1d: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key in the order of data flow: embeddings, layers with their parts as in `PARTS`, then the rest."""
        stage = 1 if self.layer is not None else (0 if self.part == "embeddings" else 2)
        return stage, self.layer or 0, PARTS.index(self.part)


def layer_of(name: str) -> int | None:
    """Return the first integer among a name's dotted parts, or None."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def layer_label(layer: int | None) -> str:
    """Return `3` for layer 3, and `none` outside of all layers."""
    return "none" if layer is None else str(layer)


def in_layer_order(layers: Iterable[int | None]) -> list[int | None]:
    """Return each layer once, ascending; None, for parameters outside of all layers, is last."""
    return sorted(set(layers), key=lambda layer: (layer is None, layer or 0))


def component_of(name: str) -> Component:
    """Return the component of the parameter of this name, or of its slice `name[0]`; the part is `other` if unknown."""
    # GPT-OSS's experts have parameters of their own, gate_up_proj and gate_up_proj_bias, in place of modules.
    words = [word.removesuffix("_bias") for word in name.partition("[")[0].split(".")]
    layer = layer_of(name)
    # Last word first: a norm inside an attention block is a norm, and `q_proj.lora_A.weight` belongs to q_proj.
    for i in range(len(words) - 1, -1, -1):
        part = _part_of(words[i], words[:i])
        if part is not None:
            return Component(layer, part, conv1d=words[i] in _CONV1D and words[i + 1 :] == ["weight"])
    return Component(layer, "other")


def _part_of(word: str, before: list[str]) -> Part | None:
    if _NORM.search(word):
        return "norms"
    if word in _MODULES:
        return _MODULES[word]
    for block in reversed(before):
        if block in _ATTENTION_BLOCKS:
            return _IN_ATTENTION.get(word)
        if block in _MLP_BLOCKS:
            return _IN_MLP.get(word)
    return None


def place_of(name: str) -> tuple[int | None, Part]:
    """Return layer and part of a parameter."""
    component = component_of(name)
    return component.layer, component.part


def group(values: Mapping[str, _Value], key_of: Callable[[str], _Key]) -> dict[_Key, list[_Value]]:
    """Group values by a key of their parameters' names."""
    groups: dict[_Key, list[_Value]] = {}
    for name, value in values.items():
        groups.setdefault(key_of(name), []).append(value)
    return groups


def group_by_layer(values: Mapping[str, _Value]) -> dict[int | None, list[_Value]]:
    """Group values by the layer of their parameters, ascending; None, outside of all layers, is last."""
    groups = group(values, layer_of)
    return {layer: groups[layer] for layer in in_layer_order(groups)}


def group_by_part(values: Mapping[str, _Value]) -> dict[Part, list[_Value]]:
    """Group values by the part of their parameters, in the order of `PARTS`."""
    groups = group(values, lambda name: component_of(name).part)
    return {part: groups[part] for part in PARTS if part in groups}


# Names of the feed-forward blocks in transformers: mlp in Llama, Qwen, Gemma and GPT-2; block_sparse_moe in Mixtral;
# fc1 and fc2 in OPT.
_MLP_NAMES = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "fc1", "fc2"})


def is_mlp_parameter(name: str) -> bool:
    """True if a dotted part of the name is mlp, feed_forward, ffn, block_sparse_moe, fc1 or fc2."""
    return not _MLP_NAMES.isdisjoint(name.split("."))


# The module of a layer's experts.
EXPERTS = re.compile(r"(?:^|\.)experts\.")
_GATE = re.compile(r"(?:^|(.*)\.)gate\.")


def router_names(names: Iterable[str]) -> set[str]:
    """Return those of a model's parameter names that are of routers of experts, biases included.

    A router is the module `gate` next to `experts`, or any module named `router`.
    """
    names = list(names)
    blocks = {name[: experts.start()] for name in names if (experts := EXPERTS.search(name))}
    gates = {name for name in names if (gate := _GATE.match(name)) and (gate[1] or "") in blocks}
    return gates | {name for name in names if "router" in name.split(".")}


def select_names(
    names: Iterable[str],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    routers: bool = True,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the selected names, in their order.

    Args:
        names: all of the model's, or those of whole layers: a router may be known by the experts next to it.
        tied: further name -> name of the same tensor, such as lm_head.weight -> model.embed_tokens.weight; a pattern
            that matches one of them matches the tensor.
        include: shell patterns (`*.layers.3.*`), case-sensitive, for whole names; a name must match one. None: all.
        exclude: shell patterns; a name must match none.
        mlp_only: only tensors of feed-forward blocks (`is_mlp_parameter`).
        routers: False leaves out the routers of experts (`router_names`).
    """
    names = list(names)
    left_out = frozenset() if routers else router_names(names)

    def matches(name: str, patterns: Iterable[str]) -> bool:
        labels = [name, *(further for further, first in tied.items() if first == name)]
        return any(fnmatchcase(label, pattern) for pattern in patterns for label in labels)

    return [
        name
        for name in names
        if name not in left_out
        and (include is None or matches(name, include))
        and not matches(name, exclude or ())
        and (not mlp_only or is_mlp_parameter(name))
    ]


def tied_text(tied: Mapping[str, str]) -> list[str]:
    """Return a line for each further name of a tied tensor, for outputs that list tensors by their first names."""
    return [f"tied: {further} is the same tensor as {first}, and counts once" for further, first in tied.items()]
