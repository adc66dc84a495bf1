"""Runs in which groups that score alike leave the batch, and further prompts are played."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest

from tests import warm
from tests.flows.runs import KILLED, LEARNING, Runs
from tests.flows.test_debug import DEBUGGING

Undisturbed = Callable[..., Runs]

GAMES = {"name": "tests.rollout.environments:SomeGames", "options": {"paying": [1, 4], "of": 5}}
REPLACING = (
    "algorithm.kl={placement: none, coefficient: 0}",
    "rollout.prompts_per_iteration=2",
    "rollout.alike_groups=replace",
    f"environment={json.dumps(GAMES)}",
)
"""Of five prompts two pay at the most, so that two groups that differ take several waves."""

COUNTED = (
    *("rollout/waves", "rollout/groups_alike", "rollout/groups_replaced", "rollout/episodes"),
    *("advantage/episodes_kept", "update/grad_norm", "reward/mean", "reward/std"),
)


def assert_as_undisturbed(runs: Runs, undisturbed: Undisturbed) -> None:
    """Each wave sealed once, none begun again after that, equal bits, and nothing left."""
    whole = undisturbed(*REPLACING)
    sealed = runs.executed("sealed")
    names = [each for each in whole.executed("sealed") if "_wave" in each[1]]
    assert sorted(each for each in sealed if "_wave" in each[1]) == sorted(names)
    assert {(0, "rollout_wave3"), (1, "rollout_wave2")} <= {*names}
    for place in names:
        events = [x["event"] for x in runs.ledger() if (x["iteration"], x["stage"]) == place]
        assert "started" not in events[events.index("sealed") :], (place, events)
    for iteration in range(2):
        assert runs.weights(iteration) == whole.weights(iteration)
    runs.assert_learnt()
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


def played(runs: Runs, iteration: int) -> list[int]:
    """The prompts of an iteration's kept episodes."""
    path = runs.run() / f"iterations/{iteration:06d}/episodes.parquet"
    return sorted(set(pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist()))


@pytest.mark.slow
def test_stopped_in_each_wave_nothing_is_played_twice(runs: Runs, undisturbed: Undisturbed) -> None:
    faults = [
        *("rollout_wave1.after@0", "reward_wave2.after@0", "rollout_wave3.after@0"),
        *("reward_wave1.after@1", "rollout_wave2.after@1", "rollout.after@1"),
    ]
    steps = [{"overrides": REPLACING, "fault": f"{fault}=raise"} for fault in faults]
    endings = runs.train_here(*steps, {"overrides": REPLACING})
    assert endings[-1] is None
    assert all("injected failure" in str(ending) for ending in endings[:-1])
    assert_as_undisturbed(runs, undisturbed)
    prompts = [played(runs, 0), played(runs, 1)]
    assert [*prompts[0], *prompts[1]] == [*range(prompts[1][-1] + 1)]
    whole = undisturbed(*REPLACING)
    for line, other in zip(runs.metrics(), whole.metrics(), strict=True):
        assert [line[name] for name in COUNTED] == [other[name] for name in COUNTED]
        # Two of the six or more differ at the most; an iteration goes on with one, too.
        alike, trained = (line[f"rollout/groups_{name}"] for name in ("alike", "trained"))
        assert alike + trained == 2 * line["rollout/waves"] >= 4
        assert 1 <= line["rollout/groups_replaced"] <= trained <= 2
    state = json.loads((runs.run() / "checkpoints/000001/state.json").read_text())
    assert state["state"]["prompts_trained"] == prompts[1][-1] + 1


@pytest.mark.campaign
def test_killed_in_waves(runs: Runs, undisturbed: Undisturbed) -> None:
    """At other places than those where it is stopped."""
    for moment in ("rollout_wave2.seal@0", "reward_wave3.seal@0", "reward_wave1.after@1"):
        runs.train(*REPLACING, fault=f"{moment}=kill", expect=KILLED)
        runs.wait_for_workers_to_end()
    runs.train(*REPLACING)
    assert_as_undisturbed(runs, undisturbed)


