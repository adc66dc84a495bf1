"""Observations that a run makes of its own stages, and the selector's conclusions. Pure functions.

A run keeps its observations in `RUN/selector.jsonl`. Rates mean what `ProfilePoint` and
`Predictor.rate` mean by them, so that observed and predicted are the same quantity: `decode_rate`
and `training_rate` take a stage's seconds apart as the roofline puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from earl_core.deployment.plan import Forbidden
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE
from earl_core.selector.model.calibration import Calibration, Peak
from earl_core.selector.model.candidates import candidate_of
from earl_core.selector.model.roofline import Load, Roofline
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of
from earl_core.system.settings import Settings

Kind = Literal["measured", "out_of_memory", "context_overflow", "switched", "resharded"]

INFEASIBLE = ("out_of_memory", "context_overflow")
"""Kinds that end a stage, which is then repeated under another stage deployment."""

_PEAKS = 32
"""Measured peaks of a stage that calibrate its memory formula: the newest."""

_FAILED_PEAKS = 16

_AS_MUCH = 0.8
"""Share of the bytes that the formula said at a failure: a load with less is another load."""

_LEAST_DECODING = 0.25
"""Share of a rollout's seconds that count as decoding at the least: what the roofline guesses for
reading prompts may be more than the rollout took."""


class Observation(Settings):
    """One thing seen of a stage under one stage deployment; `switched`: its processes were
    started, `resharded`: those that ran exchanged their state.

    context, longest: mean tokens of an episode, and of the longest (of `context_overflow`: the
    tokens that the engine had no room for). requests: episodes offered to one engine, or samples
    that a training stage computed. tokens_per_second: as `ProfilePoint` has it. seconds: of the
    stage's work, or of the switch. peak_bytes: of one device or rank; of `out_of_memory`: what was
    not enough. formula_bytes: what the uncalibrated memory formula said for the same.
    reserved_bytes: of the host or of a GPU, what others held.
    """

    iteration: int = Field(ge=0)
    stage: str = Field(pattern=f"^({'|'.join(SELECTABLE)})$")
    kind: Kind
    deployment: StageDeployment
    context: float = Field(default=0.0, ge=0)
    longest: float = Field(default=0.0, ge=0)
    requests: float = Field(default=0.0, ge=0)
    tokens_per_second: float = Field(default=0.0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    peak_bytes: float = Field(default=0.0, ge=0)
    formula_bytes: float = Field(default=0.0, ge=0)
    reserved_bytes: float = Field(default=0.0, ge=0)
    answered: bool = Field(
        default=True,
        description="True where the iteration's choice is made again for an infeasible stage. "
        "It is not under `fixed`, nor where the other engines went on without the one that was "
        "lost.",
    )


def attempts_of(observations: Iterable[Observation], iteration: int) -> int:
    """Count the times that the iteration's choice had to be made again."""
    return sum(
        seen.kind in INFEASIBLE and seen.answered and seen.iteration == iteration
        for seen in observations
    )


def calibration_of(observations: Sequence[Observation]) -> Calibration:
    """Measured peaks beside what the formula said, the newest of each stage. A failure counts no
    more once as much by the formula has worked."""
    peaks: list[Peak] = []
    for stage in SELECTABLE:
        mine = [seen for seen in observations if seen.stage == stage and seen.formula_bytes > 0]
        measured = [_peak(seen) for seen in mine if seen.kind == "measured" and seen.peak_bytes > 0]
        failed = [
            _peak(seen)
            for place, seen in enumerate(mine)
            if seen.kind == "out_of_memory" and seen.peak_bytes > 0
            and not any(_refutes(later, seen) for later in mine[place + 1 :])
        ]  # fmt: skip
        peaks += measured[-_PEAKS:] + failed[-_FAILED_PEAKS:]
    return Calibration(peaks=tuple(peaks))


def _peak(seen: Observation) -> Peak:
    return Peak(
        stage=seen.stage,
        predicted=seen.formula_bytes,
        measured=seen.peak_bytes,
        out_of_memory=seen.kind == "out_of_memory",
    )


def _refutes(later: Observation, failed: Observation) -> bool:
    if later.stage != failed.stage or failed.formula_bytes <= 0:
        return False
    return later.kind == "measured" and later.formula_bytes >= failed.formula_bytes


def forbidden_of(observations: Sequence[Observation], iteration: int) -> tuple[Forbidden, ...]:
    """Stage deployments that ran out of memory, each once, as they are to be seen in `iteration`.

    In the iteration in which it failed one is forbidden whatever its load. Later it is forbidden
    while the formula says about as much as it said then, and no more at all once as much by the
    formula has worked.
    """
    found: dict[StageDeployment, Forbidden] = {}
    for place, seen in enumerate(observations):
        if seen.kind != "out_of_memory":
            continue
        beyond = 0.0
        if seen.iteration < iteration:
            if any(_refutes(later, seen) for later in observations[place + 1 :]):
                continue
            beyond = _AS_MUCH * seen.formula_bytes
        known = found.get(seen.deployment)
        if known is None or beyond < known.beyond_bytes:
            found[seen.deployment] = Forbidden(deployment=seen.deployment, beyond_bytes=beyond)
    return tuple(found.values())


def seconds_of(observations: Iterable[Observation], kind: Kind) -> dict[str, float]:
    """Return the seconds of this kind in each stage, as last measured."""
    return {seen.stage: seen.seconds for seen in observations if seen.kind == kind}


def overflow_tokens(observations: Iterable[Observation]) -> float:
    """The most tokens that an engine was built too small for; 0 when none was."""
    return max(
        (seen.longest for seen in observations if seen.kind == "context_overflow"), default=0.0
    )


def refined(
    profile: ProfileTable,
    observations: Iterable[Observation],
    half_life: float,
    hardware: Hardware,
    divided: bool = False,
) -> ProfileTable:
    """The profile with what the run measured itself. half_life: in iterations. divided: training
    may have had a part of the devices."""
    devices = hardware.devices if divided else 0
    for seen in observations:
        if seen.kind == "measured" and seen.tokens_per_second > 0 and seen.context > 0:
            point = ProfilePoint(
                key=key_of(candidate_of(seen.deployment, hardware), devices),
                context=seen.context,
                requests=max(1.0, seen.requests),
                tokens_per_second=seen.tokens_per_second,
                peak_bytes=seen.peak_bytes,
                iteration=seen.iteration,
            )
            profile = profile.observe(point, half_life)
    return profile


def decode_rate(roofline: Roofline, rollout: StageDeployment, load: Load, seconds: float) -> float:
    """tokens/s of one engine while it decodes, from the seconds of a whole rollout.

    `Roofline.rollout_seconds` adds reading prompts and waiting for environments to the decoding:
    both are taken off here by the same terms, so that with this rate it gives the seconds again.
    """
    share = load.episodes / rollout.replicas
    # With an endless rate what is left is reading and waiting.
    other = roofline.rollout_seconds(rollout, load, float("inf"))
    return share * load.generated / max(seconds - other, _LEAST_DECODING * seconds, 1e-9)


def training_rate(load: Load, seconds: float) -> float:
    """tokens/s of a training stage: each sample counts once, however many epochs there are."""
    return load.episodes * load.context / max(seconds, 1e-9)
