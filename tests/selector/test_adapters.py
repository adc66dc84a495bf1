"""Adapters in the selector's formulas and plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

from earl_core.config import parse_config
from earl_core.control.machine_profile import fingerprint_of
from earl_core.control.shared_memory_need import need_of
from earl_core.deployment.shapes import AdapterShape, ModelShape
from earl_core.deployment.stage_deployment import CHECKPOINTING, StageDeployment
from earl_core.selector.choice.explain import PlannedLoad, ask
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.activations import pair_bytes
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster, device_of
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.roofline import Load, Roofline
from flows.cli.app import app
from tests.selector.examples import given

GIB = 2**30
RANK_16 = AdapterShape(rank=16)
QWEN = MODELS["qwen2.5-7b"]
HARDWARE = cluster("h100-80gb", 1, 8)


def test_pairs_by_hand() -> None:
    attention = 2 * (3584 + 3584) + 2 * (3584 + 512)
    layer = 16 * (attention + 3 * (3584 + 18944))
    shape = QWEN.with_adapter(RANK_16)
    assert shape.pair_parameters() == layer
    assert shape.trained_parameters == 28 * layer
    assert shape.parameters == QWEN.parameters == QWEN.trained_parameters
    # Of query, key, value, gate and up the outputs are cut, of the other two the inputs.
    cut = (3584 + 2 * 512 + 2 * 18944) + 3584 + 18944
    assert shape.pair_parameters(tensor=4) == layer - 16 * cut * 3 / 4
    named = AdapterShape(rank=8, targets=("self_attn.q_proj", "v_proj"))
    some = QWEN.with_adapter(named).pair_parameters()
    assert some == 8 * (3584 + 3584 + 3584 + 512)
    # Several matrices in one have a name of their own: rather too much memory than too little.
    fused = QWEN.with_adapter(AdapterShape(rank=16, targets=("qkv_proj",)))
    assert fused.trained_parameters == shape.trained_parameters
    assert shape.with_adapter(None) == QWEN


def test_an_updates_state_by_hand() -> None:
    shape = QWEN.with_adapter(RANK_16)
    mesh = StageDeployment("update", shard=4, max_tokens_per_microbatch=8192)
    state = memory_model(shape, HARDWARE).state(mesh, mixed=True)
    base, pairs = QWEN.parameters / 4, shape.trained_parameters / 4
    assert state.weights == pytest.approx(2 * base + 4 * pairs)
    assert (state.gradients, state.optimizer) == (4 * pairs, 8 * pairs)
    exact = memory_model(shape, HARDWARE).state(mesh, mixed=False)
    assert exact.weights == pytest.approx(4 * (base + pairs))
    offloaded = mesh._replace(offload_optimizer=True)
    assert memory_model(shape, HARDWARE).state(offloaded, mixed=True).optimizer == 0
    # The ranks that score without the pairs are the update's.
    scoring = memory_model(shape, HARDWARE).scoring(mesh, 4096, TrainingNeeds())
    assert scoring.optimizer == state.optimizer
    # Engines hold the model once, and the pairs of two versions.
    engine = memory_model(shape, HARDWARE).engine_weights(2, 2)
    assert engine == QWEN.parameters + 2 * 2 * 28 * shape.pair_parameters(2)


deployments = st.builds(
    StageDeployment,
    st.just("update"),
    tensor_parallel=st.sampled_from((1, 2, 4, 8)),
    context_parallel=st.sampled_from((1, 2)),
    shard=st.sampled_from((1, 2, 8, 64)),
    max_tokens_per_microbatch=st.sampled_from((1024, 8192, 65536)),
    activation_checkpointing=st.sampled_from(CHECKPOINTING),
    logits_chunk_tokens=st.sampled_from((0, 512)),
    offload_optimizer=st.booleans(),
    expert_parallel=st.just(1),
)


@examples(
    st.sampled_from(sorted(MODELS)),
    deployments,
    st.sampled_from((1, 16, 64)),
    st.booleans(),
    st.booleans(),
)
def test_an_adapter_takes_no_more_memory_than_full_training(
    name: str, mesh: StageDeployment, rank: int, mixed: bool, compiled: bool
) -> None:
    """At an equal deployment, but for what the pairs themselves keep of each token."""
    shape = MODELS[name].with_adapter(AdapterShape(rank=rank))
    needs = TrainingNeeds(mixed=mixed, compiled=compiled)
    full, lean = (
        memory_model(each, HARDWARE).training(mesh, 0, needs) for each in (MODELS[name], shape)
    )
    assert lean.weights + lean.gradients + lean.optimizer <= (
        full.weights + full.gradients + full.optimizer
    )
    value = 2 if mixed else 4
    tokens = mesh.max_tokens_per_microbatch / mesh.context_parallel
    own = shape.layers * pair_bytes(shape, mixed)
    own += value * shape.feed_forward / mesh.tensor_parallel if compiled else 0
    assert lean.total <= full.total + tokens * own
    if rank <= 16 and not compiled and mesh.activation_checkpointing != "selective":
        assert lean.total <= full.total


def question(
    model: str, gpus: int, adapter: AdapterShape | None = RANK_16, **load: bool
) -> SelectionInput:
    asked = PlannedLoad(16384, 128, **load)
    return ask(MODELS[model].with_adapter(adapter), cluster("h100-80gb", 1, gpus), asked)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [("qwen2.5-7b", 1), ("qwen2.5-14b", 1), ("qwen2.5-32b", 4), ("qwen2.5-72b", 8)],
)
def test_models_that_full_training_has_no_room_for_are_offered(model: str, gpus: int) -> None:
    wanted = question(model, gpus, reference=True)
    plan = select(wanted)
    update, reference = plan["update"], plan["reference"]
    assert plan.predictions["update"].peak_bytes < plan.predictions["update"].budget_bytes
    assert update.max_tokens_per_microbatch >= 16384
    assert not update.offload_optimizer
    assert "an adapter of rank 16 trains" in plan.reasons["update"]
    # No second model is held, and the ranks are not laid out twice.
    assert reference == update._replace(stage="reference")
    assert "no second model" in plan.reasons["reference"]
    assert Predictor(wanted).budget("reference") == Predictor(wanted).budget("update")


@pytest.mark.parametrize(("model", "gpus"), [("qwen2.5-14b", 1), ("qwen2.5-72b", 8)])
def test_full_training_of_some_of_them_fits_nowhere(model: str, gpus: int) -> None:
    with pytest.raises(NoFeasiblePlan):
        select(question(model, gpus, adapter=None))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-8b", "qwen3-14b"])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_where_full_training_fits_an_adapter_fits(name: str, gpus: int) -> None:
    try:
        full = select(question(name, gpus, adapter=None))
    except NoFeasiblePlan:
        return
    plan = select(question(name, gpus))
    seconds = [each.predictions["update"].seconds for each in (full, plan)]
    # Of a small one the pairs' passes over memory cost what the model's gradients would.
    assert seconds[1] < (1.0 if MODELS[name].parameters > 5e9 else 1.2) * seconds[0]


def test_the_work_and_what_is_sent_by_hand() -> None:
    shape = QWEN.with_adapter(RANK_16)
    device = device_of(HARDWARE)
    line = Roofline(shape, device, HARDWARE)
    load = Load(episodes=64, context=4096, longest=4096, generated=2048)
    alone = StageDeployment("update", 8, max_tokens_per_microbatch=4096)
    tokens, pairs = 8 * 4096, float(shape.trained_parameters)
    attention = 2 * QWEN.layers * QWEN.query_size * 4096
    # A frozen matrix has no gradient: two passes of work instead of three.
    work = tokens * (2 * 2 * QWEN.parameters + 3 * (2 * pairs + attention)) / device.flops
    sides = sum(each.inputs + 2 * each.outputs for each in QWEN.matrices.values())
    read = 3 * tokens * QWEN.layers * 2 * sides / device.memory_bandwidth
    added = 12 * 8 * pairs / device.memory_bandwidth
    found = line.training_seconds(alone, load, 1, 0)
    assert found == pytest.approx(work + read + added, rel=1e-6)
    shards = StageDeployment("update", shard=8, max_tokens_per_microbatch=64)
    short = Load(episodes=64, context=64, longest=64, generated=32)
    exact = line.training_seconds(shards, short, 1, 0, value=4)
    sent = (QWEN.parameters + pairs) * 7 / 8 / line.group_bandwidth(8, 1)
    # Only the pairs have gradients, and in float32 the model's numbers are twice as wide.
    assert exact - line.training_seconds(shards, short, 1, 0) == pytest.approx(
        8 * 4 * sent, rel=0.02
    )
    full = Roofline(QWEN, device, HARDWARE)
    engines = StageDeployment("rollout", 8)
    ratio = line.republish_seconds(shards, engines) / full.republish_seconds(shards, engines)
    assert ratio == pytest.approx(pairs / QWEN.parameters)


def test_the_host_must_hold_the_models_of_sleeping_engines() -> None:
    shape, host = QWEN.with_adapter(RANK_16), cluster("h100-80gb", 1, 8)
    # Eight engines' models, and the update's one with its pairs' moments.
    least = 9 * 2 * QWEN.parameters / 0.9

    def problems(memory: float) -> list[str]:
        small = host.model_copy(update={"memory_bytes": int(memory)})
        predictor = Predictor(given(hardware=small).model_copy(update={"model": shape}))
        mesh = StageDeployment(
            "update",
            shard=8,
            max_tokens_per_microbatch=16384,
            activation_checkpointing="full",
        )
        return [predictor.predict(mesh, predictor.now).problem]

    assert problems(1.1 * least) == [""]
    assert "of a host's" in problems(0.95 * least)[0]


def run_file(directory: Path, **model: object) -> dict[str, object]:
    return {
        "name": "run",
        "iterations": 1,
        "model": {"path": str(directory), **model},
        "environment": {"name": "tic_tac_toe"},
        "rollout": {
            "prompts_per_iteration": 2,
            "group_size": 2,
            "max_turns": 1,
            "dtype": "bfloat16",
        },
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    files = {
        f"model.layers.{layer}.block.{name}.weight": np.zeros((each.outputs, each.inputs), "f4")
        for layer in range(2)
        for name, each in ModelShape.from_config(raw).matrices.items()
    }
    save_file(files, tmp_path / "model.safetensors")
    return tmp_path


def test_a_runs_input_published_bytes_and_profile_know_its_adapter(directory: Path) -> None:
    shape = ModelShape.from_config(json.loads((directory / "config.json").read_text()))
    plain = parse_config(run_file(directory))
    lean = parse_config(run_file(directory, adapter={"rank": 4, "targets": ["q_proj", "v_proj"]}))
    assert SelectionInput.of(plain, HARDWARE, shape).model == shape
    seen = SelectionInput.of(lean, HARDWARE, shape)
    assert seen.model.trained_parameters == 2 * 2 * 4 * 128
    assert SelectionInput.model_validate_json(seen.model_dump_json()) == seen
    # By the headers of the model's files.
    assert need_of(lean).version == 2 * seen.model.trained_parameters
    whole = parse_config(run_file(directory, adapter={"rank": 4}))
    trained = SelectionInput.of(whole, HARDWARE, shape).model.trained_parameters
    assert need_of(whole).version == 2 * trained < need_of(plain).version / 4
    other = parse_config(run_file(directory, adapter={"rank": 8, "targets": ["q_proj", "v_proj"]}))
    marks = {fingerprint_of(each, HARDWARE, shape) for each in (plain, lean, other)}
    assert len(marks) == 3


MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_earl_plan_offers_adapters_and_says_why(directory: Path) -> None:
    asked = ("--model", "qwen2.5-7b", "--hardware", "1xh100", "--context", "16K", "--adapter", "16")
    code, text = run(*asked, "--explain", "--reference")
    assert code == 0, text
    assert "40.4 M parameters are trained and published, and the model itself is frozen" in text
    assert "so that the state of all ranks takes 14.8 GiB instead of 113.5 GiB" in text
    (found,) = json.loads(run(*asked, "--json")[1])
    assert found["assumed"]["adapter"] == 16
    assert found["shared_memory_bytes"] < 2 * GIB
    code, text = run("--hardware", "4xh100", "--context", "16K", "--adapter", "16")
    assert code == 0, text
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **MIXTURE}))
    code, text = run("--model", str(directory), "--adapter", "16")
    assert code == 2
    assert "a mixture of 8 experts" in text
