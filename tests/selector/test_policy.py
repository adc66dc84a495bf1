"""The policies: what they may never do, and what they say."""

from __future__ import annotations

import typing

import pytest
from hypothesis import example, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from pydantic import ValidationError

from earl_core.config.selector import SelectorConfig
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan, Forbidden
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.explain import considered
from earl_core.selector.choice.policy import POLICIES, select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.candidates import rollout_candidates, training_candidates
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of
from tests.selector.examples import bare, given

contexts = st.floats(64, 60000)
machines = st.sampled_from([(1, 1), (1, 4), (1, 8), (4, 8)])
models = st.sampled_from(["qwen2.5-7b", "llama-3.1-8b", "smollm2-135m", "qwen2.5-72b"])
quick = settings(max_examples=40, deadline=None)


def layouts(plan: DeploymentPlan) -> dict[str, StageDeployment]:
    return {stage: bare(item) for stage, item in plan.stages.items()}


def iteration_seconds(item: SelectionInput, plan: DeploymentPlan) -> float:
    predictor, total = Predictor(item), 0.0
    for stage in item.selector.stages:
        if stage in plan.stages:
            candidate = predictor.candidate_of(plan[stage])
            total += predictor.predict(candidate, predictor.now).seconds
    rollout, update = (bare(plan[stage]) for stage in ("rollout", "update"))
    return total + predictor.roofline.republish_seconds(update, rollout)


def test_every_policy_of_the_configuration_exists() -> None:
    named = typing.get_args(SelectorConfig.model_fields["policy"].annotation)
    assert set(named) == set(POLICIES)
    assert SelectorConfig().policy == "auto"


@quick
@examples(models, machines, contexts, st.integers(1, 4096))
def test_the_same_input_gives_the_same_plan_which_fits(
    model: str, machine: tuple[int, int], context: float, episodes: int
) -> None:
    positions = MODELS[model].max_positions
    item = given(
        min(context, positions / 2), model=model, hosts=machine[0], gpus=machine[1],
        episodes=episodes, needs_reference=True,
    )  # fmt: skip
    try:
        plan = select(item)
    except NoFeasiblePlan:
        return
    again = select(SelectionInput.model_validate_json(item.model_dump_json()))
    assert plan == again
    predictor = Predictor(item)
    for stage in ("rollout", "reference", "update"):
        row = predictor.predict(predictor.candidate_of(plan[stage]), predictor.now)
        assert not row.problem
        assert row.peak <= row.budget * (1 + 1e-9)
        assert plan[stage].world_size <= item.hardware.devices
        assert plan.reasons[stage].count("\n") == 0


@quick
@examples(contexts, st.integers(1, 2048), st.data())
def test_a_forbidden_candidate_is_never_picked(
    context: float, episodes: int, data: st.DataObject
) -> None:
    item = given(context, episodes=episodes)
    forbidden = []
    for _ in range(data.draw(st.integers(1, 4))):
        stage = data.draw(st.sampled_from(["rollout", "update"]))
        try:
            plan = select(item)
        except NoFeasiblePlan:
            return
        forbidden.append(Forbidden(deployment=plan[stage]))
        item = item.model_copy(update={"forbidden": tuple(forbidden), "current": plan})
        try:
            chosen = layouts(select(item))
        except NoFeasiblePlan:
            return
        assert not set(chosen.values()) & {bare(one.deployment) for one in forbidden}


@quick
@examples(models, contexts, st.integers(1, 2048), st.floats(1.0, 3.0), st.integers(20, 120))
# The ranks that hold a copy of the weights are on one host, which is worth more than their speed.
@example("qwen2.5-7b", 2228.0, 153, 3.0, 34)
def test_more_memory_is_never_slower(
    model: str, context: float, episodes: int, factor: float, memory: int
) -> None:
    context = min(context, MODELS[model].max_positions / 2)
    times = []
    for size in (memory, memory * factor):
        machine = cluster("h100-80gb", 2, 8).model_copy(
            update={"gpu_memory_bytes": int(size * 2**30)}
        )
        item = given(context, model=model, episodes=episodes, hardware=machine)
        try:
            times.append(iteration_seconds(item, select(item)))
        except NoFeasiblePlan:
            times.append(float("inf"))
    # What is configured is kept, where it fits, unless more than noise speaks for others.
    assert times[1] <= times[0] * (1 + item.selector.hysteresis)


