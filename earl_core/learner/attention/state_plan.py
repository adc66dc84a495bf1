"""Plan of what carries a state along a pack: recurrences and causal convolutions; made on the host.

The runs of a tree (`data.prefix_tree`) are computed generation by generation: all roots, then all
their children, and so on, so that the state with which a run begins, its parent's last one, is
there. Within a generation, runs of similar length share one batched call, padded to the right,
where nothing real follows; a kernel for sequences of any length takes the whole generation in one
call without padding. A convolution needs a few inputs before a run, not a state: these are copied
before it, and all runs are one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from earl_core.learner.data.padding import group_similar
from earl_core.learner.data.prefix_tree import PrefixTree
from earl_core.learner.shared_rows import Rows


def kernels_found(device: torch.device) -> bool:
    """Tell whether kernels for sequences of any length are installed, and meant for the device."""
    return device.type == "cuda" and all(map(find_spec, ("fla", "causal_conv1d")))


@dataclass(frozen=True)
class StateCall:
    """Runs of one generation that one call computes.

    count: runs. length: of the longest. tokens: run after run, each padded to `length` by repeating
    its first token; without padding where there is `cu_seqlens`, int64 [count + 1], for kernels.
    real: bool [count, length], which of them are tokens; None: all. parents: whose last state each
    run begins with, rows among the states of the generation before; None: they are roots.
    """

    count: int
    length: int
    tokens: Rows
    real: torch.Tensor | None = None
    parents: Rows | None = None
    cu_seqlens: torch.Tensor | None = None


@dataclass(frozen=True)
class StatePlan:
    """The calls of each generation, and where each token's output is among the calls' outputs, one
    after another: int64 [T], or None for the identity. padded_tokens: that are computed."""

    generations: tuple[tuple[StateCall, ...], ...]
    scatter: torch.Tensor | None
    padded_tokens: int

    @classmethod
    def of(
        cls, tree: PrefixTree, device: torch.device | str = "cpu", *, any_length: bool = False
    ) -> StatePlan:
        """Plan the recurrences over a pack. any_length: a kernel takes sequences of any length."""
        table = np.array([(r.start, r.length, r.parent) for r in tree.runs], dtype=np.int64)
        starts, sizes, parents = table.T
        scatter = np.empty(int(sizes.sum()), dtype=np.int64)
        generations = []
        offset, places = 0, np.full(len(tree.runs), -1, dtype=np.int64)
        for age, members in enumerate(_generations(parents)):
            order = members[np.argsort(-sizes[members], kind="stable")]
            groups = [members] if any_length else group_similar(sizes, order)
            calls = []
            for group in groups:
                rows, real = _padded(starts[group], sizes[group], any_length)
                scatter[rows[real]] = offset + np.flatnonzero(real)
                offset += rows.size
                begun_by = places[parents[group]] if age else None
                calls.append(_call(rows, real, sizes[group], begun_by, device))
            # A run's state is found by its place among those of its generation.
            places[np.concatenate(groups)] = np.arange(members.size)
            generations.append(tuple(calls))
        identity = np.array_equal(scatter, np.arange(offset))
        return cls(
            tuple(generations),
            None if identity else torch.from_numpy(scatter).to(device),
            offset,
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything of it that lies on the device."""
        held = [self.scatter]
        for call in (call for calls in self.generations for call in calls):
            held += [call.tokens.places, call.real, call.cu_seqlens]
            held += [] if call.parents is None else [call.parents.places]
        return (tensor for tensor in held if tensor is not None)


@dataclass(frozen=True)
class ConvolutionPlan:
    """Inputs of a causal convolution over a tree, as one sequence: before each run those that its
    first tokens see, which are its ancestors' last, or zeros before the beginning of a sample.

    inputs: among the pack's tokens; zeros: int64, which of them are to be zero. outputs: int64 [T],
    where each token's own output is. None of all: the pack is one run, which is the sequence.
    """

    inputs: Rows | None = None
    zeros: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    @classmethod
    def of(
        cls, tree: PrefixTree, width: int, device: torch.device | str = "cpu"
    ) -> ConvolutionPlan:
        """Plan a convolution that sees `width` inputs, the last of which is the token's own."""
        if len(tree.runs) == 1:
            return cls()
        inputs, outputs, offset = [], [], 0
        for index, run in enumerate(tree.runs):
            before = _last_before(tree, index, width - 1)
            missing = np.full(width - 1 - before.size, -1, dtype=np.int64)
            inputs += [missing, before, np.arange(run.start, run.start + run.length)]
            offset += width - 1
            outputs.append(np.arange(offset, offset + run.length))
            offset += run.length
        every = np.concatenate(inputs)
        zeros = np.flatnonzero(every < 0)
        every[zeros] = 0
        return cls(
            Rows.at(every, device),
            torch.from_numpy(zeros).to(device),
            torch.from_numpy(np.concatenate(outputs)).to(device),
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything of it that lies on the device."""
        held = [self.zeros, self.outputs, None if self.inputs is None else self.inputs.places]
        return (tensor for tensor in held if tensor is not None)


def _generations(parents: np.ndarray) -> list[np.ndarray]:
    """Runs with equally many ancestors, fewest first; int64 each."""
    ages = np.zeros(parents.size, dtype=np.int64)
    for run, parent in enumerate(parents.tolist()):
        if parent >= 0:
            ages[run] = ages[parent] + 1
    return [np.flatnonzero(ages == age) for age in range(int(ages.max()) + 1)]


def _padded(
    starts: np.ndarray, sizes: np.ndarray, any_length: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a call, int64 [runs, length] ([1, tokens] where no padding is needed), and
    which of them are real."""
    if any_length:
        rows = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
        return rows[None], np.ones((1, rows.size), dtype=bool)
    steps = np.arange(int(sizes.max()))
    real = steps < sizes[:, None]
    return starts[:, None] + np.where(real, steps, 0), real


def _call(
    rows: np.ndarray,
    real: np.ndarray,
    sizes: np.ndarray,
    parents: np.ndarray | None,
    device: torch.device | str,
) -> StateCall:
    cu_seqlens = None
    if rows.shape[0] != sizes.size:
        edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        cu_seqlens = torch.from_numpy(edges).to(device)
    return StateCall(
        count=sizes.size,
        length=int(sizes.max()),
        tokens=Rows.at(rows.reshape(-1), device),
        real=None if real.all() else torch.from_numpy(real).to(device),
        parents=None if parents is None else Rows.at(parents, device),
        cu_seqlens=cu_seqlens,
    )


def _last_before(tree: PrefixTree, index: int, count: int) -> np.ndarray:
    """Places of the last tokens before a run in its samples, at most `count`, in sample order."""
    parts: list[np.ndarray] = []
    run = tree.runs[index].parent
    while run >= 0 and count > 0:
        item = tree.runs[run]
        taken = min(count, item.length)
        stop = item.start + item.length
        parts.append(np.arange(stop - taken, stop))
        count -= taken
        run = item.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)