@pytest.mark.slow
def test_an_engine_that_is_lost_in_a_wave_costs_its_share_of_it(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    """The second engine plays prompt 3 of the second wave, of prompts 2 and 3."""
    engines = "stages.rollout={replicas: 2}"
    runs.environment["EARL_FAULT_ONCE"] = str(runs.directory)
    runs.train(*REPLACING, engines, fault="rollout.played3@0=kill")
    assert_as_undisturbed(runs, undisturbed)
    assert [line["rollout/replicas_lost"] for line in runs.metrics()] == [1, 0]


@pytest.mark.slow
def test_a_mixture_with_a_curriculum_counts_every_prompt(runs: Runs) -> None:
    mixture = [
        {**GAMES, "label": "some", "curriculum": {}},
        {**GAMES, "label": "none", "options": {**GAMES["options"], "paying": []}},
    ]
    settings = [
        *LEARNING,
        "iterations=3",
        "rollout.alike_groups=replace",
        "rollout.prompts_per_iteration=4",
        "environment=null",
        f"environments={json.dumps(mixture)}",
        "curriculum={memory: 0.5, least_share: 0.2}",
        "experience.ranks=2",
        "update.minibatches=2",
    ]
    # Two ranks need processes of their own.
    runs.train(*settings, fault="rollout_wave2.after@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*settings)
    runs.assert_learnt()
    drawn, first = {"some": 0, "none": 0}, 0
    for iteration in range(3):
        folder = runs.run() / f"iterations/{iteration:06d}"
        outputs = json.loads((folder / "rollout.json").read_text())["outputs"]
        table = pq.read_table(folder / "episodes.parquet").to_pydict()
        columns = (table[name] for name in ("environment", "group_id", "prompt_id"))
        groups = {*zip(*columns, strict=True)}
        prompts = {
            label: sorted(prompt for of, _, prompt in groups if of == label) for label in drawn
        }
        before, drawn = drawn, {label: outputs["cursor"][label]["drawn"] for label in drawn}
        assert prompts["none"] == [*range(before["none"], drawn["none"])]
        # Later waves go on with other rows, as long as there are some.
        times = Counter(dict.fromkeys(range(5), 0)) + Counter(prompts["some"])
        assert times.total() == drawn["some"] - before["some"]
        assert max(times.values()) - min(times[row] for row in range(5)) <= 1
        results = json.loads((folder / "reward.json").read_text())["outputs"]["rows"]["some"]
        size = len(set(table["episode_id"])) // len(groups)
        assert [[row, n] for row, _, n in results] == [[r, size * times[r]] for r in sorted(times)]
        assert all((solved > 0) <= (row in (1, 4)) for row, solved, _ in results)
        assert outputs["prompts"] == [first, sum(drawn.values())]
        first = sum(drawn.values())
        assert sorted(set(table["group_id"])) == [*range(*outputs["prompts"])]
    cursor = outputs["cursor"]
    assert cursor["none"]["spread"] == 0.0 < cursor["some"]["spread"]


@pytest.mark.slow
def test_stages_of_waves_are_repeated_by_themselves(runs: Runs) -> None:
    """Rewards of the waves that were played; a rollout, with the rewards that decide how many."""
    (ending,) = runs.train_here({"overrides": REPLACING, "fault": "stable.before@0=raise"})
    assert ending is not None
    script = DEBUGGING
    for stage in ("reward", "rollout", "advantage"):
        arguments = f"{str(runs.run())!r}, {stage!r}, 0, 1, None, [], 'runs'"
        script += f"debug({arguments})\nprint('----')\n"
    printed = runs.script(script, warm.ALL)
    rewards, rollout, advantage, _ = printed.split("----")
    waves = [f"reward_wave{n}" for n in (1, 2, 3)]
    assert [line.split()[-1] for line in rewards.splitlines() if "iteration 0:" in line] == [
        *waves, "reward",
    ]  # fmt: skip
    assert [name in rollout for name in ("rollout_wave3", "reward_wave3")] == [True, True]
    assert "wave" not in advantage.partition("iteration 0:")[2]
    for text in (rewards, rollout, advantage):
        # Metric, sealed, now, difference: none.
        rows = [line.split() for line in text.splitlines() if "groups_alike" in line]
        assert all(row[1] == row[2] for row in rows)
    assert "groups_replaced" in rollout
