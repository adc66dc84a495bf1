"""The layouts that hardware and model allow, and a sentence for each degree that they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from earl_core.deployment.shapes import Hardware, ModelShape, Sizes
from earl_core.deployment.stage_deployment import StageDeployment


class Candidate(NamedTuple):
    """One layout of one stage; fields as in `StageDeployment`, which see.

    A plain tuple, because hundreds are made within milliseconds.
    """

    stage: str
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    shard: int = 1
    threads: int = 1
    microbatch: int = 0
    running: int = 0
    checkpointing: bool = False
    logits_chunk: int = 0
    offload: bool = False

    @property
    def ranks(self) -> int:
        """Processes, each with a device of its own (on a CPU, with `threads` cores)."""
        return self.replicas * self.tensor * self.context * self.shard

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.replicas * self.shard

    @property
    def parts(self) -> int:
        """Ranks that share the parameters of one copy, tensor parallelism aside: the learner's
        context ranks hold parts of them as shard ranks do."""
        return self.shard * self.context

    @property
    def key(self) -> str:
        """The layout's name in the profile table.

        On GPUs engines do not disturb one another, so their number is no part of it; engines of a
        CPU share its memory bandwidth.
        """
        parts = [self.stage, f"tp{self.tensor}"]
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [f"shard{self.shard}"] if self.shard > 1 else []
        parts += [f"{self.replicas}x{self.threads}threads"] if self.threads > 1 else []
        parts += [f"mb{self.microbatch}"] if self.microbatch else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [f"chunk{self.logits_chunk}"] if self.logits_chunk else []
        parts += ["offload"] if self.offload else []
        return " ".join(parts)

    @property
    def label(self) -> str:
        """The layout in a few words, for tables and reasons."""
        words = [f"TP {self.tensor}"]
        words += [f"CP {self.context}"] if self.context > 1 else []
        words += [f"shard {self.shard}"] if self.shard > 1 else []
        words += [f"x {self.replicas}"] if self.replicas > 1 or self.stage == "rollout" else []
        words += [f"{self.threads} threads"] if self.threads > 1 else []
        words += [f"microbatch {self.microbatch}"] if self.microbatch else []
        words += [f"at most {self.running} running"] if self.running else []
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"logits by {self.logits_chunk}"] if self.logits_chunk else []
        words += ["optimizer offloaded"] if self.offload else []
        return ", ".join(words).replace(", x ", " x ")

    def deployment(self, max_model_len: int | None = None) -> StageDeployment:
        """The candidate as a part of a plan."""
        return StageDeployment(
            stage=self.stage,
            replicas=self.replicas,
            tensor_parallel=self.tensor,
            context_parallel=self.context,
            shard=self.shard,
            threads=self.threads,
            max_tokens_per_microbatch=self.microbatch or None,
            max_model_len=max_model_len,
            max_running_requests=self.running or None,
            activation_checkpointing=self.checkpointing,
            logits_chunk_tokens=self.logits_chunk or None,
            offload_optimizer=self.offload,
        )

    @classmethod
    def of(cls, deployment: StageDeployment) -> Candidate:
        """The candidate behind a part of a plan."""
        return cls(
            stage=deployment.stage,
            replicas=deployment.replicas,
            tensor=deployment.tensor_parallel,
            context=deployment.context_parallel,
            shard=deployment.shard,
            threads=deployment.threads,
            microbatch=deployment.max_tokens_per_microbatch or 0,
            running=deployment.max_running_requests or 0,
            checkpointing=deployment.activation_checkpointing,
            logits_chunk=deployment.logits_chunk_tokens or 0,
            offload=deployment.offload_optimizer,
        )

    @classmethod
    def of_key(cls, key: str, hardware: Hardware) -> Candidate:
        """The layout that a name in the profile table stands for on this hardware, but for its
        limit on running sequences, which the name leaves out."""
        stage, *parts = key.split()
        found: dict[str, int | bool] = {}
        for part in parts:
            if part.endswith("threads"):
                found["replicas"], found["threads"] = map(int, part[: -len("threads")].split("x"))
            elif part in ("checkpointing", "offload"):
                found[part] = True
            else:
                name = part.rstrip("0123456789")
                found[_KEY_PARTS[name]] = int(part[len(name) :])
        candidate = cls(stage, **found)  # type: ignore[arg-type]
        if "replicas" in found:
            return candidate
        return candidate._replace(replicas=max(1, hardware.devices // candidate.ranks))


_KEY_PARTS = {
    "tp": "tensor",
    "cp": "context",
    "shard": "shard",
    "mb": "microbatch",
    "chunk": "logits_chunk",
}


class RuledOut(NamedTuple):
    """A layout, or a whole family of them, that is not offered, and why, in a sentence."""

    stage: str
    label: str
    reason: str


LOGITS_CHUNK = 2**22
"""Logits computed at a time when memory is short: an eighth of what the learner takes else."""


def logits_chunk(vocabulary: int) -> int:
    """Positions whose logits are computed at a time when memory is short: a power of two."""
    return int(2 ** max(0, (LOGITS_CHUNK // vocabulary).bit_length() - 1))


def divisors(number: int) -> list[int]:
    """Of a number of devices, which need be no power of two: 24 are three hosts of eight."""
    return [each for each in range(1, number + 1) if number % each == 0]


def powers(limit: int) -> list[int]:
    """1, 2, 4, … up to the limit."""
    return [2**power for power in range(max(1, limit).bit_length()) if 2**power <= limit]


def tensor_degrees(
    stage: str, shape: ModelShape | Sizes, hardware: Hardware, allowed: tuple[int, ...] = ()
) -> tuple[list[int], list[RuledOut]]:
    """Legal tensor-parallel degrees of a stage. allowed: degrees asked for; none means all."""
    kept, out = [], []
    for degree in sorted(set(powers(hardware.devices)) | set(allowed)):
        reason = _tensor_problem(stage, degree, shape, hardware, allowed)
        if reason is None:
            kept.append(degree)
        else:
            out.append(RuledOut(stage, f"TP {degree}", reason))
    return kept, out


def _tensor_problem(
    stage: str,
    degree: int,
    shape: ModelShape | Sizes,
    hardware: Hardware,
    allowed: tuple[int, ...],
) -> str | None:
    heads, pairs = shape.attention_heads, shape.key_value_heads
    if allowed and degree not in allowed:
        return f"selector.tensor_parallel or the engine allows only {', '.join(map(str, allowed))}"
    if degree > hardware.devices:
        return f"there are only {hardware.devices} devices"
    if heads % degree:
        return f"{degree} does not divide the {heads} attention heads"
    if pairs % degree and stage != "rollout":
        # Engines copy key-value heads; copies that are trained would drift apart.
        return f"{degree} does not divide the {pairs} key-value heads"
    if pairs % degree and degree % pairs:
        return f"{degree} neither divides the {pairs} key-value heads nor is a multiple of them"
    if shape.feed_forward % degree:
        return f"{degree} does not divide the feed-forward width of {shape.feed_forward}"
    if degree > hardware.devices_per_host:
        return (
            f"its all-reduces, two a layer and token, would leave the host, which has "
            f"{hardware.devices_per_host} devices"
        )
    return None


def rollout_candidates(
    shape: ModelShape | Sizes,
    hardware: Hardware,
    episodes: int,
    limits: tuple[int, ...],
    allowed: tuple[int, ...] = (),
) -> tuple[list[Candidate], list[RuledOut]]:
    """Engines that fill the hardware, for each legal degree and each limit on running sequences."""
    degrees, out = tensor_degrees("rollout", shape, hardware, allowed)
    made = []
    for degree in degrees:
        for replicas in _replica_counts(degree, hardware):
            if replicas > 1 and replicas > episodes:
                label = f"TP {degree} x {replicas}"
                reason = f"{replicas} engines for {episodes} episodes: some would stand idle"
                out.append(RuledOut("rollout", label, reason))
                continue
            threads = 1 if hardware.gpus else hardware.cpu_cores // (replicas * degree)
            made += [
                Candidate("rollout", replicas, degree, threads=threads, running=limit)
                for limit in limits
            ]
    if not made:
        # Fewer episodes than engines at every degree: one engine a sequence is the most there is.
        made = [
            Candidate("rollout", max(1, episodes), degree, running=limit)
            for degree in degrees
            for limit in limits
        ]
    return made, out


def _replica_counts(degree: int, hardware: Hardware) -> list[int]:
    if hardware.gpus:
        return [max(1, hardware.gpus // degree)]
    most = hardware.cpu_cores // degree
    return [count for count in powers(most) if most % count == 0]


def update_candidates(
    shape: ModelShape | Sizes,
    hardware: Hardware,
    episodes: int,
    microbatches: tuple[int, ...],
    stage: str = "update",
) -> tuple[list[Candidate], list[RuledOut]]:
    """Meshes of replicas x shard x context x tensor parallel ranks that fill the hardware.

    Checkpointing, chunked logits and offload are rungs that a memory check climbs (`rungs`).
    """
    if not hardware.gpus:
        threads = hardware.cpu_cores
        made = [Candidate(stage, threads=threads, microbatch=size) for size in microbatches]
        return made, []
    degrees, out = tensor_degrees(stage, shape, hardware)
    made = []
    for tensor in degrees:
        for context in powers(hardware.devices // tensor):
            parallel = hardware.devices // (tensor * context)
            if tensor * context * parallel != hardware.devices:
                continue
            label = f"TP {tensor}, CP {context}"
            if shape.attention_heads % (tensor * context):
                reason = (
                    f"{tensor * context} ranks do not divide the {shape.attention_heads} heads, "
                    "which context parallelism spreads over them"
                )
                out.append(RuledOut(stage, label, reason))
            elif parallel > episodes:
                reason = (
                    f"{parallel} data-parallel ranks for {episodes} episodes: some would stand idle"
                )
                out.append(RuledOut(stage, label, reason))
            else:
                made += [
                    Candidate(stage, parallel // shard, tensor, context, shard, microbatch=size)
                    for shard in divisors(parallel)
                    for size in microbatches
                ]
    return made, out


def rungs(candidate: Candidate, chunk: int, vary_checkpointing: bool = True) -> Iterator[Candidate]:
    """The candidate, then itself with ever more means against memory running out, fastest first:
    logits in chunks of so many positions (0: they would not help), activation checkpointing,
    optimizer offload.

    Smaller microbatches come before all of them (`smaller_microbatches`).
    """
    yield candidate
    if chunk:
        candidate = candidate._replace(logits_chunk=chunk)
        yield candidate
    if vary_checkpointing and not candidate.checkpointing:
        candidate = candidate._replace(checkpointing=True)
        yield candidate
    if candidate.stage == "update":
        yield candidate._replace(offload=True)


def smaller_microbatches(asked: int, longest: float) -> list[int]:
    """Token budgets below the one asked for, largest first: halves of it, and in the end the least
    that holds the longest sample; none when the longest sample fills what was asked for.

    Smaller ones would change nothing: no sample is cut.
    """
    least = coarse_above(longest)
    halves = [asked >> power for power in range(1, asked.bit_length())]
    sizes = [size for size in halves if size > least]
    return [*sizes, least] if least < asked else sizes


def coarse(value: float) -> int:
    """The greatest of 1, 2, 3, 4, 6, 8, 12, 16, … that is not above the value; 0 below 1.

    Coarse, so that a growing context does not ask for another layout every iteration.
    """
    if value < 1:
        return 0
    power = 1 << (int(value).bit_length() - 1)
    return power + power // 2 if power + power // 2 <= value and power > 1 else power


def coarse_above(value: float) -> int:
    """The least of the same numbers that is not below the value."""
    below = max(1, coarse(value))
    if below >= value:
        return below
    power = 2 ** (below.bit_length() - 1)
    return 2 * power if below > power or power == 1 else power + power // 2


def round_up(value: float, unit: int) -> int:
    """The least multiple of the unit that is not below the value, and at least one unit."""
    return max(1, math.ceil(value / unit)) * unit
