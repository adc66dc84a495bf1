"""Gradients of what a shared prefix's keys and values are used for, added up without a loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.prefix_tree import build_tree
from earl_core.learner.shared_rows import Rows, deal

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIX, HEADS, DIM = 40, 2, 16


def samples(lengths: Sequence[int]) -> list[np.ndarray]:
    """That share a prefix; each goes on for so many tokens of its own."""
    return [
        np.concatenate([np.arange(PREFIX), 1000 * (1 + number) + np.arange(length)])
        for number, length in enumerate(lengths)
    ]


def prefix_errors(lengths: Sequence[int]) -> dict[str, float]:
    """Of the gradients in bf16 of the prefix's keys and values, against float64."""
    tree = build_tree(samples(lengths))
    assert tree.size == PREFIX + sum(lengths)
    torch.manual_seed(1)
    states = torch.randn(3, 1, HEADS, tree.size, DIM).bfloat16()
    towards = torch.randn(1, tree.size, HEADS, DIM).bfloat16()
    found = [each.requires_grad_() for each in states.clone()]
    boundaries = SampleBoundaries.from_tree(tree)
    module = torch.nn.Module()
    attended, _ = varlen_attention(module, *found, None, sample_boundaries=boundaries)
    torch.autograd.backward((attended * towards).sum())
    expected = [each.double().requires_grad_() for each in states.clone()]
    loss = torch.zeros((), dtype=torch.float64)
    for number in range(len(lengths)):
        places = torch.from_numpy(tree.positions(number))
        q, k, v = (each[0][:, places] for each in expected)
        seen = torch.ones(len(places), len(places)).tril().log()
        alone = torch.softmax(q @ k.transpose(1, 2) * DIM**-0.5 + seen, dim=-1) @ v
        # What the prefix's own queries send back counts once.
        first = PREFIX if number else 0
        loss = loss + (alone.transpose(0, 1) * towards[0, places].double())[first:].sum()
    torch.autograd.backward(loss)
    result = {}
    for name, one, other in zip(("key", "value"), found[1:], expected[1:], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        exact, near = other.grad[0, :, :PREFIX], one.grad[0, :, :PREFIX].double()
        assert float(exact.abs().max()) > 0
        result[name] = float((near - exact).norm() / exact.norm())
    return result


def test_64_copies_of_a_prefix_are_as_exact_as_one() -> None:
    one = prefix_errors([100])
    # Equal lengths share a call, those of another size have one of their own.
    for lengths in ([100] * 64, list(range(34, 162, 2))):
        assert len(lengths) == 64
        found = prefix_errors(lengths)
        assert all(found[name] <= 1.2 * one[name] for name in found), (found, one)


def test_dealt_rows_send_back_the_sum_of_all_that_was_taken() -> None:
    states = torch.randn(6, 2, 3).bfloat16().requires_grad_()
    users = [Rows(1, 3), Rows(0, 4, torch.tensor([5, 1, 1, 0])), Rows(2, 4)]
    dealt = deal(states, users)
    assert [part.tolist() for part in dealt] == [rows.of(states).tolist() for rows in users]
    towards = [torch.randn(part.shape).bfloat16() for part in dealt]
    torch.autograd.backward(sum((a * b).sum() for a, b in zip(dealt, towards, strict=True)))
    expected = torch.zeros(6, 2, 3)
    for rows, each in zip(users, towards, strict=True):
        places = torch.arange(rows.start, rows.start + rows.count)
        for place, row in zip(places if rows.places is None else rows.places, each, strict=True):
            expected[place] += row.float()
    assert states.grad is not None
    assert torch.equal(states.grad, expected.bfloat16())
