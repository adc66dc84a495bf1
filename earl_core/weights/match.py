"""Which published tensor belongs to which of a model's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from earl_core.tensors.errors import WeightsError


def match(
    state: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(model tensor, published tensor) for each tensor of the model, each memory once.

    `state` has the model's parameters by name. Names that share memory in the model (tied
    embeddings) need only one published tensor. Raises `WeightsError` for missing or unknown names,
    other shapes, and different values published for one shared tensor.
    """
    groups: dict[int, list[str]] = {}
    for name, target in state.items():
        placed = target.numel() and not target.is_meta
        groups.setdefault(target.data_ptr() if placed else id(target), []).append(name)
    published = [[name for name in names if name in weights] for names in groups.values()]
    covered = {
        name
        for names, given in zip(groups.values(), published, strict=True)
        if given
        for name in names
    }
    problem = names_problem(covered | weights.keys(), state.keys())
    if problem is not None:
        raise WeightsError(problem)
    return [_pair(state[given[0]], given, weights) for given in published]


def _pair(
    target: torch.Tensor, names: list[str], weights: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    first, *others = names
    source = weights[first]
    if target.shape != source.shape:
        raise WeightsError(
            f"{first} has shape {list(source.shape)}, the model's has {list(target.shape)}"
        )
    for other in others:
        if not torch.equal(source, weights[other]):
            raise WeightsError(
                f"{first} and {other} are one tensor in the model but were published with "
                "different values: the learner trains another configuration"
            )
    return target, source


def names_problem(found: Collection[str], expected: Collection[str]) -> str | None:
    """How two sets of tensor names differ, as a sentence part; none when they are equal."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing (first: {missing[0]})")
    if unknown:
        parts.append(f"{len(unknown)} tensors are not expected (first: {unknown[0]})")
    return " and ".join(parts) or None
