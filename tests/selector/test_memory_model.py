"""Memory formulas against figures computed by hand, and their calibration."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from earl_core.config.rollout import VllmConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.activations import (
    layer_activation_bytes,
    standard_activation_bytes,
)
from earl_core.selector.model.calibration import Calibration, Peak
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.cpu import CpuMemoryModel
from earl_core.selector.model.devices import cluster
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.memory_model import (
    MemoryModel,
    kv_bytes_per_token,
)
from earl_core.selector.model.sizes import logits_chunk, positions_at_a_time

GIB = 2**30
CPU = Hardware(cpu_cores=2, memory_bytes=24 * GIB)
QWEN, LLAMA, SMOL = (MODELS[name] for name in ("qwen2.5-72b", "llama-3.1-8b", "smollm2-135m"))


def on_gpu(shape: ModelShape) -> MemoryModel:
    model = memory_model(shape, cluster("h100-80gb", 1, 8))
    assert type(model) is MemoryModel
    return model


def on_cpu(shape: ModelShape) -> MemoryModel:
    model = memory_model(shape, CPU)
    assert type(model) is CpuMemoryModel
    return model


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("qwen2.5-7b", 7.62, 56.0),
        ("qwen2.5-72b", 72.7, 320.0),
        ("llama-3.1-8b", 8.03, 128.0),
        ("llama-3.1-70b", 70.6, 320.0),
        ("smollm2-135m", 0.1345, 22.5),
    ],
)
def test_sizes_are_the_published_ones(name: str, billions: float, kv_kib: float) -> None:
    shape = MODELS[name]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.kv_bytes_per_token() / 1024 == kv_kib


def test_the_papers_batches_follow_from_the_standard_formula_for_the_8b_shape_only() -> None:
    assert standard_activation_bytes(LLAMA, 4096) / GIB == pytest.approx(97.0, abs=0.01)
    assert standard_activation_bytes(LLAMA, 8192) / GIB == pytest.approx(354.0, abs=0.01)
    for name, shape in MODELS.items():
        # Mistral 7B has the same width and depth.
        if name != "llama-3.1-8b" and (shape.hidden_size, shape.layers) != (4096, 32):
            assert abs(standard_activation_bytes(shape, 4096) / GIB - 97.0) > 1


def test_one_layer_by_hand() -> None:
    # Norms: input in float32, normalised input and output in bf16; query and output 2 x 2 x 4096,
    # key and value 2 x 2 x 1024, log-sums 4 x 32; four products of 14336 in bf16.
    norms, rest = 2 * (4 + 2 + 2) * 4096, 4 * 4096 + 4 * 1024 + 128 + 8 * 14336
    assert layer_activation_bytes(LLAMA) == norms + rest == 200832
    # Tensor ranks read the norms' outputs whole.
    whole = 2 * 2 * 4096
    assert layer_activation_bytes(LLAMA, tensor=4) == whole + (norms - whole + rest) / 4
    plain = 24 * 4096 + 8 * 4096 + 8 * 1024 + 128 + 16 * 14336
    assert layer_activation_bytes(LLAMA, mixed=False) == plain


def test_update_by_hand() -> None:
    plain = on_gpu(LLAMA).training(
        StageDeployment("update", max_tokens_per_microbatch=8192), 4096, TrainingNeeds()
    )
    count, table = LLAMA.parameters, 128256 * 4096
    # The most is held in the head's backward pass: its copy, and its gradient in float32.
    assert plain.weights == 4 * count + 2 * table
    assert (plain.gradients, plain.optimizer) == (4 * count + 4 * table, 8 * count)
    # All layers and the last norm; gradients of the states in float32.
    assert plain.activations == 8192 * (32 * 200832 + 8 * 4096 + 4 * 4096)
    # A GPU computes at most 2**28 logits at a time: here in four equal chunks.
    assert plain.logits == 2048 * 128256 * 8
    # A sample is never cut: a longer one than the budget makes the microbatch longer.
    longer = on_gpu(LLAMA).training(
        StageDeployment("update", max_tokens_per_microbatch=8192), 16384, TrainingNeeds()
    )
    assert longer.activations == 2 * plain.activations
    mesh = StageDeployment("update", 1, 2, 4, 8, max_tokens_per_microbatch=8192)
    split = on_gpu(LLAMA).training(mesh, 4096, TrainingNeeds())
    # Tensor, context and shard ranks all hold parts of the parameters.
    assert split.optimizer == plain.optimizer / (2 * 4 * 8)
    assert split.logits == 2048 * 64128 * 8
    lean = mesh._replace(
        activation_checkpointing="full", logits_chunk_tokens=32, offload_optimizer=True
    )
    least = on_gpu(LLAMA).training(lean, 4096, TrainingNeeds())
    assert least.optimizer == 0
    # Between layers stands the residual stream. The few logits matter less than that the head's
    # gradient is there in bf16 too, as its backward pass ends.
    assert least.activations == 2048 * (32 * 2 * 4096 / 2 + (6 / 2 + 2) * 4096 + 2 * 4096)
    assert least.logits == 32 * 64128 * 4
    assert least.gradients == 4 * count / 64 + (4 + 2) * table / 2
    # One that only scores has neither gradients nor moments.
    scoring = on_gpu(LLAMA).scoring(mesh, 4096, TrainingNeeds())
    assert (scoring.gradients, scoring.optimizer) == (0, 0)
    assert scoring.total < split.total / 2


def test_update_on_a_cpu_by_hand() -> None:
    """SmolLM2-135M, the tensors that autograd keeps of one layer, counted one by one."""
    layout = StageDeployment("update", max_tokens_per_microbatch=2048)
    model = on_cpu(SMOL)
    long = 16 * 576 + 2 * 2 * (576 + 192) + 4 * 9 + 4 * 2 * 1536
    assert model.layer_bytes(layout, 1000, mixed=True) == long
    # Up to 128 tokens the scores are kept.
    assert model.layer_bytes(layout, 100, mixed=True) == long + 4 * 9 * 100
    memory = model.training(layout, 1000, TrainingNeeds())
    assert (memory.weights, memory.optimizer) == (
        4 * SMOL.parameters + 2 * SMOL.embedding_parameters,
        8 * SMOL.parameters,
    )
    # A model that only scores is held in float32 as well.
    scoring = model.scoring(layout._replace(stage="reference"), 1000, TrainingNeeds())
    assert scoring.weights == memory.weights
    assert scoring.total < memory.total / 2


def test_a_chunk_of_logits_is_an_eighth_of_what_is_usual() -> None:
    for shape, gpu in itertools.product(MODELS.values(), (False, True)):
        usual = positions_at_a_time(shape.vocabulary, gpu=gpu)
        assert usual // 16 <= logits_chunk(shape.vocabulary, gpu=gpu) <= usual / 8
        assert (usual >= 2048) == gpu


def test_torch_engine_by_hand() -> None:
    memory = on_cpu(SMOL).torch_engine(64, 1000, 4)
    assert memory.weights == 4 * SMOL.parameters
    # A row as wide as the longest for each sequence, and half as much again.
    assert memory.kv_cache == 1.5 * 64 * 1000 * 2 * SMOL.kv_bytes_per_token()
    assert on_cpu(SMOL).torch_engine(64, 1000, 2).kv_cache == memory.kv_cache / 2
    assert kv_bytes_per_token(SMOL, 1, 4) == 2 * kv_bytes_per_token(SMOL, 1)


def test_engine_by_hand() -> None:
    """Qwen2.5-72B at TP 4 with 90 % of 80 GB: 288 GiB less 135.4 of weights and workspace hold some
    450K tokens of 320 KiB, which is where the paper's grid changes its sign."""
    layout = StageDeployment("rollout", 1, 4, max_running_requests=128)
    memory = on_gpu(QWEN).vllm(layout, VllmConfig(gpu_memory_utilization=0.9))
    assert memory.weights == 2 * QWEN.parameters / 4
    assert memory.total == pytest.approx(0.9 * 80 * GIB)
    assert kv_bytes_per_token(QWEN, 4) == 80 * 1024
    assert 262_144 < memory.kv_cache / 81920 < 524_288
    # More ranks than key-value heads hold copies.
    assert kv_bytes_per_token(QWEN, 16) == kv_bytes_per_token(QWEN, 8)
    too_small = on_gpu(QWEN).vllm(
        StageDeployment("rollout"), VllmConfig(gpu_memory_utilization=0.9)
    )
    assert too_small.kv_cache == 0


