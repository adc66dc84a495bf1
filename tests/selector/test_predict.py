"""What is put up for choice on hosts whose memory all stages share, and what memory rules out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from earl_core.config.stages import StagesConfig
from earl_core.deployment.plan import Forbidden
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.expected_load import trained_load
from earl_core.selector.choice.explain import considered
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.calibration import Calibration, Peak
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.profile_table import (
    ProfilePoint,
    ProfileTable,
    candidate_of_key,
    key_of,
)
from tests.selector.examples import GIB, bare, chosen, given, host

quick = settings(max_examples=40, deadline=None)


def test_groups_that_are_trained_again_are_on_the_training_alone() -> None:
    """As many as the iteration's own: the load of the update and of the reference doubles."""
    item = host(64.0)
    own = item.rollout.prompts_per_iteration
    twice = item.model_copy(update={"groups_replayed": own})
    one, other = Predictor(item), Predictor(twice)
    rollout, update = item.configured()
    wide = update._replace(max_tokens_per_microbatch=2**20)
    assert other.predict(rollout, other.now).seconds == one.predict(rollout, one.now).seconds
    once, again = (each.predict(wide, each.now) for each in (one, other))
    assert 1.6 * once.seconds < again.seconds < 2.1 * once.seconds
    assert again.peak > once.peak
    for stage, factor in (("rollout", 1), ("reference", 2), ("update", 2)):
        assert trained_load(twice, stage, one.now).episodes == factor * one.now.episodes


def test_the_update_is_predicted_for_what_the_last_iterations_computed() -> None:
    """Half of the tokens: seconds by the mean share, memory by the least that was left out."""

    def predicted(*left_out: float) -> tuple[float, float, float]:
        item = host(64.0)
        seen = item.statistics.model_copy(update={"left_out_share": left_out})
        predictor = Predictor(item.model_copy(update={"statistics": seen}))
        update, rollout = item.configured()[1], item.configured()[0]
        wide = update._replace(max_tokens_per_microbatch=2**20)
        one, other = (predictor.predict(each, predictor.now) for each in (wide, rollout))
        return one.seconds, one.peak, other.seconds

    whole, half = predicted(), predicted(0.5)
    assert predicted(0.0, 0.0) == whole
    assert whole[2] == half[2]
    assert 0.4 * whole[0] < half[0] < 0.7 * whole[0]
    assert half[1] < whole[1]
    mixed = predicted(0.25, 0.75)
    assert mixed[0] == half[0]
    assert half[1] < mixed[1] < whole[1]


def test_an_iteration_of_several_waves_plays_as_much_longer() -> None:
    item = host(64.0)
    seen = item.statistics.model_copy(update={"played_share": (2.0, 3.0)})
    once, often = Predictor(item), Predictor(item.model_copy(update={"statistics": seen}))
    seconds = [each.predict(item.configured()[0], each.now).seconds for each in (once, often)]
    assert seconds[1] == pytest.approx(2.5 * seconds[0])


