"""Runs that act on their selector: what does not fit is repeated under another layout, what was
finished stays finished, and what is learnt does not depend on the layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed, WorkerLost
from earl_core.control.failure_diagnosis import ReplicasLost, diagnose
from earl_core.control.policy_player import newest_engine
from earl_core.deployment.plan import DeploymentPlan
from earl_core.rollout.errors import ContextOverflow, EngineLost, RolloutFailed, WeightSyncError
from earl_core.run.record import Journal, read_lines
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import Observation
from earl_core.system.errors import ConfigError
from earl_core.system.memory import OutOfMemory
from tests.cgroup import memory_cgroup
from tests.flows.runs import KILLED, Runs

Undisturbed = Callable[..., Runs]

LEARNING = (
    "algorithm.kl={placement: none, coefficient: 0}",
    "rollout.prompts_per_iteration=8",
)
"""With a penalty whose gradient is all rounding, Adam would make steps out of it."""


@pytest.fixture
def live(runs: Runs) -> Runs:
    """Runs whose layouts the selector moves, and whose faults each happen once."""
    once = runs.directory / "happened"
    once.mkdir()
    runs.environment["EARL_FAULT_ONCE"] = str(once)
    return runs


def selector(runs: Runs, **settings: Any) -> str:
    chosen = {"policy": "live_tokens", "profile_directory": str(runs.directory / "profiles")}
    return f"selector={json.dumps({**chosen, **settings})}"


def plan(runs: Runs, iteration: int, name: str = "run") -> DeploymentPlan:
    path = runs.run(name) / "iterations" / f"{iteration:06d}" / "select.json"
    return DeploymentPlan.model_validate(json.loads(path.read_text())["outputs"]["plan"])


def observations(runs: Runs, kind: str) -> list[Observation]:
    lines = read_lines(runs.run() / "selector.jsonl")
    seen = [Observation.model_validate(line) for line in lines]
    return [each for each in seen if each.kind == kind]


def assert_learnt_alike(runs: Runs, whole: Runs, iterations: int = 2) -> None:
    for iteration in range(iterations):
        policy = Path("checkpoints") / f"{iteration:06d}" / "policy" / "model.safetensors"
        expected = load_file(whole.run() / policy)
        for name, tensor in load_file(runs.run() / policy).items():
            assert (tensor - expected[name]).abs().max() < 1e-4, (iteration, name)
    for mine, other in zip(runs.metrics(), whole.metrics(), strict=True):
        assert mine["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6)


def test_what_runs_out_of_memory_is_repeated_under_another_layout(
    live: Runs, undisturbed: Undisturbed
) -> None:
    """Rollout and update in one iteration; the controller dies between failure and repeat."""
    faults = "rollout.played8@1=memory;update.microbatch1@1=memory;update.unfit@1=kill"
    settings = (selector(live), *LEARNING)
    live.train(*settings, fault=faults, expect=KILLED)
    live.wait_for_workers_to_end()
    assert live.executed("sealed").count((1, "update")) == 0
    live.train(*settings)

    failed = {seen.stage: seen for seen in observations(live, "out_of_memory")}
    assert set(failed) == {"rollout", "update"}
    first, last = plan(live, 0), plan(live, 1)
    assert (first.attempt, last.attempt) == (0, 2)
    for stage, seen in failed.items():
        assert first[stage] == seen.deployment
        assert last[stage] != seen.deployment
        assert last.predictions[stage].seconds > 0
    # Finished stages were not repeated, and what each attempt saw is still there.
    sealed = live.executed("sealed")
    for stage in ("rollout", "reward", "advantage", "update", "publish"):
        assert sealed.count((1, stage)) == 1, stage
    folder = live.run() / "iterations" / "000001"
    assert {path.name for path in folder.glob("selection*.input")} == {
        "selection.input",
        "selection.0.input",
        "selection.1.input",
    }
    assert_learnt_alike(live, undisturbed(*LEARNING))
    measured = [(seen.iteration, seen.stage) for seen in observations(live, "measured")]
    assert sorted(measured) == [(k, s) for k in (0, 1) for s in ("rollout", "update")]
    assert list((live.directory / "profiles").glob("*.parquet"))
    assert live.shared_memory() == []
    live.wait_for_workers_to_end()


def test_a_context_that_is_outgrown_is_rebuilt_and_nothing_is_cut(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    """Under `fixed` too; checkpoints are evaluated with engines of the length that was reached."""
    assert runs.train_here({"overrides": ["rollout.max_model_len=16"]}) == [None]
    (seen, *_) = observations(runs, "context_overflow")
    assert seen.deployment.max_model_len == 16
    length = plan(runs, 1)["rollout"].max_model_len or 0
    assert length >= 32
    assert length >= max(line["rollout/context/max"] for line in runs.metrics())
    assert not any(line.get("rollout/finish/model_context") for line in runs.metrics())
    engine = newest_engine(runs.run())
    assert engine is not None
    assert engine.max_model_len == length
    for iteration in range(2):
        assert runs.weights(iteration) == undisturbed().weights(iteration)


@pytest.mark.slow
def test_a_layout_that_stays_ends_the_run_with_the_error_itself(live: Runs) -> None:
    """`fixed` has nothing else to try; a resume tries it again."""
    output = live.train("iterations=1", fault="update.microbatch1@0=memory", expect=1)
    assert "ran out of memory when it asked for 1,099,511,627,776 bytes" in output
    assert [seen.answered for seen in observations(live, "out_of_memory")] == [False]
    live.train("iterations=1")
    assert live.executed("sealed").count((0, "select")) == 1


@pytest.mark.slow
def test_a_resume_tries_again_what_another_program_left_no_memory_for(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    """Until no layout is left; the memory may be free when the run goes on."""
    settings = (selector(runs), *LEARNING)
    output = runs.train(*settings, fault="update.microbatch1@1=memory", expect=1)
    assert "no stage deployment of the update fits the memory" in output
    failed = observations(runs, "out_of_memory")
    assert len({seen.deployment for seen in failed}) == len(failed) > 1
    # The second choice knew the rollout that was done under the first.
    inputs = runs.run() / "iterations" / "000001"
    knew = [
        SelectionInput.model_validate_json((inputs / f"selection.{attempt}.input").read_text())
        for attempt in range(2)
    ]
    assert [any(p.iteration == 1 for p in one.profile.points) for one in knew] == [False, True]
    runs.train(*settings)
    assert runs.executed("sealed").count((1, "rollout")) == 1
    assert_learnt_alike(runs, undisturbed(*LEARNING))


@pytest.mark.slow
def test_a_resume_forgets_what_others_held_before_when_nothing_fits_beside_it(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    settings = (selector(runs), *LEARNING)
    runs.train(*settings, "iterations=1")
    path = runs.run() / "selector.jsonl"
    lines = read_lines(path)
    path.unlink()
    for line in lines:
        Journal(path).append({**line, "reserved_bytes": 2.0**50})
    runs.train(*settings)
    assert_learnt_alike(runs, undisturbed(*LEARNING))


@pytest.fixture
def capped(live: Runs) -> Iterator[Path]:
    with memory_cgroup(6 * 2**30) as group:
        yield group
        live.kill_all()
        live.wait_for_workers_to_end()


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_learner_that_the_kernel_kills_goes_back_to_its_checkpoint(
    live: Runs, undisturbed: Undisturbed, capped: Path
) -> None:
    """Its state since then is lost: the iterations are repeated, their episodes are not."""
    live.environment["EARL_TEST_CGROUP"] = str(capped)
    settings = ("iterations=4", "checkpoint.every=2", *LEARNING)
    live.train(*settings, selector(live), fault="update.microbatch1@3=gorge")
    (seen,) = observations(live, "out_of_memory")
    assert (seen.stage, seen.iteration) == ("update", 3)
    assert plan(live, 3)["update"] != seen.deployment
    sealed = live.executed("sealed")
    assert [sealed.count((k, "update")) for k in range(4)] == [1, 1, 2, 1]
    assert sealed.count((2, "rollout")) == 1
    # What was repeated has two lines, of which the last counts.
    mine = {line["iteration"]: line["reward/mean"] for line in live.metrics()}
    whole = {line["iteration"]: line["reward/mean"] for line in undisturbed(*settings).metrics()}
    assert mine == pytest.approx(whole, abs=1e-6)
    assert live.shared_memory() == []


def call_failed(error: BaseException, kills: int = 0) -> WorkerCallFailed:
    where = Where("update", 0, "update", "update", 3)
    return WorkerCallFailed(where, Raised.of(error, kills))


class OutOfMemoryError(RuntimeError):
    """As torch names its own, whose module the controller does not import."""


@pytest.mark.parametrize(
    ("error", "kind", "stage"),
    [
        (call_failed(OutOfMemory("reference", "x")), "out_of_memory", "reference"),
        (call_failed(OutOfMemory("publish", "x")), "out_of_memory", "update"),
        (call_failed(OutOfMemoryError("CUDA out of memory")), "out_of_memory", ""),
        (call_failed(MemoryError()), "out_of_memory", ""),
        (call_failed(RuntimeError("DefaultCPUAllocator: no")), "out_of_memory", ""),
        (call_failed(EngineLost("x"), 1), "out_of_memory", ""),
        (call_failed(WeightSyncError("x"), 1), "out_of_memory", ""),
        (call_failed(OSError("x"), 1), "out_of_memory", ""),
        (call_failed(ContextOverflow(9, 8, 99)), "context_overflow", "rollout"),
        (WorkerLost(Where("w", 0, "", "", 0), "gone", "lost", -9, True), "out_of_memory", ""),
        (MemoryError(), "out_of_memory", ""),
    ],
)
def test_what_counts_as_infeasible(error: BaseException, kind: str, stage: str) -> None:
    found = diagnose(error)
    assert found is not None
    assert (found.kind, found.stage) == (kind, stage)
    if isinstance(error, WorkerCallFailed | WorkerLost):
        assert diagnose(ReplicasLost("all were lost", error)) == found


@pytest.mark.parametrize(
    "error",
    [
        call_failed(ConfigError("x"), 3),
        call_failed(RolloutFailed("x"), 1),
        call_failed(ValueError("x"), 1),
        call_failed(EngineLost("x")),
        WorkerLost(Where("w", 0, "", "", 0), "killed", ended=-9),
        ValueError("no"),
    ],
)
def test_what_is_another_error(error: BaseException) -> None:
    assert diagnose(error) is None
