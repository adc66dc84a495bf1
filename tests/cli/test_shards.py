"""`earl shards` on real shards."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from earl_core.config import load_config
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.cli.conftest import CONFIG, Earl


@pytest.fixture
def stopped_run(fresh_earl: Earl) -> Path:
    """A run named `stopped` with one sealed shard; returns the shard's file."""
    config = load_config(
        CONFIG,
        [
            "name=stopped",
            f"runs_directory={fresh_earl.directory / 'runs'}",
            f"dispatch.directory={fresh_earl.shared_memory / 'shards'}",
        ],
    )
    run = RunDirectory.open(config)
    sample = Sample()
    sample.begin_turn([5, 40])
    sample.answer([20, 6], [-0.7, -0.1], [VersionSpan(3, 0, 2)])
    sample.turn_rewards[-1] = 1.0
    episode = Episode(episode_id=7, group_id=1, prompt_id=1)
    episode.samples.append(sample)
    episode.finish_reason = "done"
    entry = run.store.publish(
        stage="rollout",
        iteration=3,
        rank=0,
        schema=ROLLOUT_SCHEMA,
        rows=rollout_rows([episode]),
    )
    manifest = Manifest(
        run=run.uid, iteration=3, stage="rollout", key="k", policy_version=3, shards=(entry,)
    )
    run.seal(manifest)
    run.close()
    return run.store.path(entry)


def directory_of(earl: Earl) -> tuple[str, str]:
    return ("--directory", str(earl.shared_memory / "shards"))


def test_show_a_shard_of_a_run_and_by_path(fresh_earl: Earl, stopped_run: Path) -> None:
    by_run = fresh_earl.run("shards", "show", "stopped@3/rollout")
    by_path = fresh_earl.run("shards", "show", str(stopped_run))
    assert by_run.returncode == by_path.returncode == 0, by_run.stderr
    assert "1 shard, 1 row" in by_run.stdout
    for shown in (by_run.stdout, by_path.stdout):
        assert re.search(r"tokens +large_list<item: int32 not null> +4", shown)
        assert "earl.stage: rollout" in shown
        assert re.search(r"tokens +\[4\] 5 40 20 6", shown)
        assert re.search(r"loss_mask +\[4\] 0 0 1 1", shown)
        assert re.search(r"rollout_logprobs +\[4\] 0 0 -0.7 -0.1", shown)
        assert re.search(r"finish_reason +done", shown)


def test_list_and_sweep(fresh_earl: Earl, stopped_run: Path) -> None:
    listed = fresh_earl.run("shards", "list", *directory_of(fresh_earl))
    assert re.search(r"runs/stopped +stopped", listed.stdout), listed.stdout
    swept = fresh_earl.run("shards", "sweep", *directory_of(fresh_earl))
    assert swept.returncode == 0
    assert str(stopped_run.parent) in swept.stdout
    assert not stopped_run.exists()
    assert "is gone" in fresh_earl.run("shards", "show", "stopped@3/rollout").stdout
    empty = fresh_earl.run("shards", "list", *directory_of(fresh_earl))
    assert "Nothing in" in empty.stdout


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("stopped", "RUN@ITERATION/STAGE"),
        ("stopped@x/rollout", "RUN@ITERATION/STAGE"),
        ("stopped@3/reward", "it has rollout"),
        ("gone@3/rollout", "it holds stopped"),
    ],
)
def test_what_cannot_be_shown(fresh_earl: Earl, stopped_run: Path, shard: str, words: str) -> None:
    shown = fresh_earl.run("shards", "show", shard)
    assert_refused(shown, words)


def test_a_row_that_is_not_there(fresh_earl: Earl, stopped_run: Path) -> None:
    assert_refused(fresh_earl.run("shards", "show", str(stopped_run), "--row", "1"), "1 row")


def test_a_damaged_shard_and_manifest(fresh_earl: Earl, stopped_run: Path) -> None:
    damaged = fresh_earl.directory / "damaged.arrow"
    damaged.write_bytes(stopped_run.read_bytes()[:-200])
    assert_refused(fresh_earl.run("shards", "show", str(damaged)), "damaged")
    sealed = fresh_earl.directory / "runs/stopped/iterations/000003/rollout.json"
    sealed.write_text(sealed.read_text().replace('"rows": 1', '"rows": 2'))
    shown = fresh_earl.run("shards", "show", "stopped@3/rollout")
    assert shown.returncode == 1
    assert "its stage is repeated on resume" in shown.stderr


def test_serving_on_a_port_in_use(fresh_earl: Earl, stopped_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        shown = fresh_earl.run("shards", "serve", "stopped", "--port", str(port))
    assert_refused(shown, f"port {port} of 127.0.0.1")
    assert len(shown.stderr.splitlines()) == 1, shown.stderr


def assert_refused(shown: subprocess.CompletedProcess[str], words: str) -> None:
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr
    assert words in shown.stderr


@pytest.mark.parametrize("offset", [2**62, -1])
def test_offsets_are_looked_at_before_they_are_followed(
    fresh_earl: Earl, stopped_run: Path, offset: int
) -> None:
    sealed = fresh_earl.directory / "runs/stopped/iterations/000003/rollout.json"
    at, _ = json.loads(sealed.read_text())["shards"][0]["columns"]["finish_reason"]["offsets"]
    with stopped_run.open("r+b") as shard:
        shard.seek(at + 8)
        shard.write(struct.pack("<q", offset))
    assert_refused(fresh_earl.run("shards", "show", str(stopped_run)), "is damaged")