noises = st.lists(st.floats(-1, 1), min_size=6, max_size=12)


@settings(max_examples=12, deadline=None)  # each plans up to twelve times
@examples(models, st.floats(256, 30000), st.integers(8, 2048), noises, st.floats(0.005, 0.2))
def test_noise_below_the_hysteresis_never_causes_a_switch(
    model: str, level: float, episodes: int, noise: list[float], hysteresis: float
) -> None:
    level = min(level, MODELS[model].max_positions / 4)
    noisy = [level * (1 + 0.49 * hysteresis * value) for value in noise]
    plan = None
    for end in range(1, len(noisy) + 1):
        item = given(
            tuple(noisy[max(0, end - 8) : end]),
            model=model,
            hosts=4,
            episodes=episodes,
            selector={"hysteresis": hysteresis},
            rollout={"max_model_len": None},
            current=plan,
        )
        try:
            chosen = select(item)
        except NoFeasiblePlan:
            assert plan is None or _at_the_edge(item, plan)
            return
        if plan is not None and layouts(chosen) != layouts(plan):
            assert _at_the_edge(item, plan)
        plan = chosen


def _at_the_edge(item: SelectionInput, plan: DeploymentPlan) -> bool:
    """Noise may end a layout only by making it too large for the memory."""
    predictor = Predictor(item)
    rows = (
        predictor.predict(predictor.candidate_of(plan[stage]), predictor.now)
        for stage in ("rollout", "update")
    )
    return any(row.problem for row in rows)


@pytest.mark.parametrize("model", ["qwen2.5-72b", "llama-3.1-70b", "llama-3.1-8b"])
@pytest.mark.parametrize("episodes", [128, 512, 2048])
def test_short_contexts_have_no_context_parallelism(model: str, episodes: int) -> None:
    item = given(512.0, model=model, hosts=16, episodes=episodes, selector={"stages": ("update",)})
    assert select(item)["update"].context_parallel == 1


def test_memory_fallback_ends_in_an_error_that_names_the_bytes() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"of the update fits .* needs [\d.]+ GiB, but only"):
        select(given(8192.0, model="qwen2.5-72b"))
    assert gib(3 * 2**30) == "3.0 GiB"


def test_reason_of_a_switch_is_one_sentence_with_its_figures() -> None:
    choice = {"stages": ("rollout",), "tensor_parallel": (4, 8), "switch_seconds": 2.1}
    settings_ = {"max_running_requests": 24, "max_model_len": 40960}
    base = {
        "model": "qwen2.5-72b",
        "hosts": 16,
        "episodes": 16384,
        "selector": choice,
        "rollout": settings_,
    }
    before = select(given(8192.0, **base))
    assert before["rollout"].tensor_parallel == 4
    after = select(given(32000.0, **base, current=before))
    assert after["rollout"].tensor_parallel == 8
    reason = after.reasons["rollout"]
    for part in ("TP 4 → 8: 24 sequences x 31K tokens fill", "of the KV cache at TP 4; predicted +",
                 "2.1 s to switch, repaid after 1 iteration"):  # fmt: skip
        assert part in reason
    # The update was not to be laid out: it stays as it is where nobody does, on all GPUs.
    assert after["update"].axes == (1, 128, 1, 1)


def test_a_switch_that_is_not_repaid_is_not_made() -> None:
    choice = {"stages": ("rollout",), "tensor_parallel": (4, 8), "switch_seconds": 1e9}
    base = {
        "model": "qwen2.5-72b", "hosts": 16, "episodes": 16384, "selector": choice,
        "rollout": {"max_running_requests": 20, "max_model_len": 40960},
    }  # fmt: skip
    before = select(given(8192.0, **base))
    kept = select(given(32000.0, **base, current=before))
    assert kept["rollout"].tensor_parallel == 4
    assert "too little for a switch" in kept.reasons["rollout"]
    measured = Statistics(
        context_mean=(32000.0,), context_max=(32000.0,), switch_seconds={"rollout": 2.0}
    )
    item = given(32000.0, **base, current=before).model_copy(update={"statistics": measured})
    assert select(item)["rollout"].tensor_parallel == 8


