"""What a run writes down: journals, run.json, the settings it was last opened with."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from earl_core.config import load_config
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import remove_leftovers
from earl_core.run.record import (
    Journal,
    OtherFormat,
    RunDamaged,
    changed_settings,
    config_of_run,
    read_lines,
    read_record,
    settings_of,
)
from earl_core.system.files import read_file, write_atomic
from tests.durability.life import life_config
from tests.run.test_run_directory import seal


def test_a_torn_line_never_eats_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory.open(life_config(tmp_path))
    records = [
        ("metrics.jsonl", lambda n: run.append_metrics(n, {"x": float(n)}), run.metrics),
        (
            "selector.jsonl",
            lambda n: run.observations.append({"iteration": n}),
            run.observations.read,
        ),
        ("ledger.jsonl", lambda n: run.note(n, "update", "sealed"), run.ledger),
    ]
    for name, append, read in records:
        append(0)
        path = run.path / name
        path.write_bytes(path.read_bytes()[:-9])
        append(1)
        append(2)
        assert [line["iteration"] for line in read()] == [1, 2], name
        read()
        assert caplog.text.count(f"line 1 of {path} is damaged") == 1
    run.close()


def test_a_line_that_is_being_written_is_left_out_and_an_edited_one_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    for number in range(3):
        journal.append({"x": number})
    text = journal.path.read_text()
    journal.path.write_text(text + '{"x": 3, "dig')
    assert [line["x"] for line in journal.read()] == [0, 1, 2]
    assert not caplog.text
    journal.path.write_text(text.replace('"x": 1', '"x": 7'))
    assert [line["x"] for line in journal.read()] == [0, 2]
    assert "line 2" in caplog.text


@pytest.mark.parametrize("garbage", ["garbage", "garbage\n", "\0\0", '{"x": 3}\n'])
def test_onlookers_are_told_of_a_damaged_line_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.append({"x": 0})
    whole = journal.path.read_text()
    journal.path.write_text(whole + garbage)
    for _ in range(2):
        assert read_lines(journal.path) == [{"x": 0}]
    assert caplog.text.count(f"line 2 of {journal.path} is damaged") == 1


def test_nothing_but_a_file_is_read_and_nothing_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "file", b"x")
    for name in ("fifo", "folder", "link"):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_file(tmp_path / name)
    assert read_file(tmp_path / "link", follow_links=True) == b"x"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_an_edited_or_lost_run_json_is_refused(tmp_path: Path) -> None:
    config = life_config(tmp_path)
    RunDirectory.open(config).close()
    path = tmp_path / "runs" / "run" / "run.json"
    whole = path.read_text()
    for other, reason in (
        (whole.replace('"attempts": 1', '"attempts": 2'), "damaged or was edited"),
        (whole[:-3], "damaged or was edited"),
        ("[]", "damaged or was edited"),
        (whole.replace("earl.run/4", "earl.run/2"), "format earl.run/2"),
    ):
        path.write_text(other)
        with pytest.raises(RunDamaged, match=reason):
            RunDirectory.open(config)
    path.write_text(whole.replace("earl.run/4", "earl.run/2"))
    (path.parent / "config.yaml").write_text("layout: {update: {replicate: 2}}\n")
    with pytest.raises(OtherFormat, match=r"this version of earl reads earl\.run/4"):
        config_of_run(path.parent)
    path.unlink()
    with pytest.raises(RunDamaged, match=r"holds a run but no run\.json"):
        RunDirectory.open(config)
    path.write_text(whole)
    RunDirectory.open(config).close()
    assert read_record(path.parent)["attempts"] == 2


def test_an_edited_configuration_counts_as_set_and_is_said_line_by_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    RunDirectory.open(life_config(tmp_path)).close()
    stored = tmp_path / "runs" / "run" / "config.yaml"
    RunDirectory.open(load_config(stored)).close()
    assert not caplog.text
    stored.write_text(stored.read_text().replace("keep_last: 1", "keep_last: 3") + "# a comment\n")
    run = RunDirectory.open(load_config(stored, ["update.learning_rate=0.5"]))
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(": ")[2] for line in said] == ["1 → 3", "1e-06 → 0.5"]
    assert "checkpoint.keep_last" in said[0]
    assert run.config.checkpoint.keep_last == 3
    run.store_config()
    run.close()
    caplog.clear()
    RunDirectory.open(load_config(stored)).close()
    assert not caplog.text


def test_what_a_kill_left_goes_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory.open(life_config(tmp_path))
    checkpoints = run.path / "checkpoints"
    gone = [checkpoints / f".00000{n}.{what}" for n, what in enumerate(("removed", "building"))]
    kept = [checkpoints / name for name in (".mine.removed", "000007", ".000001.backup")]
    for folder in (*gone, *kept):
        (folder / "policy").mkdir(parents=True)
    (checkpoints / ".000009.removed").symlink_to(kept[0])
    aside = run.path / ".run.json.12.34.tmp"
    other = run.path / ".notes.tmp"
    for file in (aside, other):
        file.write_text("")
    run.close()
    RunDirectory.open(run.config).close()
    assert not any(path.exists() for path in (*gone, aside))
    assert all(path.exists() for path in (*kept, other, checkpoints / ".000009.removed"))
    remove_leftovers(tmp_path / "nothing")


def test_a_stage_repeated_after_its_release_is_released_again(tmp_path: Path) -> None:
    run = RunDirectory.open(life_config(tmp_path))
    path = run.stage_path(0, "rollout").with_suffix(".released")
    path.parent.mkdir()
    path.touch()
    entry = seal(run, 0, "rollout", "key").shards[0]
    run.close()
    again = RunDirectory.open(run.config)
    assert again.store.path(entry).exists()
    again.release_through(0)
    assert not again.store.path(entry).exists()
    assert json.loads((run.path / "run.json").read_text())["format"] == "earl.run/4"
    again.close()


def test_a_key_that_a_release_adds_is_a_change_only_with_another_value(tmp_path: Path) -> None:
    config = life_config(tmp_path)
    older = json.loads(json.dumps(settings_of(config)))
    del older["environment"]["train"], older["rollout"]["gateway"], older["rollout"]["top_p"]
    assert changed_settings({"settings": older}, config) == []
    rollout = config.rollout.model_copy(update={"top_p": 0.5})
    now = config.model_copy(update={"rollout": rollout})
    assert changed_settings({"settings": older}, now) == ["rollout.top_p: not set → 0.5"]
