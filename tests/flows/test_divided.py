"""Runs whose selector divides the cores between rollout and update, and divides them anew."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from earl_core.config import load_config
from earl_core.config.selector import VARIABLE_FIELDS
from earl_core.control.hardware import read_hardware
from earl_core.control.machine_profile import profile_of
from earl_core.deployment.placement import Division
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.checkpoints import HANDOFFS
from earl_core.run.recovery import go_back
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, write_table
from tests import warm
from tests.flows.runs import LEARNING, Runs
from tests.flows.test_selector_runs import observations, plan, selector
from tests.learnt import assert_learnt, largest_change, weights_in

OVERLAPPED = (
    *LEARNING,
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
    "evaluation.every=2",
    "evaluation.episodes=8",
    "checkpoint.every=4",
)

HELD = ["update.max_tokens_per_microbatch", "update.activation_checkpointing"]

GUESSED, PLAYED = 10.0, 42.0
"""Tokens of an episode, as they are guessed before the first one, and as they are."""


def measured(key: str, context: float, rate: float) -> ProfilePoint:
    place = {"context": context, "requests": 32.0, "weight": 4.0}
    return ProfilePoint(key=key, tokens_per_second=rate, **place)


def placement(runs: Runs, iteration: int) -> str:
    division = plan(runs, iteration).division
    assert division is not None
    return division.placement


@pytest.mark.slow
def test_cores_change_sides_between_iterations_and_the_run_learns_the_same(runs: Runs) -> None:
    """By what is measured, apart is faster under the load that is guessed at first, and in turn
    under the load that there is. No checkpoint holds the state that changes hands."""
    settings = (
        *OVERLAPPED,
        selector(runs, fixed_fields=HELD),
        "update.max_tokens_per_microbatch=1024",
    )
    runs.train(*settings, "name=apart", "stages.placement=separate")
    (table,) = (runs.directory / "profiles").glob("*.parquet")
    write_table(table.parent, table.stem, ProfileTable(points=MOVING))
    runs.train(*settings)

    first, last = plan(runs, 0), plan(runs, 3)
    assert placement(runs, 0) == placement(runs, 1) == "separate"
    assert first["rollout"].threads == first["update"].threads == 1
    assert placement(runs, 2) != "separate"
    assert last["update"].threads == 2
    assert "staleness 2 would gain" in last.reasons["placement"]
    events = [line["event"] for line in runs.ledger()]
    assert [event for event in events if event.startswith("devices change sides: separate (1")]
    assert sorted({k for k, stage in runs.executed("sealed") if stage == "evaluation"}) == [0, 2, 4]
    # Nothing was done twice for that, and no rollout was older than it may be.
    assert sorted(runs.executed("sealed")) == sorted(set(runs.executed("sealed")))
    assert [line["update/age_max"] for line in runs.metrics()] == [0, 1, 1, 1]
    after = weights_in(runs.policy(3))
    assert_learnt([x["update/grad_norm"] for x in runs.metrics()], weights_in(runs.model), after)
    assert largest_change(after, weights_in(runs.policy(3, "apart"))) < 1e-4
    assert not (runs.run() / HANDOFFS).exists()
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


APART, WHOLE = "update tp1 mb1024 on1", "update tp1 1x2threads mb1024"
MOVING = (
    measured(APART, GUESSED, 1e6),
    measured(WHOLE, GUESSED, 1.0),
    measured(APART, PLAYED, 1e-4),
    measured(WHOLE, PLAYED, 1e6),
)
"""Apart until an iteration has been seen, then in turn."""
STAYING = tuple(
    measured(key, context, rate)
    for key, rate in ((APART, 1e6), (WHOLE, 1.0))
    for context in (GUESSED, PLAYED)
)


def profiled(runs: Runs, settings: tuple[str, ...], points: tuple[ProfilePoint, ...]) -> None:
    """Have the runs know this of the machine."""
    config = load_config(runs.config, list(settings))
    found = profile_of(config, read_hardware(), read_model_shape(runs.model))
    write_table(*found[:2], ProfileTable(points=points))


def once(runs: Runs) -> None:
    """Have each fault happen once."""
    runs.environment["EARL_FAULT_ONCE"] = str(runs.directory / "happened")
    (runs.directory / "happened").mkdir()


def assert_alike(runs: Runs, whole: Runs) -> None:
    """They have learnt the same, from episodes as old."""
    assert_learnt(
        [x["update/grad_norm"] for x in runs.metrics()],
        weights_in(runs.model),
        weights_in(runs.policy(3)),
    )
    assert largest_change(weights_in(runs.policy(3)), weights_in(whole.policy(3))) < 1e-4
    ages = {line["iteration"]: line["update/age_max"] for line in runs.metrics()}
    assert list(ages.values()) == [0, 1, 1, 1]


KILLED_AS_IT_SAVES = """
import asyncio, os, signal
from pathlib import Path
from earl_core.control import device_moves
from flows.train import train

