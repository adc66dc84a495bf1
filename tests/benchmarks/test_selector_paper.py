"""The benchmark against the paper's grid: its aims, and that leaving out means leaving out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from benchmarks import selector_grid as grid
from benchmarks import selector_paper as paper
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import DEVICES, cluster
from earl_core.selector.model.roofline import Roofline

DEVICE, HARDWARE = DEVICES["h100-80gb"], cluster("h100-80gb", 16, 8)


def test_grid_is_the_printed_one() -> None:
    assert len(grid.certain()) == 28
    values = dict(grid.cells())
    assert values[1024, 16] == -32.2
    assert values[32768, 64] == 6.5
    assert values[32768, 128] is None
    # The paper's own regularity: live tokens decide.
    for (context, responses), value in grid.certain().items():
        live = context * responses
        assert (value > 0) == (live > 2**18)


def test_aims_are_met() -> None:
    ways = paper.all_ways()
    assert paper.right(ways.roofline) >= 25
    assert min(map(paper.right, ways[1:])) >= 25
    assert "ran out of memory" in paper.forbidden_at_the_end()


@pytest.mark.parametrize("way", ["cell", "row", "column"])
def test_what_is_left_out_cannot_be_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the printed values that are left out beyond recognition: no prediction may move."""
    place = (8192, 32)
    honest = getattr(paper.all_ways(), way)[place]
    changed = [list(line) for line in grid.SPEEDUP]
    for number, (context, responses) in enumerate(dict(grid.cells())):
        same = {"cell": (context, responses) == place, "row": context == 8192}
        same["column"] = responses == 32
        row, column = divmod(number, len(grid.RESPONSES))
        if same[way] and changed[row][column] is not None:
            changed[row][column] = 300.0
    monkeypatch.setattr(grid, "SPEEDUP", tuple(map(tuple, changed)))
    assert getattr(paper.all_ways(), way)[place] == honest


def test_oracle_and_followers() -> None:
    contexts = grid.growth(12)
    assert contexts[0] == 1024
    assert contexts[-1] == pytest.approx(32768)
    assert math.isinf(grid.seconds_of(grid.SMALL, 32768, 128))
    for responses in grid.RESPONSES:
        best = grid.best_schedule(contexts, responses)
        for tensor in (grid.SMALL, grid.LARGE):
            always = grid.follow(lambda n, s, p, t=tensor: t, contexts, responses)
            assert best <= always.seconds * (1 + 1e-12)
    assert grid.follow(lambda n, s, p: grid.SMALL, contexts, 128).failures > 0


def test_live_tokens_loses_less_than_the_others() -> None:
    lost = {name: sum(each) / len(each) for name, each, _, _ in grid.regrets(12)}
    ours = lost.pop("live_tokens, grid as profile")
    rivals = [v for name, v in lost.items() if name.startswith(("fixed", "average_context"))]
    assert ours < min(rivals)


def line_of(queueing: str) -> Roofline:
    return paper.QUEUEING[queueing](MODELS["qwen2.5-72b"], DEVICE, HARDWARE)


def test_queueing_lies_between_a_full_stream_and_whole_waves() -> None:
    rates = {}
    for queueing in ("stream", "blurred", "waves"):
        line = line_of(queueing)
        assert line.decode_rate(4, 1, 12, 32768, 420_000) == pytest.approx(
            line_of("blurred").decode_rate(4, 1, 12, 32768, 420_000)
        )
        rates[queueing] = line.decode_rate(4, 1, 16, 32768, 420_000)
    assert rates["waves"] < rates["blurred"] < rates["stream"]
    assert line_of("blurred").decode_rate(4, 1, 16, 32768, 32767) == 0.0


loads = st.tuples(st.floats(1, 512), st.floats(16, 131072), st.sampled_from([1, 2, 4, 8]))


@examples(loads, st.floats(1e4, 1e7), st.floats(1, 10))
def test_a_larger_cache_is_never_slower_in_a_full_stream(
    load: tuple[float, float, int], capacity: float, factor: float
) -> None:
    offered, context, tensor = load
    line = line_of("stream")
    less = line.decode_rate(tensor, 1, offered, context, capacity)
    more = line.decode_rate(tensor, 1, offered, context, capacity * factor)
    assert more >= less * (1 - 1e-12)