def test_measurements_overrule_the_roofline() -> None:
    base = {
        "model": "llama-3.1-8b", "episodes": 64, "selector": {"stages": ("rollout",)},
    }  # fmt: skip
    item = given(4096.0, **base)
    first = Predictor(item).candidate_of(select(item)["rollout"])
    rows = considered(item).predictions["rollout"]
    other = next(
        r.candidate
        for r in rows
        if not r.problem and r.candidate.tensor_parallel != first.tensor_parallel
    )
    points = []
    for candidate, rate in ((first, 10.0), (other, 10000.0)):
        place = {"context": 4096.0, "requests": 64.0 / candidate.replicas}
        points.append(
            ProfilePoint(key=key_of(candidate), tokens_per_second=rate, weight=4, **place)
        )
    taught = item.model_copy(update={"profile": ProfileTable(points=tuple(points))})
    choice = considered(taught)
    assert choice.plan["rollout"].tensor_parallel == other.tensor_parallel
    assert "a guess" not in choice.plan.reasons["rollout"]
    assert "a guess" in select(item).reasons["rollout"]


def test_average_context_looks_at_the_mean_context_alone() -> None:
    settings_ = {"policy": "average_context", "profiled_requests": 32, "tensor_parallel": (4, 8)}
    limit = {"max_running_requests": 8, "max_model_len": 40960}
    base = {"model": "qwen2.5-72b", "hosts": 16, "selector": settings_, "rollout": limit}
    picks = {}
    for episodes in (8, 4096):
        for context in (2048.0, 32768.0):
            plan = select(given(context, episodes=episodes, **base))
            picks[episodes, context] = plan["rollout"].tensor_parallel
            assert plan["update"].world_size == min(episodes, 128)
    assert picks[4096, 2048.0] == 4
    assert picks[4096, 32768.0] == 8
    assert "range of the mean context" in plan.reasons["rollout"]


def test_fields_held_fixed_stay_as_configured() -> None:
    held = ("update.tensor_parallel", "update.offload_optimizer", "rollout.tensor_parallel")
    plan = select(given(2048.0, selector={"fixed_fields": held}))
    assert plan["rollout"].tensor_parallel == plan["update"].tensor_parallel == 1
    assert not plan["update"].offload_optimizer


def test_fields_held_fixed_are_those_of_the_configuration() -> None:
    stages = {"rollout": {"tensor_parallel": 2}, "update": {"tensor_parallel": 4, "shard": 2}}
    held = ("rollout.tensor_parallel", "update.tensor_parallel", "update.shard")
    plan = select(given(2048.0, stages=StagesConfig(**stages), selector={"fixed_fields": held}))
    assert (plan["rollout"].tensor_parallel, plan["rollout"].replicas) == (2, 4)
    assert (plan["update"].tensor_parallel, plan["update"].shard) == (4, 2)


def test_cpu_layouts_share_the_cores() -> None:
    machine = Hardware(cpu_cores=4, memory_bytes=64 * 2**30)
    item = given(1024.0, model="smollm2-135m", hardware=machine, rollout={"max_model_len": 4096})
    found, out = rollout_candidates(MODELS["smollm2-135m"], machine, 128, 256)
    assert {(c.replicas, c.tensor_parallel, c.threads) for c in found} == {
        (1, 1, 4),
        (2, 1, 2),
        (4, 1, 1),
    }
    assert any("2 does not divide the 9 attention heads" in item.reason for item in out)
    plan = select(item)
    assert plan["rollout"].replicas * plan["rollout"].threads == 4
    assert plan["update"].threads == 4