save = device_moves.save_state

def killed(controller, learner, *given):
    if not Path("killed").exists():
        Path("killed").touch()
        for pid in controller.groups.live(learner.role).pids:
            os.kill(pid, signal.SIGKILL)
    return save(controller, learner, *given)

device_moves.save_state = killed
asyncio.run(train(config={config!r}, overrides={overrides!r}))
"""


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_learner_that_is_killed_while_and_after_devices_move_goes_back_with_them(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Killed as it saves what the next one takes over, and again in its update there: the state is
    lost with it, both times, and earlier plans are followed again."""
    small = "update.max_tokens_per_microbatch=1024"
    settings = (*OVERLAPPED, small, selector(runs, fixed_fields=HELD))
    profiled(runs, settings, MOVING)
    once(runs)
    runs.environment["EARL_FAULT"] = "update.step0@3=kill"
    text = KILLED_AS_IT_SAVES.format(config=str(runs.config), overrides=list(settings))
    runs.script(text, warm.CONTROLLER)
    assert (runs.directory / "killed").exists()
    assert [placement(runs, k) == "separate" for k in range(4)] == [True, True, False, False]
    events = [(line["iteration"], line["event"]) for line in runs.ledger()]
    moves = [(k, event) for k, event in events if event.startswith("devices change sides")]
    lost = [event for _, event in events if event.startswith("the training state was lost")]
    assert len(lost) == 2
    # There, and there again after each loss.
    assert [k for k, _ in moves] == [2, 2, 2]
    rollouts = [k for k, stage in runs.executed("sealed") if stage == "rollout"]
    assert sorted(rollouts) == [0, 1, 2, 3]
    assert_alike(runs, undisturbed(*OVERLAPPED, small))
    assert not (runs.run() / HANDOFFS).exists()
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


TOO_LITTLE = """
import asyncio, os, threading, time
from pathlib import Path
from earl_core.selector.choice import combination
from flows.train import train

asked = combination.lack_of_memory

def open_gate():
    while not Path({chosen!r}).exists():
        time.sleep(0.05)
    Path(os.environ["EARL_FAULT_GATE"]).unlink(missing_ok=True)

threading.Thread(target=open_gate, daemon=True).start()

def lack(predictor, rows):
    beside = predictor.division.placed.side_by_side and predictor.given.forbidden
    return "too little for both sides" if beside else asked(predictor, rows)

combination.lack_of_memory = lack
asyncio.run(train(config={config!r}, overrides={overrides!r}))
"""
"""A machine whose memory holds both sides at a time until one has run out of it; what waits at the
gate goes on once the layout of iteration 2 is sealed, the file `chosen`."""


