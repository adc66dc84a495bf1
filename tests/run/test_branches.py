"""What a branch is of a run: seeds, keys and prompts of the iterations after its beginning."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.config import parse_config
from earl_core.control.row_draws import RowDraws
from earl_core.deployment.stages import EVALUATION, STAGES
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory, stage_key
from earl_core.run.branches import BRANCHES, Branches, numbered
from earl_core.run.fork import make_fork
from earl_core.run.inherited_stages import foreseen
from earl_core.run.record import read_record
from earl_core.run.recovery import complete_return, go_back
from earl_core.run.retention import good_checkpoints
from earl_core.system.errors import EarlError
from tests.run.test_run_directory import config_in
from tests.run.test_training_state import make_checkpoint


def opened(*places: tuple[int, int], left_out: tuple[tuple[str, int], ...] = ()) -> Branches:
    """Branches by `after` and `from_iteration`, each of which names these prompts; the last one is
    pending."""
    found = Branches()
    for number, (after, at) in enumerate(places, start=1):
        named = {"kinds": ["k", "k"], "text": "t", "left_out": left_out}
        found = settled(found)
        found = found.further(after=after, from_iteration=at, set_aside=f"s/{number}", **named)
    return found


def settled(branches: Branches) -> Branches:
    """The same when all returns are done."""
    return Branches(tuple(each.model_copy(update={"pending": False}) for each in branches.opened))


def test_each_iteration_is_of_the_last_branch_that_began_before_it() -> None:
    branches = settled(opened((5, 9), (7, 12), (2, 11)))
    found = [branches.at(k) for k in range(10)]
    assert [0 if each is None else each.number for each in found] == [0, 0, 0, *[3] * 7]
    earlier = branches.through(4)
    assert [each.number for each in earlier.opened] == [3]
    assert (
        earlier.further(after=4, from_iteration=6, kinds=(), text="", left_out=(), set_aside="")
        .opened[-1]
        .number
        == 4
    )
    assert Branches.of({BRANCHES: branches.dump()}) == branches


def test_a_fork_is_of_the_branch_that_its_checkpoint_is_of(tmp_path: Path) -> None:
    """A return to before the checkpoint may be written down, and not done yet."""
    config = config_in(tmp_path, iterations=5)
    with closing(RunDirectory.open(config)) as run:
        for k in range(3):
            make_checkpoint(run.path, k)
        for k in range(4):
            given = {"run": run.uid, "iteration": k, "stage": "rollout", "key": "k"}
            run.seal(Manifest(**given, policy_version=k))
        begun = opened((0, 2), (1, 4))
        for branches in (begun, settled(begun)):
            run.update_record(**{BRANCHES: branches.dump()})
            for k in (0, 1, 2):
                name = f"fork{k}{branches.opened[-1].pending}"
                fork = make_fork(run.path, k, config.model_copy(update={"name": name}))
                own = Branches.of(read_record(fork))
                assert not any(each.pending for each in own.opened)
                before = opened((0, 2)) if branches is begun and k == 2 else begun
                assert own.seed(7, k + 1) == before.seed(7, k + 1)
                assert own.key(k + 1, "rollout") == before.key(k + 1, "rollout")
                nothing = "done nothing after it" in foreseen(run.path, config, config, k)[0]
                assert nothing == (branches is begun and k == 1)


def test_without_a_branch_seeds_and_keys_stay_and_evaluations_stay_in_any(tmp_path: Path) -> None:
    config, branches = config_in(tmp_path), opened((2, 4), (2, 6), left_out=(("", 3),))
    plain = Branches()
    for k in range(3):
        assert branches.seed(config.seed, k) == plain.seed(config.seed, k) == config.seed
    seeds = {each.seed(config.seed, 3) for each in (plain, opened((2, 4)), branches)}
    assert len(seeds) == 3
    for stage in (*STAGES, EVALUATION.name):
        keys = [
            stage_key(config, "uid", k, stage, ["x"], each.key(k, stage))
            for each in (plain, branches)
            for k in (2, 3)
        ]
        assert keys[0] == keys[2] == stage_key(config, "uid", 2, stage, ["x"])
        assert (keys[1] == keys[3]) == (stage == EVALUATION.name)


@given(
    out=st.sets(st.integers(0, 40), max_size=8),
    count=st.integers(0, 12),
    place=st.integers(0, 60),
)
def test_places_count_the_prompts_that_are_left(out: set[int], count: int, place: int) -> None:
    rows = {number % count for number in out} if count else out
    if count and len(rows) == count:
        with pytest.raises(ValueError, match="left out"):
            numbered(place, out, count)
        return
    every = (number for number in range(10**4) if (number % count if count else number) not in rows)
    assert numbered(place, out, count) == next(islice(every, place, None))


def test_a_curriculum_and_a_data_set_leave_rows_out(tmp_path: Path) -> None:
    raw = config_in(tmp_path).model_dump(exclude_unset=True)
    asked = {"name": "prompt", "options": {"path": "x"}}
    raw["environment"] = None
    raw["environments"] = [{**asked, "label": "a", "curriculum": {}}, {**asked, "label": "b"}]
    run = RunDirectory.open(parse_config(raw))
    for k in range(3):
        given = {"run": run.uid, "iteration": k, "stage": "reward", "key": "k"}
        run.seal(Manifest(**given, policy_version=k))
    draws = [(label, prompt) for label in ("a", "b") for prompt in range(4, 11)]
    counts = {"a": 5, "b": 5}
    before = RowDraws(run, counts).of(3, draws, {"a": 4})[0]
    named = (("a", 6), ("b", 6), ("b", 13))
    run.branches = opened((1, 3), left_out=named)
    rows, _ = RowDraws(run, counts).of(3, draws, {"a": 4})
    assert {row for label, row in rows if label == "a"} == {0, 2, 3, 4}
    assert {row % 5 for label, row in rows if label == "b"} == {0, 2, 4}
    assert RowDraws(run, counts).of(1, draws, {"a": 4})[0] != rows != before
    with pytest.raises(EarlError, match="leave out all 1 prompts of a"):
        RowDraws(run, {"a": 1, "b": 5}).of(3, draws, {"a": 4})
    run.close()


def test_a_pending_return_is_completed_once_and_choice_ends_later_branches(tmp_path: Path) -> None:
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        branches = opened((-1, 1))
        run.update_record(**{BRANCHES: branches.dump()})
        for k in range(2):
            (run.path / "iterations" / f"{k:06d}").mkdir()
            run.append_metrics(k, {"a": 1.0})
        path = run.path
    complete_return(path)
    complete_return(path)
    aside = path / "s" / "1"
    assert sorted(each.name for each in (aside / "iterations").iterdir()) == ["000000", "000001"]
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 2
    assert (path / "metrics.jsonl").read_text() == ""
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        assert [each.pending for each in run.branches.opened] == [False]
        later = opened((-1, 1), (5, 7))
        run.update_record(**{BRANCHES: later.dump()})
    go_back(path, -1)
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        assert [each.after for each in run.branches.opened] == [-1]


@given(newest=st.integers(0, 40), late=st.integers(0, 3))
def test_one_good_checkpoint_is_older_than_what_is_found_late(newest: int, late: int) -> None:
    """Kept step by step, as a run does, with the two last ones."""
    stable: list[int] = []
    for k in range(newest + 1):
        stable.append(k)
        kept = good_checkpoints(stable) | set(stable[-2:])
        stable = [each for each in stable if each in kept]
    # Found in the next iteration, in which it began or up to three before.
    onset = newest + 1 - late
    assert onset <= 0 or any(each < onset for each in stable)
    assert len(stable) <= 4
