"""The table of families in docs/models.md, made by running each cell.

An outcome that the record does not have fails, and is in the record then: look at the difference,
and write the page with `python docs/site/families.py`. `-k "not vllm"` leaves out what takes a
minute a family; `-k packing`, `-k Mixtral` and the like run a part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from docs.site.families import NO_MIXTURE, NOT_RUN, REFUSED
from earl_core.system.errors import ConfigError
from tests.families import cells, ranks
from tests.families.cells import YES
from tests.families.record import note, shortened
from tests.families.registry import FAMILIES, UNTRAINED
from tests.learner.launched import launch

pytestmark = [pytest.mark.slow, pytest.mark.campaign]
TRAINED = [name for name in FAMILIES if name not in UNTRAINED]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="fam") as directory:
        yield Path(directory)


def outcome_of(trial: Callable[[], str]) -> str:
    """What it says, or the product's refusal."""
    try:
        return trial()
    except ConfigError as error:
        return REFUSED + shortened(str(error))


def check(name: str, outcomes: dict[str, str]) -> None:
    """Record the outcomes; each is new, or the one that was recorded."""
    before = {column: note(name, column, outcome) for column, outcome in outcomes.items()}
    known = {column: outcome for column, outcome in before.items() if outcome != NOT_RUN}
    assert known == {column: outcomes[column] for column in known}


@pytest.mark.parametrize("name", FAMILIES)
def test_packing(name: str, scratch: Path) -> None:
    directory = cells.save(name, scratch / "model")
    outcome = outcome_of(partial(cells.packing, directory))
    assert outcome.startswith(REFUSED) == (name in UNTRAINED), outcome
    check(name, {"packing": outcome})


@pytest.mark.parametrize("name", TRAINED)
def test_torch_engine(name: str, scratch: Path) -> None:
    directory = cells.save(name, scratch / "model")
    check(name, {"torch engine": outcome_of(partial(cells.engine, "torch", directory, scratch))})


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks(name: str, scratch: Path) -> None:
    ranks.prepare(cells.save(name, scratch / "model"))
    compare = "compare_mixture" if FAMILIES[name].experts else "compare"
    found, other = launch("tests.families.ranks", compare, 2, scratch / "ranks")
    assert found == other
    outcomes = {column: REFUSED + shortened(why) if why else YES for column, why in found.items()}
    if not FAMILIES[name].experts:
        outcomes["expert parallel"] = NO_MIXTURE
    check(name, outcomes)


@pytest.mark.parametrize("name", TRAINED)
def test_vllm(name: str, scratch: Path) -> None:
    pytest.importorskip("vllm")
    directory = cells.save(name, scratch / "model")
    check(name, {"vLLM": outcome_of(partial(cells.engine, "vllm", directory, scratch))})