def test_vllm_on_a_cpu_has_three_processes_and_a_whole_cache() -> None:
    """SmolLM2 in bf16 with 1 GiB of cache: 865, 789 and 2,384 MB were measured after the start."""
    one = VllmConfig(kv_cache_gib=1)
    layout = StageDeployment("rollout", threads=2, max_running_requests=256)
    memory = on_cpu(SMOL).vllm(layout, one)
    resting = memory._replace(activations=0.0, logits=0.0).total
    assert resting == pytest.approx(4037e6, rel=0.05)
    # Each rank has its own cache; the engine's other processes are there once.
    two = on_cpu(SMOL).vllm(layout._replace(tensor_parallel=2), one)
    assert 2 * two.kv_cache == 2 * GIB
    assert memory.runtime < 2 * two.runtime < 2 * memory.runtime


def test_a_shape_is_read_from_a_config() -> None:
    raw = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    found = ModelShape.from_config(raw)
    assert found.parameters == MODELS["smollm2-135m"].parameters
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        ModelShape.from_config({**raw, "num_experts": 8})
    with pytest.raises(ValueError, match="9 experts of only 8"):
        ModelShape.from_config({**raw, "num_experts": 8, "num_experts_per_tok": 9})
    with pytest.raises(ValueError, match="vocab_size"):
        ModelShape.from_config({k: v for k, v in raw.items() if k != "vocab_size"})


