"""`earl profile` as people start it: measured, killed, gone on with, finished, interrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed, WorkerLost
from earl_core.cluster.host import LocalHost
from earl_core.config import parse_config
from earl_core.control.failure_diagnosis import diagnose
from earl_core.control.hardware import hardware_of, with_network
from earl_core.control.machine_profile import fingerprint_of, profile_of
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.rollout.errors import EngineLost
from earl_core.selector.profile.profile_table import (
    ProfilePoint,
    ProfileTable,
    read_table,
    write_table,
)
from earl_core.system.hardware import HostResources
from earl_core.system.memory import OutOfMemory
from tests import warm
from tests.flows.runs import REPOSITORY, Process, Runs


class Profiles:
    """Profiles of a very small load on one core: one layout of each stage, some token budgets."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.directory = runs.directory / "profiles"
        config = yaml.safe_load(runs.config.read_text())
        config["rollout"] |= {"prompts_per_iteration": 1, "group_size": 2}
        config["algorithm"] = {"advantage": "rloo"}
        config["update"] |= {"minibatches": 1, "max_tokens_per_microbatch": 128}
        config["selector"] = {
            "policy": "live_tokens",
            "fixed_fields": ["update.activation_checkpointing"],
            "profile_directory": str(self.directory),
        }
        runs.config.write_text(yaml.safe_dump(config))

    def start(self, fault: str = "") -> Process:
        environment = {
            **self.runs.environment,
            "PYTHONPATH": str(REPOSITORY),
            "EARL_FAULT": fault,
            "NO_PROXY": "127.0.0.1",
        }
        arguments = ["profile", str(self.runs.config), "--minutes", "5", "--context", "64"]
        with self.runs.output_path(len(self.runs.started)).open("w") as output:
            process = warm.start(
                "tests.flows.one_core",
                [*arguments, "--plain"],
                environment,
                self.runs.directory,
                output.fileno(),
            )
        self.runs.started.append(process)
        return process

    def output(self) -> str:
        """What the last process printed."""
        return self.runs.output_path(len(self.runs.started) - 1).read_text()

    def finish(self, fault: str = "") -> str:
        """A profile to its end; what it printed."""
        code = self.start(fault).wait(280)
        assert code == 0, self.output()
        return self.output()

    def table(self) -> ProfileTable:
        """What is in the file now."""
        files = list(self.directory.glob("*.parquet"))
        return read_table(self.directory, files[0].stem) if files else ProfileTable()

    def wait_for(self, condition: Callable[[], bool], process: Process) -> None:
        deadline = time.monotonic() + 280
        while not condition():
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def profiles(runs: Runs) -> Profiles:
    return Profiles(runs)


def test_a_profile_is_measured_and_a_finished_one_says_so(profiles: Profiles) -> None:
    # No update gets memory for a second microbatch.
    output = profiles.finish(fault="update.microbatch2@0=memory")
    assert "What live_tokens would choose" in output
    table = profiles.table()
    good = [point for point in table.points if not point.out_of_memory]
    assert {point.key.split()[0] for point in good} == {"rollout", "update"}
    assert all(point.tokens_per_second > 0 and point.peak_bytes > 5e7 for point in good)
    assert all(point.context == 64 and point.requests <= 2 for point in table.points)
    assert [p.key for p in table.points if p.out_of_memory] == ["update tp1 mb64"]
    assert f"({len(table.points)} points" in output
    assert table.seconds > 0

    again = profiles.finish()
    assert "This profile is finished" in again
    assert "measuring" not in again
    assert profiles.table() == table
    # No run was made, and nothing is left behind.
    assert not profiles.runs.run().exists()
    assert profiles.runs.shared_memory() == []
    profiles.runs.wait_for_workers_to_end()


