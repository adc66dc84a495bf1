"""Check that a model can be trained on packed samples exactly: tried on two tiny ones."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.recurrence import state_widths
from earl_core.learner.attention.varlen import windows_seen
from earl_core.learner.data.prefix_tree import PrefixTree, TokenRun, separate
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.pretrained.logit_transform import LogitTransform
from earl_core.system.errors import ConfigError

# Kinds of layers, as configurations name them, that attend and carry no state along.
_ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

_LARGE = 100.0
"""The largest logit of those that show what happens to large ones; caps are at 15 to 50."""

_FIRST, _SECOND = (1, 3, 2, 4, 2), (5, 1, 7)
# The same two beginnings, the second as a continuation of the first's two first tokens.
_FORKED = PrefixTree((TokenRun(0, 2, 0, -1), TokenRun(2, 3, 2, 0), TokenRun(5, 3, 2, 0)), (1, 2))


@torch.no_grad()
def check_packing(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> None:
    """Two tiny samples, packed and alone, and the model's own logits must agree.

    model: a float32 copy, whose head is changed. decoder: the model below its head. Raises
    ConfigError with what the model does that packed training does not reproduce.
    """
    name = type(model).__name__
    _check_config(model)
    first, both = len(_FIRST), separate((len(_FIRST), len(_SECOND)))
    limit = getattr(_text_config(model), "max_position_embeddings", None) or 0
    with windows_seen() as windows:
        try:
            alone = _forward(decoder, model, _SECOND)
        except Exception as error:
            raise _refusal(model, error, attended=bool(windows)) from error
    if not windows:
        raise _unattended(model)
    _check_windows(model, windows)
    again = _forward(decoder, model, _SECOND)
    packed = _forward(decoder, model, _FIRST + _SECOND, both)[first:]
    # Few tokens stand for a long sample: what depends on the length depends on positions.
    begin = max(0, limit - first)
    beside_long = _forward(decoder, model, _FIRST + _SECOND, both, begin)[first:]
    if not _equal(again, alone):
        raise ConfigError(
            f"{name} gives other results each time (noise in its layers), so that log-probs would "
            "not be those of the policy that played: choose a model without it."
        )
    if not _equal(packed, alone):
        what = _carrying(model) or "some layers"
        raise ConfigError(
            f"{name} lets packed samples see each other: {what} do more than attend (a recurrence "
            "or a convolution): choose a model whose layers mix tokens by attention, or by gated "
            "delta rules as those of Qwen3.5 do."
        )
    if state_widths(model):
        _check_states(model, decoder)
    if not _equal(beside_long, alone):
        raise ConfigError(
            f"{name} chooses its position factors by the longest sample of a forward pass, so that "
            "a sample's log-probs would depend on what it is packed with, and the engine's would "
            "be others: choose a model whose factors are fixed, or one of rope type `longrope` or "
            "`dynamic` as transformers has them, which are fixed by the model's limit."
        )
    _check_logits(model, decoder, head)


def _check_states(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise ConfigError unless both branches of a tree continue the state of what they share."""
    shared = _FIRST[:2]
    forked = _forward(decoder, model, _FIRST + _SECOND, _FORKED)
    one = _forward(decoder, model, _FIRST)
    other = _forward(decoder, model, shared + _SECOND)[len(shared) :]
    if not _equal(forked, torch.cat([one, other])):
        raise ConfigError(
            f"{type(model).__name__} does not begin each branch of samples that begin alike with "
            "the state of what they share, so that one sample's state would reach another: choose "
            "a model whose layers mix tokens by attention only."
        )


def _forward(
    module: nn.Module,
    model: PreTrainedModel,
    tokens: tuple[int, ...],
    tree: PrefixTree | None = None,
    begin: int = 0,
) -> torch.Tensor:
    """The module's first output, float32 [T, ...]. tree: of the samples; None: there is one.
    begin: the first run's first position."""
    embeddings = cast(torch.Tensor, cast(Any, model).get_input_embeddings().weight)
    tree = tree or separate((len(tokens),))
    positions = torch.cat([torch.arange(run.length) + run.depth for run in tree.runs])
    positions[: tree.runs[0].length] += begin
    output = module(
        input_ids=torch.tensor([tokens], device=embeddings.device) % embeddings.shape[0],
        position_ids=positions[None].to(embeddings.device),
        use_cache=False,
        sample_boundaries=SampleBoundaries.from_tree(tree, embeddings.device),
    )
    return cast(torch.Tensor, output[0])[0].float()