def test_calibration_predicts_held_out_peaks() -> None:
    """A process that takes 700 MB more and 1.3 times what the formula says, measured with 3 %
    noise: the formula errs by far more than 10 %, what is learnt from some sizes by less."""
    rng = random.Random(3)

    def truth(predicted: float) -> float:
        return (0.7e9 + 1.3 * predicted) * rng.uniform(0.97, 1.03)

    calibration = Calibration()
    for predicted in (1e9, 2e9, 3e9, 5e9):
        peak = Peak(stage="update", predicted=predicted, measured=truth(predicted))
        calibration = Calibration(peaks=(*calibration.peaks, peak))
    for held_out in (1.5e9, 4e9, 8e9):
        real = truth(held_out)
        assert abs(held_out - real) / real > 0.2
        assert abs(calibration.correct("update", held_out) - real) / real < 0.1
    assert calibration.correct("rollout", 1e9) == 1e9


TINY = ModelShape(
    model_type="llama",
    hidden_size=192,
    layers=4,
    attention_heads=4,
    key_value_heads=4,
    intermediate_size=512,
    head_dim=48,
    vocabulary=19,
    max_positions=4096,
    tied_embeddings=True,
)
BUDGETS = (1024, 3072, 8192)
MEASURED = {
    ("bf16", False, 100): ((403, 549, 941), (337, 367, 437)),
    ("bf16", False, 1000): ((393, 511, 822), (342, 367, 403)),
    ("bf16", True, 100): ((365, 439, 602), (334, 370, 459)),
    ("bf16", True, 1000): ((368, 425, 564), (342, 362, 396)),
    ("fp32", False, 100): ((451, 715, 1356), (342, 391, 534)),
    ("fp32", False, 1000): ((443, 677, 1247), (331, 393, 453)),
    ("fp32", True, 100): ((393, 523, 914), (333, 382, 497)),
    ("fp32", True, 1000): ((386, 514, 881), (338, 382, 509)),
}
"""Peaks of the demo's tic-tac-toe model on a CPU, private megabytes (10**6), measured in a process
for each: (precision, checkpointing, tokens of a sample) to those of updates and of scorings at the
three token budgets. Of short samples 36 % of the tokens were trained, of long ones 49 %."""


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_formula_alone_comes_near_a_small_models_peaks(case: tuple[str, bool, int]) -> None:
    precision, checkpointing, length = case
    needs = TrainingNeeds(precision == "bf16", answered=0.36 if length == 100 else 0.49)
    for budget, update, score in zip(BUDGETS, *MEASURED[case], strict=True):
        layout = StageDeployment(
            "update",
            max_tokens_per_microbatch=budget // length * length,
            activation_checkpointing="full" if checkpointing else "none",
        )
        found = on_cpu(TINY).training(layout, length, needs).total
        assert found == pytest.approx(1e6 * update, rel=0.12)
        # These learners held an optimizer's state besides.
        found = on_cpu(TINY).scoring(layout, length, needs).total + 8 * TINY.parameters
        assert found == pytest.approx(1e6 * score, rel=0.12)


