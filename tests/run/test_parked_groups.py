"""Parked groups: which of them a run that goes on may use, and for how long their files stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.control.interrupted_groups import InterruptedGroups
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from earl_core.run.parked_groups import FOLDER, ParkedGroup, ParkedGroups
from tests.run.test_group_batches import SIZE, opened, publish

EPISODES = {"8": {"turns": [], "open": None}}


def park(run: RunDirectory, group: int, versions: dict[int, str], **changed: object) -> None:
    key = GroupBatches(run).key(group // SIZE)
    parked = ParkedGroup(group=group, key=key, versions=versions, episodes=EPISODES)
    ParkedGroups(run.path).write(parked.model_copy(update=changed))


def test_a_parked_group_is_used_once_and_only_where_it_fits(tmp_path: Path) -> None:
    run = opened(tmp_path)
    publish(run, 0, "a")
    publish(run, 1, "b")
    publish(run, 2, "c")
    park(run, 4, {0: "a", 1: "b"})
    park(run, 5, {}, key="of other settings")
    park(run, 6, {0: "a", 1: "other weights"})
    park(run, 7, {3: "weights that nobody published"})
    park(run, 8, {0: "older than the bound"})
    park(run, 9, {1: "b"}, episodes=None)
    park(run, 10, {2: "c"})
    park(run, 11, {1: "b"})
    (damaged,) = run.path.glob(f"{FOLDER}/*11.json")
    damaged.write_bytes(damaged.read_bytes().replace(b'"open":null', b'"open":true'))
    park(run, 14, {1: "b"})
    (other,) = run.path.glob(f"{FOLDER}/*14.json")
    other.rename(other.with_name("00000015.json"))
    batches = GroupBatches(run)
    interrupted = InterruptedGroups(run, batches)
    interrupted.add([12])
    assert interrupted.taken(range(4, 16), version=1, iteration=1) == {4}
    # The engine is behind the version that has sampled group 10; of group 13 nothing was played.
    assert batches.anew == 9
    told = " ".join(str(line["event"]) for line in run.ledger())
    for words in (
        "groups 5 are played anew: other settings",
        "groups 6, 7, 10 are played anew: the weights that sampled them",
        "groups 8 are played anew: some of their tokens are older",
        "groups 9 are played anew: their environment cannot be replayed",
        "groups 12 are played anew: their engine was lost",
        "groups 11, 15 are played anew: what was parked of them is damaged",
    ):
        assert words in told
    parked = ParkedGroups(run.path)
    assert [path.name for path in sorted((run.path / FOLDER).iterdir())] == ["00000004.json"]
    taken = parked.take(4)
    assert taken is not None
    assert (taken.versions, taken.episodes) == ({0: "a", 1: "b"}, EPISODES)
    assert parked.take(4) is None
    run.close()


def test_parked_groups_go_with_the_checkpoint_that_covers_them(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for group in (3, 4, 11):
        park(run, group, {})
    interrupted = InterruptedGroups(run, GroupBatches(run))
    interrupted.settle()
    parked = ParkedGroups(run.path)
    assert parked.read(3) is not None
    run.checkpoint_path(0).mkdir(parents=True)
    run.mark_stable(0)
    folder = run.path / FOLDER
    for name in (".00000003.json.7.8.tmp", ".00000011.json.7.8.tmp", "of-somebody.json"):
        (folder / name).touch()
    (folder / "00000002.json").mkdir()
    interrupted.settle()
    assert [parked.read(group) is None for group in (3, 4, 11)] == [True, False, False]
    left = {path.name for path in folder.iterdir()} - {"00000004.json", "00000011.json"}
    assert left == {".00000011.json.7.8.tmp", "of-somebody.json", "00000002.json"}
    run.close()


def test_a_folder_in_the_place_of_a_file_ends_no_run(tmp_path: Path) -> None:
    run = opened(tmp_path)
    (run.path / FOLDER / "00000004.json").mkdir(parents=True)
    batches = GroupBatches(run)
    assert InterruptedGroups(run, batches).taken([4], version=0, iteration=1) == set()
    assert batches.anew == 1
    with pytest.raises(OSError, match="00000004"):
        park(run, 4, {})
    run.close()


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    run = opened(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        park(run, 0, {}, episodes={"0": {"reward": float("nan")}})
    assert ParkedGroups(run.path).read(0) is None
    run.close()
