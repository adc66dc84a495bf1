"""The run directory: lock, sealed stages, checkpoints, records, sweeping."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from earl_core.config import ConfigError, RunConfig, load_config, parse_config
from earl_core.config.services import DispatchConfig
from earl_core.dispatch import Manifest
from earl_core.dispatch.segments.pool_directory import MARK
from earl_core.run import RunDirectory, stage_key
from earl_core.run.checkpoints import holding_checkpoint
from earl_core.run.lock import is_locked
from earl_core.run.record import read_lines
from earl_core.run.run_stores import list_stores, sweep, sweep_unneeded
from earl_core.system.errors import InUse
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.dispatch.segments import free_bytes


def config_in(tmp_path: Path, **changes: object) -> RunConfig:
    return parse_config(
        {
            "name": "a",
            "runs_directory": str(tmp_path / "runs"),
            "iterations": 2,
            "model": {"path": "models/x"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
            "dispatch": {"directory": str(tmp_path / "shm")},
            **changes,
        }
    )


def seal(run: RunDirectory, iteration: int, stage: str, key: str) -> Manifest:
    sample = Sample()
    sample.begin_turn([1, 2])
    sample.answer([3], [-0.5], [VersionSpan(0, 0, 1)])
    entry = run.store.publish(
        stage=stage,
        iteration=iteration,
        rank=0,
        schema=ROLLOUT_SCHEMA,
        rows=rollout_rows([Episode(0, 0, 0, [sample], "done")]),
    )
    return run.seal(
        Manifest(
            run=run.uid,
            iteration=iteration,
            stage=stage,
            key=key,
            policy_version=iteration,
            shards=(entry,),
        )
    )


def test_lock_keeps_a_second_process_out_and_dies_with_its_owner(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    RunDirectory.open(config).close()
    script = (
        "import sys, time, yaml\n"
        "from earl_core.config import load_config\n"
        "from earl_core.run import RunDirectory\n"
        "run = RunDirectory.open(load_config(sys.argv[1]))\n"
        "print('open', flush=True); time.sleep(60)\n"
    )
    stored = tmp_path / "runs" / "a" / "config.yaml"
    owner = subprocess.Popen([sys.executable, "-c", script, str(stored)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    with pytest.raises(InUse, match=f"in use by process {owner.pid}"):
        RunDirectory.open(config)
    assert is_locked(tmp_path / "runs" / "a")
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert not is_locked(tmp_path / "runs" / "a")
    run = RunDirectory.open(config)
    assert run.attempt == 3
    run.close()


def test_a_run_directory_belongs_to_one_model_environment_and_seed(tmp_path: Path) -> None:
    RunDirectory.open(config_in(tmp_path)).close()
    with pytest.raises(ConfigError, match="another seed"):
        RunDirectory.open(config_in(tmp_path, seed=1))
    RunDirectory.open(config_in(tmp_path, iterations=9)).close()
    for other in ({"name": "connect_four"}, {"name": "tic_tac_toe", "options": {"size": 4}}):
        with pytest.raises(ConfigError, match="another environment"):
            RunDirectory.open(config_in(tmp_path, environment=other))
    mixture = {"environment": None, "environments": [{"name": "tic_tac_toe"}]}
    with pytest.raises(ConfigError, match="another environment"):
        RunDirectory.open(config_in(tmp_path, **mixture))


def test_what_the_advice_of_a_failure_names_can_be_changed(tmp_path: Path) -> None:
    RunDirectory.open(config_in(tmp_path)).close()
    patient = {"hosts": 3, "step_timeout_seconds": 60, "start_timeout_seconds": 300}
    sizes = {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5, "max_failed_share": 0.9}
    environment = {"name": "tic_tac_toe", **patient}
    run = RunDirectory.open(config_in(tmp_path, environment=environment, rollout=sizes))
    run.close()
    assert run.config.rollout.max_failed_share == 0.9


def test_a_configuration_is_stored_when_it_was_found_to_work(tmp_path: Path) -> None:
    def stored() -> int:
        return load_config(tmp_path / "runs" / "a" / "config.yaml").iterations

    RunDirectory.open(config_in(tmp_path)).close()
    assert stored() == 2
    run = RunDirectory.open(config_in(tmp_path, iterations=9))
    assert stored() == 2
    run.store_config()
    run.close()
    assert stored() == 9


def test_a_stage_is_finished_while_key_and_shards_hold(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = RunDirectory.open(config)
    manifest = seal(run, 0, "rollout", "key")
    assert run.sealed(0, "rollout", "key") == manifest
    assert run.sealed(0, "rollout", "other") is None
    assert run.sealed(0, "reward", "key") is None
    run.close()

    again = RunDirectory.open(config)
    assert again.sealed(0, "rollout", "key") == manifest
    path = again.store.path(manifest.shards[0])
    start, _ = manifest.shards[0].columns["tokens"].values
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    again.close()

    third = RunDirectory.open(config)
    assert third.sealed(0, "rollout", "key") is None
    assert "corrupt" in third.ledger()[-1]["event"]
    path.unlink()
    assert third.sealed(0, "rollout", "key") is None
    third.close()


def test_a_damaged_manifest_means_the_stage_is_not_finished(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path))
    seal(run, 0, "rollout", "key")
    path = run.stage_path(0, "rollout")
    path.write_text(path.read_text()[:-20])
    assert run.sealed(0, "rollout", "key") is None
    run.close()


def test_stable_checkpoint_releases_shards_and_pruning_keeps_the_last(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path, checkpoint={"keep_last": 1}))
    kept = [seal(run, iteration, "rollout", "key") for iteration in range(3)]
    for iteration in range(2):
        run.checkpoint_path(iteration).mkdir(parents=True)
        run.mark_stable(iteration)
    assert run.last_stable() == 1
    there = [run.store.path(manifest.shards[0]).exists() for manifest in kept]
    assert there == [False, False, True]
    run.prune_checkpoints()
    assert run.stable_iterations() == [1]
    run.finish()
    assert not run.store.directory.exists()
    run.close()


def test_a_checkpoint_that_is_read_stays_until_the_next_pruning(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path, checkpoint={"keep_last": 1}))
    for iteration in range(3):
        run.checkpoint_path(iteration).mkdir(parents=True)
        run.mark_stable(iteration)
    marker = run.checkpoint_path(1) / "STABLE"
    with holding_checkpoint(marker), holding_checkpoint(marker):
        run.prune_checkpoints()
        assert run.stable_iterations() == [1, 2]
    run.prune_checkpoints()
    assert run.stable_iterations() == [2]
    with (
        pytest.raises(ConfigError, match=r"removed just now.*keep_last"),
        holding_checkpoint(marker),
    ):
        pytest.fail("it is gone")
    run.close()


def test_key_covers_settings_and_inputs_but_not_the_layout(tmp_path: Path) -> None:
    base = config_in(tmp_path)
    key = stage_key(base, "u", 3, "update", ["x"])
    assert key == stage_key(base, "u", 3, "update", ["x"])
    layout = config_in(tmp_path, update={"max_tokens_per_microbatch": 64, "threads": 1})
    assert key == stage_key(layout, "u", 3, "update", ["x"])
    for other in (
        stage_key(base, "u", 4, "update", ["x"]),
        stage_key(base, "v", 3, "update", ["x"]),
        stage_key(base, "u", 3, "update", ["y"]),
        stage_key(config_in(tmp_path, update={"learning_rate": 1}), "u", 3, "update", ["x"]),
    ):
        assert other != key


def test_how_hosts_are_run_is_in_no_key(tmp_path: Path) -> None:
    def keys(**changes: object) -> list[str]:
        played = {"name": "tic_tac_toe", **changes}
        suites = {"suites": [{**played, "label": "held"}]}
        one = config_in(tmp_path, environment=played, evaluation=suites)
        several = config_in(tmp_path, environment=None, environments=[played], evaluation=suites)
        stages = ("rollout", "evaluation")
        return [stage_key(each, "u", 1, stage, []) for each in (one, several) for stage in stages]

    assert keys() == keys(hosts=2, step_timeout_seconds=60, start_timeout_seconds=300)
    assert not set(keys()) & set(keys(options={"opponent": "perfect"}))


def test_records_survive_a_cut_off_line(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path))
    run.append_metrics(0, {"x": 1.0})
    run.append_metrics(1, {"x": 2.0})
    run.append_metrics(1, {"x": 3.0})
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 2, "x"')
    assert [line["x"] for line in run.metrics()] == [1.0, 3.0]
    assert len(read_lines(run.path / "metrics.jsonl")) == 3
    run.close()


def test_sweep_spares_live_and_waiting_runs(tmp_path: Path) -> None:
    root = tmp_path / "shm"
    live = RunDirectory.open(config_in(tmp_path, name="live"))
    waiting = RunDirectory.open(config_in(tmp_path, name="waiting"))
    waiting.close()
    finished = RunDirectory.open(config_in(tmp_path, name="finished"))
    finished.update_record(finished=True)
    finished.close()
    states = {state.directory.name: state for state in list_stores(root)}
    assert states[live.uid].live
    assert not states[waiting.uid].finished
    assert sweep_unneeded(root, live.config.dispatch) == [finished.store.directory]
    assert sweep(root) == [waiting.store.directory]
    assert live.store.directory.exists()
    stamp = json.loads((live.store.directory / ".store.json").read_text())["time"]
    assert time.time() - stamp < 60
    live.close()


def test_a_run_whose_file_system_is_out_of_sight_is_not_taken_for_a_deleted_one(
    tmp_path: Path,
) -> None:
    root = tmp_path / "shm"
    run = RunDirectory.open(config_in(tmp_path))
    run.close()
    mark = run.store.directory / MARK
    noted = json.loads(mark.read_bytes())
    shutil.rmtree(run.path.resolve().parent)
    mark.write_text(json.dumps({**noted, "device": noted["device"] + 1}))
    assert sweep_unneeded(root, run.config.dispatch) == []
    mark.write_text(json.dumps(noted))
    assert sweep_unneeded(root, run.config.dispatch) == [run.store.directory]


def test_stopped_runs_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    root = tmp_path / "shm"
    stopped = []
    for number in range(3):
        run = RunDirectory.open(config_in(tmp_path, name=f"run{number}"))
        seal(run, 0, "rollout", "key")
        owner = run.store.directory / ".store.json"
        owner.write_text(
            json.dumps({**json.loads(owner.read_text()), "time": time.time() - 9 * (3 - number)})
        )
        run.close()
        stopped.append(run.store)
    sizes = [store.pool.used_bytes() for store in stopped]
    live = RunDirectory.open(config_in(tmp_path, name="live"))

    def retain(size: int) -> DispatchConfig:
        return DispatchConfig(directory=str(root), retain_bytes=size)

    assert sweep_unneeded(root, retain(sum(sizes))) == []
    assert sweep_unneeded(root, retain(sum(sizes) - 1)) == [stopped[0].directory]
    assert sweep_unneeded(root, retain(0)) == [stopped[2].directory, stopped[1].directory]
    assert live.store.directory.exists()
    live.close()


def test_opening_a_run_adopts_its_shards_and_drops_the_rest(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = RunDirectory.open(config)
    kept, covered = seal(run, 1, "rollout", "key"), seal(run, 0, "rollout", "key")
    run.checkpoint_path(0).mkdir(parents=True)
    run.mark_stable(0)
    lost = run.store.publish(
        stage="reward", iteration=1, rank=0, schema=ROLLOUT_SCHEMA, rows=rollout_rows([])
    )
    run.close()
    assert free_bytes(run.store.pool) == 0
    again = RunDirectory.open(config)
    there = [again.store.path(entry).exists() for entry in (*kept.shards, *covered.shards, lost)]
    assert there == [True, False, False]
    assert again.sealed(1, "rollout", "key") == kept
    again.finish()
    assert not again.store.directory.exists()
    again.close()


def test_only_the_owner_reads_what_may_hold_secrets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run = RunDirectory.open(config_in(tmp_path))
        run.append_metrics(0, {"x": 1.0})
        run.observations.append({"x": 1})
        run.note(0, "rollout", "said")
        seal(run, 0, "rollout", "key")
        run.close()
    finally:
        os.umask(before)
    files = [path for path in run.path.rglob("*") if path.is_file() and path.name != "lock"]
    assert {"config.yaml", "run.json", "ledger.jsonl", "metrics.jsonl"} <= {p.name for p in files}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    assert run.path.stat().st_mode & 0o777 == 0o700
