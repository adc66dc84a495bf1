"""The bound on the update's MFU, with every operator at an H200's ceilings; no GPU is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import update_roofline
from benchmarks.gpu.operators import Entries, Ledger, Recorder, Work
from benchmarks.gpu.update_roofline import Cell, step, utilisation
from earl_core.config.update import UpdateConfig
from tools.shapes import SHAPES

SHAPE = SHAPES["qwen2.5-1.5b"]


def named(entries: Entries, text: str) -> Work:
    return sum((work for (_, name), work in entries.items() if text in name), Work())


@pytest.mark.campaign
def test_compiled_layers_bring_the_bound_at_4k_above_one_half() -> None:
    """Of the cell that `update_mfu` measures as `update_mfu_4k`, as large as a run has it that
    says nothing."""
    found = {}
    usual = UpdateConfig().tokens_per_microbatch(gpu=True)
    for compiled in (False, True):
        cell = Cell(SHAPE, 4096, usual, 131072, compiled)
        entries = step(cell)
        found[compiled] = utilisation(cell, entries)
        # The kernels' products are the model's, and nothing computes them twice but attention's
        # backward pass and, of the chunked head, all chunks' logits but the last one's.
        done = sum(work.flops for work in entries.values())
        assert 1.0 < done / cell.model_flops() < 1.1
        assert named(entries, "attn").calls == 2 * SHAPE.layers * 8
        # Fused with the gate's product, or by itself.
        assert [name for _, name in entries if name == "silu"] == ["silu"] * (not compiled)
        gated = 131072 * SHAPE.intermediate * SHAPE.layers * 2
        if compiled:
            assert named(entries, "fused__unsafe_view_mul_silu").bytes == pytest.approx(
                (3 + 5) * gated
            )
        else:
            assert named(entries, "silu").bytes == pytest.approx((2 + 3) * gated)
    assert found[False] < 0.45
    assert found[True] >= 0.50


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_deeper_models_lie_on_the_line_through_two(compiled: bool) -> None:
    tiny = dataclasses.replace(SHAPES["tiny"], layers=3)
    cell = Cell(tiny, 64, 128, 256, compiled)
    line = step(cell)
    whole = update_roofline._operators(cell, update_roofline.Ceilings())
    assert line.keys() == whole.keys()
    for key, work in whole.items():
        assert dataclasses.astuple(line[key]) == pytest.approx(dataclasses.astuple(work)), key


def test_operators_are_booked_with_their_flops_and_each_byte_once() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        left = torch.empty(64, 32, dtype=torch.bfloat16)
        right = torch.empty(32, 16, dtype=torch.bfloat16)
        rows = torch.empty(8, dtype=torch.int64)
        with Recorder(ledger, 0.0):
            product = left @ right
            product += 1
            product.t().index_select(1, rows)
            torch.add(left, left[:1], out=left)
    found = {name: (work.flops, work.bytes) for (_, name), work in ledger.entries.items()}
    assert found == {
        "mm bfloat16": (2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16)),
        "add_": (0, 2 * 2 * 64 * 16),
        "index_select": (0, 2 * 2 * 16 * 8 + 8 * 8),
        "add": (0, 2 * (2 * 64 * 32 + 32)),
    }
