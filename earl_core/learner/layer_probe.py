"""A copy of a few of a model's layers, to try what all of them would take long for."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn

from earl_core.learner.lm_head import head_of
from earl_core.pretrained.huggingface import PreTrainedModel

_LEAST = 2
_ROWS = 64


def layer_probe(model: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy with the first two layers and the first of every other kind, and with the
    first rows of the embedding and of the head. A model whose layers are unknown is copied whole.
    """
    memo: dict[int, Any] = {}
    for table in (model.get_input_embeddings(), head_of(model)):
        if (
            set(table._parameters) <= {"weight", "bias"}
            and table._parameters.get("weight") is not None
        ):
            memo[id(table)] = _first_rows(table)
    layers = decoder_layers(model)
    stack = next((each for each in model.modules() if list(each.children()) == layers), None)
    kept: list[int] = []
    if isinstance(stack, nn.ModuleList):
        kept = _chosen(layers, getattr(_text_config(model), "layer_types", None) or ())
        memo[id(stack)] = nn.ModuleList(copy.deepcopy(layers[place], memo) for place in kept)
    small = copy.deepcopy(model, memo).float()
    if kept:
        config = _text_config(small)
        for name, value in list(vars(config).items()):
            # What a configuration says of each layer.
            if isinstance(value, list | tuple) and len(value) == len(layers):
                setattr(config, name, type(value)(value[place] for place in kept))
        config.num_hidden_layers = len(kept)
    return small


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, also those that FSDP2 has made a class of its own for; none are known
    where the model names none."""
    names = set(model._no_split_modules or ())
    return [
        module
        for module in model.modules()
        if any(each.__name__ in names for each in type(module).__mro__)
    ]


def _chosen(layers: list[nn.Module], types: Any) -> list[int]:
    kinds: list[object] = []
    kept = []
    for place, layer in enumerate(layers):
        kind = (
            [type(each) for each in layer.modules()],
            types[place] if len(types) == len(layers) else "",
        )
        if place < _LEAST or kind not in kinds:
            kept.append(place)
        kinds.append(kind)
    return kept


def _first_rows(table: nn.Module) -> nn.Module:
    short = copy.copy(table)
    short._parameters = {
        name: None if each is None else nn.Parameter(each.detach()[:_ROWS].float())
        for name, each in table._parameters.items()
    }
    if (getattr(table, "padding_idx", None) or 0) >= _ROWS:
        cast(Any, short).padding_idx = None
    return short


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()