@pytest.mark.slow
def test_a_killed_profile_goes_on_where_it_ended(profiles: Profiles) -> None:
    killed = profiles.start()
    profiles.wait_for(lambda: bool(profiles.table().points), killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    profiles.runs.wait_for_workers_to_end()
    first = profiles.table()
    output = profiles.finish()
    assert f"going on after {len(first.points)} point" in output
    table = profiles.table()
    assert len(table.points) > len(first.points)
    kept = {point.bucket: point for point in table.points}
    assert all(kept[point.bucket] == point for point in first.points)
    assert table.seconds > first.seconds > 0


@pytest.mark.slow
def test_an_interrupted_profile_ends_cleanly_and_keeps_what_it_has(profiles: Profiles) -> None:
    process = profiles.start()
    profiles.wait_for(lambda: bool(profiles.table().points), process)
    process.send_signal(signal.SIGINT)
    code = process.wait(120)
    assert code == 128 + signal.SIGINT, profiles.output()
    assert "What was measured is kept" in profiles.output()
    assert profiles.table().points
    profiles.runs.wait_for_workers_to_end()


def test_out_of_memory_is_told_from_other_failures() -> None:
    where = Where("update", 0, "measure", "update", 0)
    refused = Raised.of(OutOfMemory("update", "a step"))
    assert diagnose(WorkerCallFailed(where, refused)) is not None
    lost = Raised.of(EngineLost("gone"), out_of_memory_kills=1)
    assert diagnose(WorkerCallFailed(where, lost)) is not None
    assert diagnose(WorkerLost(where, "killed", ended=-9, out_of_memory=True))
    assert not diagnose(WorkerCallFailed(where, Raised.of(ValueError("no"))))
    assert not diagnose(WorkerLost(where, "killed", ended=-9))
    assert not diagnose(WorkerLost(where, "slow", "deadline"))


def config_of(directory: Path, **update: object) -> dict[str, object]:
    return {
        "name": "run",
        "iterations": 1,
        "model": {"path": str(directory / "model")},
        "environment": {"name": "tic_tac_toe"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 1},
        "update": update,
        "selector": {"profile_directory": str(directory / "profiles")},
    }


def tiny_shape() -> ModelShape:
    raw = json.loads(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, '
        '"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512}'
    )
    return ModelShape.from_config(raw)


def test_a_profile_of_a_fast_network_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    config, model = parse_config(config_of(tmp_path)), tiny_shape()

    def mark(*beside: float, gpus: int = 0, measured: float = 0.0) -> str:
        """Of hosts whose ports beside TCP carry so many bytes/s."""
        one = HostResources((0, 1), gpus, memory_bytes=2**33)
        hosts = [LocalHost(resources=replace(one, rdma_bandwidth=each)) for each in beside]
        return fingerprint_of(config, with_network(hardware_of(hosts), hosts, measured), model)

    # One host is the same machine whatever it could send to others.
    for gpus in (0, 1):
        assert mark(0.0, gpus=gpus) == mark(100e9, gpus=gpus)
    gigabit, other_gigabit, ten = (mark(0.0, 0.0, measured=rate) for rate in (110e6, 118e6, 1.2e9))
    assert gigabit == other_gigabit != ten
    # Cores send by TCP, as what was measured.
    assert mark(100e9, 100e9, measured=110e6) == gigabit
    # The collectives of GPUs go by the ports, of the host that has least.
    gpus = {"gpus": 1, "measured": 3e9}
    slow, fast, tcp = (mark(100e9, rate, **gpus) for rate in (12.5e9, 100e9, 0.0))
    assert len({slow, fast, tcp}) == 3
    assert slow == mark(12.5e9, 12.5e9, **gpus)


def test_a_profile_belongs_to_model_hardware_and_what_is_computed(tmp_path: Path) -> None:
    config = parse_config(config_of(tmp_path))
    hardware = Hardware(cpu_cores=2, memory_bytes=8 * 2**30)
    model = tiny_shape()
    directory, mark, table = profile_of(config, hardware, model)
    assert directory == tmp_path / "profiles"
    assert table == ProfileTable()
    point = ProfilePoint(key="rollout tp1", context=64, requests=2, tokens_per_second=10)
    written = ProfileTable(seconds=12.5).observe(point, 16)
    write_table(directory, mark, written)
    assert profile_of(config, hardware, model) == (directory, mark, written)
    # Some pages of memory, and what is not computed, change nothing.
    assert (
        fingerprint_of(config, hardware.model_copy(update={"memory_bytes": 8 * 2**30 + 99}), model)
        == mark
    )
    slow, other, fast = (
        fingerprint_of(config, hardware.model_copy(update={"fetch_bandwidth": rate}), model)
        for rate in (110e6, 118e6, 1.2e9)
    )
    assert slow == other != fast
    slower = parse_config({**config_of(tmp_path), "iterations": 9, "seed": 3})
    assert fingerprint_of(slower, hardware, model) == mark
    others = {
        fingerprint_of(parse_config(config_of(tmp_path, precision="fp32")), hardware, model),
        fingerprint_of(config, hardware.model_copy(update={"cpu_cores": 4}), model),
        fingerprint_of(config, hardware, model.model_copy(update={"layers": 3})),
    }
    assert len(others | {mark}) == 4
