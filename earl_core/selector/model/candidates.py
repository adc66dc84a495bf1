"""Stage deployments that hardware and model allow, with a sentence for each ruled-out degree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from earl_core.config.feasibility import context_problem, tensor_problem
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import CHECKPOINTING, Checkpointing, StageDeployment
from earl_core.deployment.stages import TRAINED
from earl_core.selector.model import cpu
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory_model import MemoryModel
from earl_core.selector.model.sizes import divisors, powers
from earl_core.system.plural import plural

Offers = tuple[list[StageDeployment], list["RuledOut"]]
"""Candidates, and what is none."""


class RuledOut(NamedTuple):
    """A candidate, or a whole family of them, that is not offered, and why, in a sentence."""

    stage: str
    label: str
    reason: str


def candidate_of(deployment: StageDeployment, hardware: Hardware) -> StageDeployment:
    """Return the part of a stage deployment that is a choice: on GPUs threads are none, and never
    the context that engines are built for."""
    threads = 1 if hardware.gpus else deployment.threads
    return deployment._replace(threads=threads, max_model_len=0)


def deployed(candidate: StageDeployment, hardware: Hardware) -> StageDeployment:
    """The candidate as worker groups follow it: on GPUs with the threads for what a rank does
    beside its device."""
    if not hardware.gpus:
        return candidate
    return candidate._replace(threads=max(1, hardware.cpu_cores // hardware.devices_per_host))


def _tensor_degrees(
    stage: str, shape: ModelShape, hardware: Hardware, allowed: tuple[int, ...] = ()
) -> tuple[list[int], list[RuledOut]]:
    """Tensor-parallel degrees of a stage. allowed: those asked for; none means all."""
    kept, out = [], []
    for degree in sorted(set(powers(hardware.devices)) | set(allowed)):
        problem = tensor_problem(shape, degree, engine=stage == "rollout")
        if allowed and degree not in allowed:
            listed = ", ".join(map(str, allowed))
            problem = f"selector.tensor_parallel or the engine allows only {listed}"
        elif degree > hardware.devices:
            problem = f"there are only {hardware.devices} devices"
        elif not problem and degree > hardware.devices_per_host:
            problem = (
                "its all-reduces, two a layer and token, would leave the host, which has "
                f"{hardware.devices_per_host} devices"
            )
        if problem:
            out.append(RuledOut(stage, f"TP {degree}", problem))
        else:
            kept.append(degree)
    return kept, out


def rollout_candidates(
    shape: ModelShape,
    hardware: Hardware,
    episodes: int,
    running: int,
    allowed: tuple[int, ...] = (),
) -> Offers:
    """Engines that fill the hardware, for each degree. running: most sequences of an engine."""
    degrees, out = _tensor_degrees("rollout", shape, hardware, allowed)
    made = []
    for degree in degrees:
        for replicas, threads in _engines(degree, hardware):
            if 1 < replicas > episodes:
                played = plural(episodes, "episode")
                reason = f"{replicas} engines for {played}: some would stand idle"
                out.append(RuledOut("rollout", f"TP {degree} x {replicas}", reason))
            else:
                engines = StageDeployment("rollout", replicas, degree, threads=threads)
                made.append(engines._replace(max_running_requests=running))
    # Fewer episodes than engines at every degree: one engine a sequence is the most there is.
    return made or [
        StageDeployment("rollout", max(1, episodes), degree, max_running_requests=running)
        for degree in degrees
    ], out


def _engines(degree: int, hardware: Hardware) -> list[tuple[int, int]]:
    """Numbers of engines that fill the hardware, and the threads of each device."""
    if hardware.gpus:
        # The devices of an engine are of one host.
        on_each = hardware.devices_per_host // degree
        return [(max(1, hardware.hosts * on_each or hardware.gpus // degree), 1)]
    return cpu.engines(degree, hardware)


def training_candidates(
    stage: str, shape: ModelShape, hardware: Hardware, episodes: int, microbatch: int
) -> Offers:
    """Meshes of replicas x shard x context x tensor parallel ranks that fill the hardware.
    Checkpointing, chunked logits and offload are steps of the memory fallback (`fallbacks`)."""
    if not hardware.gpus:
        return [cpu.mesh(stage, hardware)._replace(max_tokens_per_microbatch=microbatch)], []
    degrees, out = _tensor_degrees(stage, shape, hardware)
    made = []
    for tensor in degrees:
        for context in powers(hardware.devices // tensor):
            parallel, rest = divmod(hardware.devices, tensor * context)
            if rest:
                continue
            reason = context_problem(shape, context)
            if not reason and shape.attention_heads % (tensor * context):
                reason = (
                    f"{tensor * context} ranks do not divide the {shape.attention_heads} heads, "
                    "which context parallelism spreads over them"
                )
            elif not reason and parallel > episodes:
                reason = (
                    f"{parallel} data-parallel replicas for {plural(episodes, 'episode')}: some "
                    "would stand idle"
                )
            if reason:
                out.append(RuledOut(stage, f"TP {tensor}, CP {context}", reason))
                continue
            for shard in divisors(parallel):
                mesh = StageDeployment(stage, parallel // shard, tensor, context, shard)
                made.append(mesh._replace(max_tokens_per_microbatch=microbatch))
    return made, out


def fallbacks(
    candidate: StageDeployment, chunk: int, rungs: Sequence[Checkpointing] = CHECKPOINTING
) -> Iterator[StageDeployment]:
    """The candidate, then itself with ever more means against memory running out, fastest first:
    logits in chunks of so many positions (0: they would not help), selective and full activation
    checkpointing where they are among the rungs, optimizer offload.

    Smaller microbatches come before all of them (`smaller_microbatches`).
    """
    yield candidate
    if chunk:
        candidate = candidate._replace(logits_chunk_tokens=chunk)
        yield candidate
    further = CHECKPOINTING[CHECKPOINTING.index(candidate.activation_checkpointing) + 1 :]
    for rung in further:
        if rung in rungs:
            candidate = candidate._replace(activation_checkpointing=rung)
            yield candidate
    if candidate.stage in TRAINED:
        yield candidate._replace(offload_optimizer=True)


def memory_model(shape: ModelShape, hardware: Hardware) -> MemoryModel:
    """The memory formulas for this hardware."""
    model = MemoryModel if hardware.gpus else cpu.CpuMemoryModel
    return model(shape, device_of(hardware), hardware)
