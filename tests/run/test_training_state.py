"""Checkpoints describe themselves: any edit of one is found, and the one before stands in."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.control.policy_player import find_checkpoint
from earl_core.run.checkpoints import (
    BESIDE,
    MARKER,
    describe_state,
    state_path,
    verify_checkpoint,
)
from earl_core.run.fork import make_fork
from earl_core.run.model_card import model_card
from earl_core.run.record import lineage, read_lines, read_record, write_record
from earl_core.run.recovery import INITIAL, go_back, newest_whole, take_newest_whole
from earl_core.tensors.errors import CheckpointError
from tests.run.test_run_directory import config_in

FILES = (
    "policy/config.json",
    "policy/model.safetensors",
    "policy/tokenizer.json",
    "optimizer.safetensors",
)


def make_checkpoint(run: Path, iteration: int, *beside: str) -> Path:
    """beside: the other roles whose states it has."""
    path = run / "checkpoints" / f"{iteration:06d}"
    for place, more in ((path, {BESIDE: beside}), *((state_path(path, r), {}) for r in beside)):
        for name in FILES:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(f"{name} of {iteration} ".encode() * 50)
        state = {"policy_version": iteration + 1, "run": "uid", **more}
        describe_state(place, state, {"weight": [2, 3]})
    (path / MARKER).write_text("{}")
    return path


def described(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / "state.json").read_text())
        change(content)
        (path / "state.json").write_text(json.dumps(content))

    return edit


def redescribed(path: Path) -> None:
    """As by somebody who empties the list and computes the digest again."""
    for name in (*FILES, "state.json"):
        (path / name).rename(path.parent / f"kept-{name.replace('/', '-')}")
    describe_state(path, {"policy_version": 3}, {})
    for name in FILES:
        (path.parent / f"kept-{name.replace('/', '-')}").rename(path / name)


def on(name: str, change: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: change(path / name)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def to_link(file: Path) -> None:
    """The same bytes, elsewhere."""
    place = file.parents[2] / "elsewhere"
    shutil.move(file, place)
    file.symlink_to(place)


def to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def older(path: Path) -> None:
    """The checkpoint of another iteration in its place."""
    shutil.rmtree(path)
    shutil.copytree(path.parent / "000001", path)


EDITS = {
    **{
        f"{change.__name__} {name}": on(name, change)
        for name in FILES
        for change in (flip, truncate, extend, Path.unlink, to_link, to_directory, to_fifo)
    },
    **{
        f"{change.__name__} state.json": on("state.json", change)
        for change in (flip, truncate, Path.unlink, to_link, to_directory, to_fifo)
    },
    "an empty list": described(lambda content: content["files"].clear()),
    "an empty list with its digest": redescribed,
    "one file less in the list": described(lambda content: content["files"].popitem()),
    "another size": described(
        lambda content: content["files"]["policy/config.json"].update(bytes=9)
    ),
    "another version": described(lambda content: content["state"].update(policy_version=9)),
    "another format": described(lambda content: content.update(format="earl-training-state-1")),
    "no digest": described(lambda content: content.pop("digest")),
    "a file more": lambda path: (path / "policy" / "adapter.safetensors").write_bytes(b"x"),
    "a link to a folder more": lambda path: (path / "policy" / "more").symlink_to("/usr"),
    "another checkpoint": older,
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_of_a_checkpoint_is_found(edit: str, tmp_path: Path) -> None:
    """By `earl evaluate` and `earl play`, which then take the one before, and say so."""
    config = config_in(tmp_path)
    run = tmp_path / "runs" / "a"
    for iteration in (1, 2):
        path = make_checkpoint(run, iteration)
    assert find_checkpoint(run, config).version == 3
    EDITS[edit](path)
    with pytest.raises(CheckpointError, match=r"checkpoint.*000002"):
        find_checkpoint(run, config, "2")
    found = find_checkpoint(run, config)
    assert (found.version, found.label) == (2, "the checkpoint of iteration 1")
    assert "000002" in found.damaged[0]


def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for iteration in range(4):
        path = make_checkpoint(run, iteration)
        (run / "iterations" / path.name).mkdir(parents=True)
    take_newest_whole(run)
    assert not (run / "set_aside").exists()
    for iteration in (2, 3):
        flip(run / "checkpoints" / f"{iteration:06d}" / "policy" / "model.safetensors")
    take_newest_whole(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000000", "000001"]
    aside = run / "set_aside" / "1"
    for folder in ("checkpoints", "iterations"):
        assert sorted(path.name for path in (aside / folder).iterdir()) == ["000002", "000003"]
    (line,) = read_lines(run / "ledger.jsonl")
    assert "goes on after iteration 1" in line["event"]
    assert str(aside) in line["event"]
    for iteration in range(2):
        flip(run / "checkpoints" / f"{iteration:06d}" / "policy" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints .* 0, 1.*--from initial"):
        take_newest_whole(run)
    assert len(list((run / "checkpoints").iterdir())) == 2
    go_back(run, INITIAL)
    assert list((run / "checkpoints").iterdir()) == []
    assert len(list((run / "set_aside" / "2" / "checkpoints").iterdir())) == 2


def test_going_back_needs_a_whole_checkpoint_and_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for iteration in range(3):
        make_checkpoint(run, iteration)
    flip(run / "checkpoints" / "000000" / "policy" / "model.safetensors")
    for iteration, words in ((0, "is damaged"), (7, r"no whole checkpoint of iteration 7 .*0, 1")):
        with pytest.raises(CheckpointError, match=words):
            go_back(run, iteration)
    assert not (run / "set_aside").exists()
    before = {name: (run / "checkpoints/000002" / name).read_bytes() for name in FILES}
    go_back(run, 1)
    moved = run / "set_aside" / "1" / "checkpoints" / "000002"
    assert {name: (moved / name).read_bytes() for name in FILES} == before
    assert newest_whole(run, [1]) == (1, [])
    verify_checkpoint(run, 1)


def lost(critic: Path) -> None:
    shutil.rmtree(critic)


def of_another_iteration(critic: Path) -> None:
    shutil.rmtree(critic)
    shutil.copytree(critic.parents[1] / "000001" / critic.name, critic)


@pytest.mark.parametrize(("damage", "why"), [(lost, "missing"), (of_another_iteration, "version")])
def test_a_checkpoint_without_the_critic_that_it_was_written_with_is_none(
    damage: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    config, run = config_in(tmp_path), tmp_path / "runs" / "a"
    for iteration in range(3):
        make_checkpoint(run, iteration, "critic")
    critic = state_path(run / "checkpoints" / "000002", "critic")
    damage(critic)
    with pytest.raises(CheckpointError, match=rf"damaged: it.*{why}"):
        find_checkpoint(run, config, "2")
    found = find_checkpoint(run, config, "last")
    assert found.policy.parent.name == "000001"
    assert why in found.damaged[0]
    take_newest_whole(run)
    assert (run / "set_aside/1/checkpoints/000002").is_dir()
    assert newest_whole(run, [0, 1]) == (1, [])


def test_a_fork_names_the_digests_of_policy_and_critic(tmp_path: Path) -> None:
    config, run = config_in(tmp_path, iterations=4), tmp_path / "runs" / "a"
    make_checkpoint(run, 0)
    make_checkpoint(run, 1, "critic")
    write_record(run, {"uid": "u"})
    digests = []
    for iteration in range(2):
        named = config.model_copy(update={"name": f"b{iteration}"})
        parent = lineage(read_record(make_fork(run, iteration, named)))[0]
        digests.append(parent.get("critic_digest"))
        assert len(parent["digest"]) == 32
        card = model_card(config, 1, "the last", [], [], [parent])
        assert (f"critic `{digests[-1]}`" in card) == bool(iteration)
    assert digests[0] is None
    assert len(digests[1]) == 32