@pytest.mark.slow
def test_an_update_that_fits_no_longer_beside_rollouts_takes_turns_with_them(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Devices do not change sides while later rollouts play; those end, and then they do, also for
    an iteration ahead whose plan was sealed. Then the run goes back to a checkpoint from before
    that."""
    small, often = "update.max_tokens_per_microbatch=1024", "checkpoint.every=2"
    settings = (*OVERLAPPED, small, often, selector(runs))
    profiled(runs, settings, STAYING)
    once(runs)
    gate = runs.directory / "gate"
    gate.touch()
    runs.environment["EARL_FAULT_GATE"] = str(gate)
    runs.environment["EARL_FAULT"] = "update.before@1=wait;update.microbatch1@1=memory"
    chosen = str(runs.run() / "iterations" / "000002" / "select.json")
    text = TOO_LITTLE.format(config=str(runs.config), overrides=list(settings), chosen=chosen)
    runs.script(text, warm.CONTROLLER)
    assert placement(runs, 0) == "separate"
    assert (placement(runs, 1), plan(runs, 1).attempt) == ("colocated", 1)
    # The iteration ahead, whose update had a side of its own, has chosen once more, and knew why.
    assert runs.executed("sealed").count((2, "select")) == 2
    assert (placement(runs, 2), plan(runs, 2).attempt) == ("colocated", 0)
    # So no device goes back to its old side.
    assert not [x for x in runs.ledger() if x["event"].startswith("devices change sides")]
    assert placement(runs, 3) == "colocated"
    events = [line["event"] for line in runs.ledger() if line["iteration"] == 1]
    (anew,) = [event for event in events if event.startswith("the devices are divided anew")]
    assert "too little for both sides" in anew
    whole = undisturbed(*OVERLAPPED, small)
    assert_alike(runs, whole)
    sealed = runs.executed("sealed")
    results = [each for each in sealed if each[1] != "select"]
    assert sorted(results) == sorted(set(results))

    go_back(runs.run(), 1)
    runs.script(text, warm.CONTROLLER)
    again = [each for each in runs.executed("sealed")[len(sealed) :] if each[1] == "update"]
    assert again == [(2, "update"), (3, "update")]
    assert_alike(runs, whole)
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


@pytest.mark.slow
def test_a_layout_that_was_chosen_has_the_bits_of_the_same_one_by_hand(runs: Runs) -> None:
    """Rollout and update in turn, because the run file says so, and because the selector does."""
    cores = read_hardware().cpu_cores
    threads = f"rollout.threads={cores}", f"update.threads={cores}"
    given = (*OVERLAPPED, *threads, "checkpoint.every=1")
    live = (*given, selector(runs, fixed_fields=VARIABLE_FIELDS))
    # Training has nearly no speed on fewer cores.
    fewer = [f"update tp1 mb256 on{n}" for n in range(1, cores)]
    whole = measured(f"update tp1 1x{cores}threads mb256", PLAYED, 1e6)
    profiled(runs, live, (whole, *(measured(key, PLAYED, 1.0) for key in fewer)))
    assert (
        runs.train_here(
            {"overrides": [*given, "selector.policy=fixed", "name=by_hand"]},
            {"overrides": [*live, "stages.placement=colocated", "name=in_turn"]},
            {"overrides": [*live]},
        )
        == [None] * 3
    )
    runs.assert_learnt()
    for name, division in ("in_turn", None), ("run", Division()):
        for k in range(4):
            chosen, by_hand = plan(runs, k, name), plan(runs, k, "by_hand")
            assert (chosen.policy, by_hand.policy) == ("live_tokens", "fixed")
            assert (chosen.stages, chosen.division) == (by_hand.stages, division)
            rollout = runs.run(name) / "iterations" / f"{k:06d}" / "rollout.json"
            assert json.loads(rollout.read_text())["policy_version"] == max(0, k - 1)
            assert runs.weights(k, name) == runs.weights(k, "by_hand")
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_a_stream_is_laid_out_and_its_batches_are_observed(runs: Runs) -> None:
    mode = "schedule={staleness: 1, mode: stream}"
    settings = (*LEARNING, mode, "algorithm.importance_correction={}", selector(runs))
    runs.train(*settings, "iterations=3", "stages.placement=colocated")
    runs.assert_learnt()
    rates = {
        seen.iteration: seen.tokens_per_second
        for seen in observations(runs, "measured")
        if seen.stage == "rollout"
    }
    assert sorted(rates) == [0, 1, 2]
    assert min(rates.values()) > 0
    # What was observed is what the next plan predicts by.
    last = plan(runs, 2)
    assert last.policy == "live_tokens"
    assert last.predictions["rollout"].measured > 0
    runs.wait_for_workers_to_end()
