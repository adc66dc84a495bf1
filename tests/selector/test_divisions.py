"""Division of the devices between rollout and update, where iterations overlap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from earl_core.config.stages import StagesConfig
from earl_core.deployment.placement import Division, spread
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.combination import Way, evaluate, ways
from earl_core.selector.choice.division import lack_of_memory
from earl_core.selector.choice.explain import considered, plan_rows
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.search_space import offers
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.profile.observations import Observation, refined
from earl_core.selector.profile.profile_table import ProfileTable, candidate_of_key, key_of
from earl_core.system.hardware import HostResources
from tests.selector.examples import given, host

COLOCATED = Division(placement="colocated")
quick = settings(max_examples=25, deadline=None)


def stale(
    mean: float = 2048.0, longest: float = 0.0, share: float = 0.5, **fields: Any
) -> SelectionInput:
    """A run whose rollouts are one version older. share: of an episode that the model writes."""
    seen = Statistics(
        context_mean=(mean,),
        context_max=(longest or mean,),
        generated_share=(share,),
        turns_mean=(4.0,),
    )
    rollout = {"max_model_len": None, **fields.pop("rollout", {})}
    base = {"model": "qwen2.5-7b", "staleness": 1, "statistics": seen, "rollout": rollout}
    return given(mean, **{**base, **fields})


def division(plan: DeploymentPlan) -> Division:
    assert plan.division is not None
    return plan.division


def in_turn(found: list[Way]) -> Way | None:
    return next((way for way in found if way.predictor.division == COLOCATED), None)


@quick
@examples(
    st.sampled_from(["qwen2.5-7b", "llama-3.1-8b", "smollm2-135m", "qwen2.5-72b"]),
    st.sampled_from([(1, 1), (1, 4), (1, 8), (4, 8)]),
    st.floats(64, 30000),
    st.floats(1, 8),
    st.floats(0.02, 0.98),
    st.integers(1, 2048),
    st.integers(1, 7),
)
def test_a_division_fits_and_is_never_slower_than_taking_turns(
    model: str, machine: tuple[int, int], mean: float, tail: float, share: float,
    episodes: int, staleness: int,
) -> None:  # fmt: skip
    limit = MODELS[model].max_positions
    mean = min(mean, limit / 2)
    item = stale(
        mean, min(limit, mean * tail), share, model=model, hosts=machine[0], gpus=machine[1],
        episodes=episodes, staleness=staleness, needs_reference=True,
    )  # fmt: skip
    try:
        found = ways(item)
    except NoFeasiblePlan:
        return
    taken, turns = found[0], in_turn(found)
    assert turns is None or taken.seconds <= turns.seconds
    assert not lack_of_memory(taken.predictor, taken.chosen.values())
    for row in taken.chosen.values():
        assert not row.problem
        assert row.peak <= row.budget * (1 + 1e-9)
    plan = select(SelectionInput.model_validate_json(item.model_dump_json()))
    assert division(plan) == taken.predictor.division
    engines = division(plan).engine_devices
    if engines:
        rest = machine[1] - engines
        assert plan["rollout"].ranks <= engines * machine[0]
        assert plan["update"].ranks == plan["reference"].ranks == rest * machine[0]


@quick
@examples(st.integers(1, 4), st.integers(2, 8), st.data())
def test_no_device_is_on_both_sides(hosts: int, gpus: int, data: st.DataObject) -> None:
    """Of any engine and any mesh that are offered together, on hosts of any size."""
    engines = data.draw(st.integers(1, gpus - 1))
    division = Division(placement="separate", engine_devices=engines)
    predictor = Predictor(stale(hosts=hosts, gpus=gpus, episodes=512), division=division)
    sites = [HostResources(cores=(), gpus=gpus)] * hosts
    of_engines: set[tuple[int, int]] = set()
    of_training: set[tuple[int, int]] = set()
    for candidate in offers(predictor, "rollout")[0]:
        for member in range(candidate.replicas):
            for on, place in spread(division.placed, candidate, member, sites):
                assert len(place.gpus) == candidate.tensor_parallel
                of_engines |= {(on, gpu) for gpu in place.gpus}
    for mesh in offers(predictor, "update")[0]:
        for on, place in spread(division.placed, mesh, 0, sites):
            of_training |= {(on, gpu) for gpu in place.gpus}
    assert of_engines
    assert not of_engines & of_training


@quick
@examples(st.floats(512, 16000), st.integers(64, 1024))
def test_a_run_bound_by_its_updates_takes_turns(mean: float, episodes: int) -> None:
    item = stale(mean, share=0.01, episodes=episodes)
    taken = ways(item)[0]
    rollout = taken.chosen["rollout"].whole
    if rollout < 0.1 * (taken.seconds - rollout):
        assert taken.predictor.division == COLOCATED


def test_rollouts_with_long_tails_have_devices_of_their_own() -> None:
    item = stale(2048.0, 20000.0, episodes=128)
    plan = select(item)
    assert division(plan).placement == "separate"
    # More devices do not shorten the longest episode.
    turns = in_turn(ways(item))
    assert turns is not None
    assert ways(item)[0].seconds < 0.9 * turns.seconds
    reason = plan.reasons["placement"]
    for part in (
        "separate, 4 of 8 devices for the rollout: an iteration takes",
        "in which the engines wait 0 s and the update's ranks",
        "would take",
        "; staleness 2 would gain",
    ):
        assert part in reason, reason
    assert plan_rows(plan)[-1]["why"] == reason
    assert considered(item, plan).taken["update"].candidate.ranks == 4


def test_a_greater_staleness_gains_where_one_engine_ends_last() -> None:
    """With two hosts' engines the others go on meanwhile."""
    item = stale(1024.0, 30000.0, episodes=256, hosts=4)
    gained = select(item).reasons["placement"].rpartition("staleness 2 would gain ")[2]
    assert gained.endswith("%")
    assert float(gained.removesuffix(" %")) > 5