@pytest.mark.parametrize(
    ("checkpointing", "budget", "update", "score"),
    [
        (False, 256, 3110, 2101),
        (False, 768, 3719, 2154),
        (True, 256, 2927, 2059),
        (True, 1024, 3133, 2228),
        (True, 2048, 3277, 2287),
    ],
)
def test_the_formula_alone_comes_near_a_large_vocabularys_peaks(
    checkpointing: bool, budget: int, update: int, score: int
) -> None:
    """SmolLM2-135M in bf16, samples of 256 tokens; megabytes measured likewise."""
    needs = TrainingNeeds(mixed=True, answered=0.5)
    layout = StageDeployment(
        "update",
        max_tokens_per_microbatch=budget,
        activation_checkpointing="full" if checkpointing else "none",
    )
    assert on_cpu(SMOL).training(layout, 256, needs).total == pytest.approx(1e6 * update, rel=0.05)
    scoring = on_cpu(SMOL).scoring(layout, 256, needs).total + 8 * SMOL.parameters
    assert scoring == pytest.approx(1e6 * score, rel=0.05)


@pytest.mark.parametrize(
    ("model", "sequences", "longest", "measured"),
    [
        ("tiny", 16, 120, 638),
        ("tiny", 128, 220, 857),
        ("tiny", 64, 820, 944),
        ("tiny", 128, 1610, 1705),
        ("smol", 8, 110, 934),
        ("smol", 32, 310, 1461),
        ("smol", 16, 1006, 1729),
    ],
)
def test_the_formula_alone_comes_near_the_torch_engines_peaks(
    model: str, sequences: int, longest: int, measured: int
) -> None:
    shape = {"tiny": TINY, "smol": SMOL}[model]
    memory = on_cpu(shape).torch_engine(sequences, longest, 2)
    assert memory.total == pytest.approx(1e6 * measured, rel=0.1)


def test_one_size_gives_a_factor() -> None:
    peaks = tuple(Peak(stage="update", predicted=2e9, measured=3e9) for _ in range(3))
    assert Calibration(peaks=peaks).correct("update", 4e9) == pytest.approx(6e9)


positive = st.floats(1e6, 1e12)
peaks_of_update = st.builds(
    Peak,
    stage=st.just("update"),
    predicted=positive,
    measured=positive,
    out_of_memory=st.booleans(),
)


@examples(st.lists(peaks_of_update, max_size=8), positive, positive)
def test_calibration_keeps_the_order_of_sizes(peaks: list[Peak], one: float, other: float) -> None:
    correct = Calibration(peaks=tuple(peaks)).corrector("update")
    low, high = sorted((one, other))
    assert correct(low) <= correct(high) * (1 + 1e-12)


@examples(st.lists(peaks_of_update, max_size=4), positive, positive)
def test_what_ran_out_of_memory_is_predicted_over_the_budget(
    peaks: list[Peak], predicted: float, budget: float
) -> None:
    failed = Peak(stage="update", predicted=predicted, measured=budget, out_of_memory=True)
    learnt = Calibration(peaks=(*peaks, failed))
    assert learnt.correct("update", predicted) > budget
    assert learnt.correct("update", 2 * predicted) > budget