def test_more_engines_cost_more_memory() -> None:
    predictor = Predictor(host(24.0))
    one, two, four = (
        StageDeployment("rollout", n, threads=4 // n, max_running_requests=256) for n in (1, 2, 4)
    )
    peaks = [predictor.stage_peak(candidate) for candidate in (one, two, four)]
    weights = 2 * MODELS["smollm2-135m"].parameters
    assert peaks == sorted(peaks)
    assert peaks[1] - peaks[0] > weights
    tight = host(peaks[1] / GIB / 0.9 * 0.99)
    verdicts = {row.candidate.replicas: row for row in considered(tight).predictions["rollout"]
                if row.candidate.max_running_requests == 256}  # fmt: skip
    assert not verdicts[1].problem
    assert "running 2 engines needs" in verdicts[2].problem


def test_a_measured_stage_offers_every_size() -> None:
    point = ProfilePoint(
        key="update tp1 1x4threads mb1024", context=500, requests=64, tokens_per_second=1e5
    )
    item = host(24.0, profile=ProfileTable(points=(point,)))
    offered = {
        row.candidate.max_tokens_per_microbatch for row in considered(item).predictions["update"]
    }
    assert {1024, 2048, 4096, 8192} <= offered


def test_a_layout_that_was_not_measured_shares_what_all_have_in_common() -> None:
    """Every measured size runs at a tenth of the roofline: so does one that was not measured."""
    bare = Predictor(host(24.0))
    points = []
    for size in (1024, 2048):
        layout = StageDeployment("update", threads=4, max_tokens_per_microbatch=size)
        seconds = bare.predict(layout, bare.now).seconds
        rate = 0.1 * bare.now.episodes * bare.now.context / seconds
        points.append(
            ProfilePoint(
                key=key_of(layout), context=bare.now.context, requests=64, tokens_per_second=rate
            )
        )
    taught = Predictor(host(24.0, profile=ProfileTable(points=tuple(points))))
    for size in (1024, 4096):
        layout = StageDeployment("update", threads=4, max_tokens_per_microbatch=size)
        before, after = (p.predict(layout, p.now) for p in (bare, taught))
        assert after.seconds == pytest.approx(10 * before.seconds, rel=0.02)
        assert after.guess == (size == 4096)


@pytest.mark.parametrize(
    ("layout", "hardware"),
    [
        (
            StageDeployment(
                "update",
                threads=4,
                max_tokens_per_microbatch=512,
                activation_checkpointing="full",
                logits_chunk_tokens=64,
            ),
            Hardware(cpu_cores=4, memory_bytes=GIB),
        ),
        (StageDeployment("rollout", 2, threads=2), Hardware(cpu_cores=4, memory_bytes=GIB)),
        (StageDeployment("rollout", 4), Hardware(cpu_cores=4, memory_bytes=GIB)),
        (
            StageDeployment(
                "update", 2, 2, 4, 2, max_tokens_per_microbatch=4096, offload_optimizer=True
            ),
            cluster("h100-80gb", 4, 8),
        ),
    ],
)
def test_a_key_names_its_candidate(layout: StageDeployment, hardware: Hardware) -> None:
    assert candidate_of_key(key_of(layout), hardware.devices) == layout


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_a_lower_limit_saves_no_memory_of_an_engine_that_is_built_the_same(engine: str) -> None:
    """A vLLM engine is built for the configured sequences whatever the deployment lets in; the
    torch engine's cache grows with those that are let in."""
    item = given(8192.0, rollout={"engine": engine}, selector={"stages": ("rollout",)})
    failed = select(item)["rollout"]
    predictor = Predictor(item.model_copy(update={"forbidden": (Forbidden(deployment=failed),)}))
    fewer = predictor.candidate_of(failed)._replace(max_running_requests=1)
    problem = predictor.predict(fewer, predictor.now).problem
    assert ("it ran out of memory in this run" in problem) == (engine == "vllm")
    other = fewer._replace(tensor_parallel=2, replicas=4)
    assert not predictor.is_forbidden(other)


def test_what_ran_out_of_memory_is_named_with_its_bytes() -> None:
    item = host(24.0, selector={"stages": ("update",)})
    first = select(item)["update"]
    learnt = item.model_copy(update={"forbidden": (Forbidden(deployment=first),)})
    assert select(learnt)["update"] != first
    predictor = Predictor(learnt)
    failed = bare(first)
    for layout in (
        failed,
        failed._replace(max_tokens_per_microbatch=2 * failed.max_tokens_per_microbatch),
    ):
        problem = predictor.predict(layout, predictor.now).problem
        what = "it" if layout == failed else "one that needs no more"
        assert problem.startswith(f"{what} ran out of memory in this run, where")
        assert gib(predictor.stage_peak(layout)) in problem


def test_measured_peaks_move_the_choice() -> None:
    item = host(6.0, selector={"stages": ("update",)})
    predictor = Predictor(item)
    now = predictor.formula_peak(bare(select(item)["update"]), predictor.now)
    heavier = Calibration(peaks=(Peak(stage="update", predicted=now, measured=1.6 * now),))
    lighter = Calibration(peaks=(Peak(stage="update", predicted=now, measured=0.6 * now),))
    sizes = [
        chosen(item.model_copy(update={"calibration": learnt})).max_tokens_per_microbatch
        for learnt in (heavier, Calibration(), lighter)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_where_nothing_is_on_offer_memory_is_not_blamed() -> None:
    engines = {"engine": "vllm", "max_model_len": 1024}
    with pytest.raises(NoFeasiblePlan, match=r"on offer: .*TP 2: 2 does not divide the 9") as error:
        select(host(24.0, selector={"tensor_parallel": (2,)}, rollout=engines))
    assert "memory" not in str(error.value)
    copies = StagesConfig.model_validate({"update": {"replicas": 2}})
    with pytest.raises(NoFeasiblePlan, match=r"on offer: .*selector\.fixed_fields holds a field"):
        select(host(24.0, stages=copies, selector={"fixed_fields": ("update.replicas",)}))


def test_an_engine_that_was_measured_to_fit_has_room_for_its_cache() -> None:
    """The formula alone, here half as much again as was measured, would leave it none."""
    item = host(8.0, 50.0, episodes=4, selector={"stages": ("rollout",)})
    predictor = Predictor(item)
    engine = StageDeployment("rollout", 1, threads=4, max_running_requests=256)
    formula = predictor.formula_peak(engine, predictor.now)
    small = item.model_copy(
        update={
            "hardware": Hardware(cpu_cores=4, memory_bytes=int(0.75 * formula / 0.9)),
            "calibration": Calibration(
                peaks=(Peak(stage="rollout", predicted=formula, measured=formula / 1.5),)
            ),
        }
    )
    assert chosen(small, "rollout").max_running_requests == 256
    (row,) = (r for r in considered(small).predictions["rollout"] if r.candidate == engine)
    assert row.allowed
    with pytest.raises(NoFeasiblePlan):
        select(small.model_copy(update={"calibration": Calibration()}))


def seconds_of(item: SelectionInput) -> float:
    predictor = Predictor(item)
    try:
        plan = select(item)
    except NoFeasiblePlan:
        return math.inf
    layouts = [predictor.candidate_of(plan[stage]) for stage in item.selector.stages]
    rows = [predictor.predict(layout, predictor.now) for layout in layouts]
    assert not any(row.problem for row in rows)
    assert all(row.peak <= row.budget * (1 + 1e-9) for row in rows)
    return sum(row.seconds for row in rows)


@quick
@examples(
    st.sampled_from(["torch", "vllm"]),
    st.floats(1.0, 32.0),
    st.floats(1.0, 2.0),
    st.floats(0, 6.0),
    st.floats(50, 4000),
    st.integers(1, 256),
    st.sampled_from([(), ("update.max_tokens_per_microbatch",)]),
)
def test_on_a_cpu_more_memory_is_never_slower_and_what_others_hold_never_faster(
    engine: str,
    memory: float,
    more: float,
    reserved: float,
    context: float,
    episodes: int,
    held: tuple[str, ...],
) -> None:
    def at(size: float, others: float) -> float:
        return seconds_of(
            host(
                size,
                context,
                episodes=episodes,
                rollout={"engine": engine, "max_model_len": 4096},
                reserved_bytes={"update": others * GIB, "rollout": others / 2 * GIB},
                selector={"stages": ("rollout", "update"), "fixed_fields": held},
            )
        )

    times = at(memory, reserved), at(memory * more, reserved), at(memory, 0.0)
    assert times[1] <= times[0] * (1 + 1e-9)
    assert times[2] <= times[0] * (1 + 1e-9)


@quick
@examples(st.floats(2.0, 24.0), st.floats(50, 3000), st.floats(0, 4.0), st.data())
def test_on_a_cpu_the_same_input_gives_the_same_plan_and_forbidden_ones_stay_away(
    memory: float, context: float, reserved: float, data: st.DataObject
) -> None:
    item = host(
        memory, context, needs_reference=True,
        reserved_bytes=dict.fromkeys(("rollout", "reference", "update"), reserved * GIB),
    )  # fmt: skip
    gone: list[Any] = []
    for _ in range(3):
        try:
            plan = select(item)
        except NoFeasiblePlan:
            return
        assert plan == select(SelectionInput.model_validate_json(item.model_dump_json()))
        layouts = {bare(stage) for stage in plan.stages.values()}
        assert not layouts & {bare(one) for one in gone}
        gone.append(plan[data.draw(st.sampled_from(["rollout", "reference", "update"]))])
        forbidden = tuple(Forbidden(deployment=one) for one in gone)
        item = item.model_copy(update={"forbidden": forbidden, "current": plan})