@quick
@examples(models, machines, st.integers(1, 512))
def test_candidates_use_every_device(model: str, machine: tuple[int, int], episodes: int) -> None:
    shape, hardware = MODELS[model], cluster("h100-80gb", *machine)
    found, out = training_candidates("update", shape, hardware, episodes, 4096)
    assert len(set(found)) == len(found)
    for candidate in found:
        assert candidate.ranks == hardware.gpus
        assert candidate.data_parallel <= episodes
        assert shape.attention_heads % (candidate.tensor_parallel * candidate.context_parallel) == 0
    assert all(item.reason and item.label for item in out)


def test_layers_with_a_state_are_divided_neither_by_tensors_nor_by_tokens() -> None:
    shape = ModelShape.from_config({
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 8, "vocab_size": 1000,
        "num_attention_heads": 16, "full_attention_interval": 4, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    })  # fmt: skip
    found, out = training_candidates("update", shape, cluster("h100-80gb", 1, 8), 64, 4096)
    assert {each.shard for each in found} == {1, 2, 4, 8}
    assert all(each.tensor_parallel == each.context_parallel == 1 for each in found)
    why = {item.label: item.reason for item in out}
    assert "6 layers with a state are not split over ranks" in why["TP 2"]
    assert "6 layers with a state need all of a sample on one rank" in why["TP 1, CP 2"]


@pytest.mark.parametrize("hosts", [3, 6])
def test_all_of_three_hosts_share_a_model(hosts: int) -> None:
    """Powers of two alone would leave copies of parts that three hosts could share."""
    only, small = {"stages": ("update",)}, UpdateConfig(max_tokens_per_microbatch=4096)
    asked = given(16384.0, model="qwen2.5-72b", hosts=hosts, selector=only, update=small)
    update = select(asked)["update"]
    assert update.shard % 3 == 0
    assert update.world_size == 8 * hosts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "live_tokens", "fixed_fields": ("update.colour",)}, "no policy moves"),
        ({"fixed_fields": ("update.shard",)}, "means nothing under selector.policy `fixed`"),
        ({"policy": "live_tokens", "profiled_requests": 4}, "average_context` only"),
        ({"policy": "live_tokens", "tensor_parallel": (2, 2)}, "different degrees"),
        ({"policy": "guess"}, "fixed"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        SelectorConfig(**values)  # type: ignore[arg-type]


def test_settings_are_checked_against_the_rollout() -> None:
    rollout = given().rollout
    settings_ = SelectorConfig(policy="live_tokens", tensor_parallel=(1, 2))
    settings_.check_rollout(rollout)
    torch_engine = rollout.model_copy(update={"engine": "torch"})
    with pytest.raises(ValueError, match="runs on one device"):
        settings_.check_rollout(torch_engine)
    with pytest.raises(ValueError, match="no engine runs as many"):
        SelectorConfig(policy="average_context", profiled_requests=512).check_rollout(rollout)
    item = given(1024.0).model_copy(update={"rollout": torch_engine})
    assert select(item)["rollout"].tensor_parallel == 1


def test_the_host_must_hold_what_waits_for_the_engines() -> None:
    """12 bytes a parameter for each copy on a host, and two versions in bfloat16: 322 GiB."""
    roomy = given(16384.0, model="qwen2.5-72b", hosts=16, episodes=4096)
    assert select(roomy)["update"].replicas > 1

    def on_hosts_of(gibibytes: int) -> SelectionInput:
        machine = roomy.hardware.model_copy(update={"memory_bytes": gibibytes * 2**30})
        return roomy.model_copy(update={"hardware": machine})

    choice = considered(on_hosts_of(370))
    assert choice.plan["update"].replicas == 1
    problems = [row.problem for row in choice.predictions["update"] if row.problem]
    assert any("optimizer state and two published versions need" in each for each in problems)
    with pytest.raises(NoFeasiblePlan, match=r"need 321\.\d GiB of a host's 31\d"):
        select(on_hosts_of(350))
    cpu = Hardware(cpu_cores=4, memory_bytes=8 * 2**30)
    with pytest.raises(NoFeasiblePlan) as error:
        select(given(1024.0, model="llama-3.1-8b", hardware=cpu, selector={"stages": ("update",)}))
    assert error.value.nearest is not None
    assert not error.value.nearest.candidate.offload_optimizer