def test_devices_change_sides_for_more_than_noise_only() -> None:
    start = select(stale(2048.0, 20000.0, episodes=128))
    assert division(start).placement == "separate"
    bound = {"share": 0.01, "episodes": 1024}
    settled = stale(2048.0, 20000.0, current=start)
    assert division(select(settled)) == division(start)
    moved = stale(4096.0, **bound, current=start)
    assert division(select(moved)) == COLOCATED
    # A switch that the rest of the run does not repay is not made.
    late = {"iterations_left": 1, "selector": {"switch_seconds": 1e4}}
    assert division(select(stale(4096.0, **bound, current=start, **late))) == division(start)
    # Nor one while rollouts of later iterations play.
    ahead = moved.model_copy(update={"keeps_division": True})
    assert division(select(ahead)) == division(start)


def test_a_plan_says_at_which_attempt_its_iteration_divided_the_devices_anew() -> None:
    apart = select(stale(2048.0, 20000.0, episodes=128))
    bound = {"share": 0.01, "episodes": 1024}
    # From one iteration to the next nothing has failed.
    later = select(stale(4096.0, **bound, iteration=6, current=apart))
    assert (division(later), later.divided_anew) == (COLOCATED, 0)
    anew = select(stale(4096.0, **bound, attempt=1, current=apart))
    assert (division(anew), anew.attempt, anew.divided_anew) == (COLOCATED, 1, 1)
    # So it does where its own first plan is gone, as in a run that has gone back.
    earlier = apart.model_copy(update={"iteration": anew.iteration - 1})
    assert select(stale(4096.0, **bound, attempt=1, current=earlier)).divided_anew == 1
    # Another failure leaves the sides as they are; what runs ahead keeps what it chose since.
    again = select(stale(4096.0, **bound, attempt=2, current=anew))
    assert (division(again), again.attempt, again.divided_anew) == (COLOCATED, 2, 1)


def test_a_placement_that_the_run_file_names_is_kept() -> None:
    bound, tailed = stale(4096.0, share=0.01, episodes=1024), stale(2048.0, 20000.0)
    apart = bound.model_copy(update={"stages": StagesConfig(placement="separate")})
    assert division(select(apart)).placement == "separate"
    turns = tailed.model_copy(update={"stages": StagesConfig(placement="colocated")})
    assert select(turns).division is None
    assert "placement" not in select(turns).reasons
    # Nothing is divided where one stage stays as it is, or where rollouts are not older.
    assert select(stale(2048.0, 20000.0, selector={"stages": ("rollout",)})).division is None
    assert select(stale(2048.0, 20000.0, staleness=0)).division is None


