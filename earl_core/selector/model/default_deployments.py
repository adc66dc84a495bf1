"""The stage deployments on GPUs of a stage that the run file leaves open: over all of them.

Rules instead of a search, so that a run under the policy `fixed` is what one would write by hand.
"""

from __future__ import annotations

import math
from itertools import chain

from earl_core.config.feasibility import tensor_problem
from earl_core.config.rollout import RolloutConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.memory_model import kv_bytes_per_token
from earl_core.selector.model.sizes import divisors, powers

_FAIR_CACHE = 0.2
"""Share of an engine's memory that its cache must have: with less, sequences queue for it."""
_TRAINING_SHARE = 0.9


def usual_engines(
    shape: ModelShape, hardware: Hardware, rollout: RolloutConfig, devices: int
) -> StageDeployment:
    """Lay out as many engines as so many GPUs of all hosts hold, none without a prompt, each on the
    fewest GPUs of one host with room for the weights, one whole sequence and a fair cache."""
    prompts, most = rollout.prompts_per_iteration, min(devices, hardware.devices_per_host)
    degrees = [
        degree
        for degree in (powers(most) if rollout.engine == "vllm" else [1])
        if not tensor_problem(shape, degree, engine=True)
    ]
    roomy = [each for each in degrees if _holds(shape, hardware, rollout, each)] or degrees[-1:]
    # More GPUs for an engine where there would be more engines than prompts.
    busy = (each for each in roomy if devices // each <= prompts)
    degree = next(chain(busy, roomy[-1:]))
    return StageDeployment("rollout", max(1, min(devices // degree, prompts)), degree)


def _holds(shape: ModelShape, hardware: Hardware, rollout: RolloutConfig, degree: int) -> bool:
    value = rollout.value_bytes
    engine = StageDeployment(
        "rollout", 1, degree, max_running_requests=rollout.max_running_requests
    )
    memory = memory_model(shape, hardware).vllm(engine, rollout.vllm, value)
    longest = min(rollout.max_model_len or shape.max_positions, shape.max_positions)
    least = longest * kv_bytes_per_token(shape, degree, value)
    return memory.kv_cache >= max(least, _FAIR_CACHE * memory.total)


def usual_mesh(
    shape: ModelShape, hardware: Hardware, mesh: StageDeployment, devices: int, samples: int
) -> StageDeployment:
    """A rank on each of so many GPUs of all hosts, as far as there are samples for them, all in
    data parallel. The GPUs of a host share one copy of the parameters; all GPUs do where the
    memory of a host's is too small for a copy. mesh: the other fields."""
    ranks = max(each for each in divisors(devices) if each <= max(1, samples))
    shard = math.gcd(ranks, hardware.devices_per_host)
    within = mesh._replace(replicas=ranks // shard, shard=shard)
    if within.replicas == 1:
        return within
    memory = memory_model(shape, hardware)
    peak = memory.training(within, mesh.max_tokens_per_microbatch, TrainingNeeds()).total
    fits = peak <= memory.budget(_TRAINING_SHARE, 2 * memory.outside)
    return within if fits else mesh._replace(replicas=1, shard=ranks)
