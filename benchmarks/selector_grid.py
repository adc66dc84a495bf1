"""The grid that the EARL paper printed (arXiv 2510.05943), as numbers and as a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from earl_core.config.rollout import RolloutConfig, VllmConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
RESPONSES = (8, 16, 32, 64, 128)
SPEEDUP: tuple[tuple[float | None, ...], ...] = (
    (-21.1, -32.2, -30.7, -29.1, -6.9),
    (-20.0, -28.6, -26.3, -16.6, -5.5),
    (-18.0, -25.2, -21.9, -5.9, +5.1),
    (-24.7, -20.8, -4.4, +6.4, +5.2),
    (-18.8, -5.0, +3.4, +5.5, +3.1),
    (-1.5, +4.6, +5.0, +6.5, None),
)
"""Per cent from TP 4 to TP 8 in tokens per GPU and second; rows: contexts; columns: responses of
one engine. None: TP 4 ran out of memory."""

UNCERTAIN = (32768, 8)
"""Its sign is hard to read in the paper."""

MODEL, HARDWARE = MODELS["qwen2.5-72b"], cluster("h100-80gb", 1, 8)
ENGINE_SHARE = RolloutConfig.model_fields["vllm"].default.gpu_memory_utilization
SMALL, LARGE = 4, 8

Place = tuple[int, int]
Excluded = Callable[[ProfilePoint], bool]


def cells() -> Iterator[tuple[Place, float | None]]:
    """Every cell of the grid."""
    for context, line in zip(CONTEXTS, SPEEDUP, strict=True):
        for responses, value in zip(RESPONSES, line, strict=True):
            yield (context, responses), value


def certain() -> dict[Place, float]:
    """The cells whose sign counts."""
    return {place: v for place, v in cells() if v is not None and place != UNCERTAIN}


def selection(
    context: float,
    responses: int,
    profile: ProfileTable,
    *,
    policy: str = "live_tokens",
    engine_share: float = ENGINE_SHARE,
) -> SelectionInput:
    """A rollout on eight GPUs, many rounds of `responses` sequences in each engine."""
    return SelectionInput(
        iteration=0,
        rollout=RolloutConfig(
            prompts_per_iteration=64 * responses,
            group_size=1,
            max_turns=1,
            max_model_len=40960,
            max_running_requests=responses,
            vllm=VllmConfig(gpu_memory_utilization=engine_share),
        ),
        update=UpdateConfig(),
        needs_reference=False,
        hardware=HARDWARE,
        model=MODEL,
        statistics=Statistics(
            context_mean=(context,), context_max=(context,), generated_share=(1.0,)
        ),
        profile=profile,
        selector=SelectorConfig(
            policy=policy,
            stages=("rollout",),
            tensor_parallel=(SMALL, LARGE),
            fixed_fields=("rollout.max_running_requests",),
            switch_seconds=0.0,
        ),
    )


def layout(tensor: int, responses: int) -> StageDeployment:
    """The rollout of eight GPUs at this degree."""
    return StageDeployment("rollout", 8 // tensor, tensor, max_running_requests=responses)


def measured(leave_out: Excluded = lambda point: False) -> ProfileTable:
    """The grid as a profile.

    The paper prints ratios only: TP 4 gets the roofline's rate, TP 8 that times the ratio. The
    uncertain cell stays out; the cell without memory is an out-of-memory of TP 4.
    """
    guess = Predictor(selection(1024.0, 8, ProfileTable()))
    points = []
    for (context, responses), value in cells():
        place = {"context": float(context), "requests": float(responses)}
        small, large = layout(SMALL, responses), layout(LARGE, responses)
        if value is None:
            points.append(ProfilePoint(key=key_of(small), out_of_memory=True, **place))
        elif (context, responses) != UNCERTAIN:
            rate, _ = guess.rate(small, context, responses)
            faster = rate * 2 * (1 + value / 100)
            points.append(ProfilePoint(key=key_of(small), tokens_per_second=rate, **place))
            points.append(ProfilePoint(key=key_of(large), tokens_per_second=faster, **place))
    return ProfileTable(points=tuple(each for each in points if not leave_out(each)))