def test_cores_are_divided_and_both_sides_share_the_memory() -> None:
    waits = Statistics(
        context_mean=(500.0,), context_max=(600.0,), turns_mean=(8.0,), tool_wait_seconds=(5.0,)
    )
    roomy = host(64.0, staleness=1, statistics=waits)
    # Whoever waits for tools leaves the cores to the update.
    assert division(select(roomy)).placement == "shared"
    apart = roomy.model_copy(update={"stages": StagesConfig(placement="separate")})
    plan = select(apart)
    cores = division(plan).engine_devices
    assert plan["rollout"].ranks * plan["rollout"].threads == cores
    assert plan["update"].threads == 4 - cores
    # Each side alone fits, but not both at the same time.
    small = host(3.6, staleness=1, statistics=waits)
    found = ways(small)
    assert {way.predictor.division for way in found} == {COLOCATED}


def test_a_stream_fills_the_caches_and_waits_for_no_long_episode() -> None:
    pinned = stale(4096.0, 60000.0, episodes=256, rollout={"max_running_requests": 1024})
    stream = pinned.model_copy(update={"streams": True})
    played, waited = in_turn(ways(stream)), in_turn(ways(pinned))
    assert played is not None
    assert waited is not None
    assert played.seconds < 0.7 * waited.seconds
    predictor = played.predictor
    assert predictor.now.in_play == 512
    for row in played.found["rollout"]:
        engine = row.candidate
        if row.allowed and predictor.now.offered(engine) >= 1:
            held = predictor.capacity(engine) / predictor.ahead.context
            assert min(engine.max_running_requests, 512 / engine.replicas) <= max(1, held)


def test_what_is_measured_on_fewer_devices_says_so() -> None:
    """The same mesh is another candidate on half of the devices."""
    whole, half = StageDeployment("update", 2, shard=4), StageDeployment("update", 1, shard=4)
    assert key_of(whole, 8) == key_of(whole) == "update tp1 shard4"
    assert key_of(half, 8) != key_of(whole, 8)
    assert candidate_of_key(key_of(half, 8), 8) == half
    assert candidate_of_key(key_of(whole, 8), 8) == whole


def test_engines_that_wait_for_the_last_one_make_a_division_dearer() -> None:
    """As a discrete count has it: each of n engines is busy until the last one ends."""
    free = stale(2048.0, 20000.0, episodes=128)
    barred = free.model_copy(update={"barrier_share": 1.0})
    half = free.model_copy(update={"barrier_share": 0.5})
    apart = Division(placement="separate", engine_devices=4)
    rows = [
        {row.candidate: row for row in evaluate(Predictor(item, division=apart))[0]["rollout"]}
        for item in (free, half, barred)
    ]
    several = [engines for engines in rows[0] if engines.replicas > 1]
    assert several
    for engines in several:
        alone, some, all_ = (found[engines] for found in rows)
        assert all_.busy == pytest.approx(all_.whole)
        assert alone.busy < some.busy < all_.busy
        assert some.busy == pytest.approx((alone.busy + all_.busy) / 2)
        # Others may use shared devices meanwhile.
        assert all_.busy - all_.waiting == pytest.approx(alone.busy - alone.waiting)
    assert ways(barred)[0].seconds > ways(free)[0].seconds
    turns = [in_turn(ways(item)) for item in (free, barred)]
    assert turns[0] is not None
    assert turns[1] is not None
    assert turns[0].seconds == turns[1].seconds


def test_what_runs_without_staleness_have_measured_is_found_as_ever() -> None:
    """Their training has the devices that it is laid out on, whatever their number."""
    few = StageDeployment("update", shard=2, max_tokens_per_microbatch=4096)
    seen = Observation(
        iteration=1, stage="update", kind="measured", deployment=few, context=1024.0,
        requests=128.0, tokens_per_second=9.0,
    )  # fmt: skip
    keys = []
    for staleness in (0, 1):
        item = stale(1024.0, staleness=staleness)
        table = refined(ProfileTable(), [seen], 16.0, item.hardware, staleness > 0)
        keys += [point.key for point in table.points]
        predictor = Predictor(item.model_copy(update={"profile": table}))
        assert predictor.correction(predictor.candidate_of(few))(1024.0, 128.0)[1] > 0.9
    assert keys == ["update tp1 shard2 mb4096", "update tp1 shard2 mb4096 on2"]


@pytest.mark.parametrize("policy", ["fixed", "average_context"])
def test_other_policies_divide_nothing(policy: str) -> None:
    assert select(stale(2048.0, 20000.0, selector={"policy": policy})).division is None