def _check_logits(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> None:
    """Compare the model's own logits with those that training makes of its hidden states.

    They are made larger than any cap, for one under an unknown name bends no small ones.
    """
    transform = LogitTransform.of(model.config)
    plain = nn.functional.linear(_forward(decoder, model, _SECOND), *_linear(head))
    factor = _LARGE / transform.scale / plain.abs().max().clamp_min(1e-6)
    for parameter in head.parameters():
        # Its numbers may be those of the model that is trained.
        parameter.data = parameter * factor
    # The embeddings may be the same parameter.
    states = _forward(decoder, model, _SECOND)
    ours = transform(nn.functional.linear(states, *_linear(head)))
    if not _equal(ours, _forward(model, model, _SECOND)):
        raise ConfigError(
            f"{type(model).__name__} changes its logits in or after the output layer in a way that "
            "is not known here, so that training would not reproduce it: choose another model."
        )


def _linear(head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias, which are all that training takes of a head."""
    bias = getattr(head, "bias", None)
    return cast(torch.Tensor, head.weight).float(), None if bias is None else bias.float()


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def _refusal(model: PreTrainedModel, error: Exception, *, attended: bool) -> ConfigError:
    name = type(model).__name__
    if isinstance(error, ConfigError):
        return ConfigError(f"{name} cannot be trained on packed samples: {error}")
    if not attended and not _calls_interface(model):
        return without_interface(name)
    return ConfigError(
        f"{name} cannot be trained on packed samples: its forward pass fails without an attention "
        f"mask ({type(error).__name__}: {error}). Choose another model."
    )


def _unattended(model: PreTrainedModel) -> ConfigError:
    """Make the refusal of a model in which no layer has called `earl_varlen`."""
    name = type(model).__name__
    if not _calls_interface(model):
        return without_interface(name)
    what = _carrying(model) or "they"
    return ConfigError(
        f"{name} cannot be trained on packed samples: none of its layers has attended to the "
        f"sample, for {what} mix tokens in other ways. Choose a model whose layers attend."
    )


def _calls_interface(model: PreTrainedModel) -> bool:
    """Tell whether the code of the model looks attention up where transformers keeps it."""
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, KeyError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def _carrying(model: PreTrainedModel) -> str:
    """Name the layers that do more than attend, as far as the configuration names them."""
    kinds = sorted(set(getattr(_text_config(model), "layer_types", None) or ()) - _ATTENDING)
    return f"its layers of type {', '.join(kinds)}" if kinds else ""


def without_interface(name: str) -> ConfigError:
    """Its layers look their attention up elsewhere, compute it themselves, or have none."""
    return ConfigError(
        f"{name} cannot be trained on packed samples: it does not call its attention through "
        "transformers' attention interface. Choose a newer architecture."
    )


def _check_config(model: PreTrainedModel) -> None:
    """Refuse what no tiny sample would show."""
    config, name = _text_config(model), type(model).__name__
    if chosen := getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None):
        raise ConfigError(
            f"{name} cannot be trained on packed samples: it attends to the {chosen} tokens "
            "that an indexer chooses (sparse attention), which packed training does not compute. "
            "Choose a model without an indexer."
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"{name} cannot be trained on packed samples: it attends within chunks, which packed "
            "training does not reproduce. Choose a model without them."
        )


def _check_windows(model: PreTrainedModel, seen: Collection[int | None]) -> None:
    """Refuse a sliding window that lies in a mask alone, which is not made here."""
    config = _text_config(model)
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    active = bool(window) and used and "sliding_attention" in kinds
    if active and window < config.max_position_embeddings and not any(seen):
        raise ConfigError(
            f"{type(model).__name__} cannot be trained on packed samples: its layers do not hand "
            f"on their sliding window of {window} tokens. Choose a model without one."
        )
