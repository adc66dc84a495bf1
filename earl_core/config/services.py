"""Settings around the stages: processes of the experience, shared memory, checkpoints, tracking,
waits."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from earl_core.config.environment import SuiteConfig
from earl_core.system.files import user_directory
from earl_core.system.settings import Options, Place, Settings, WholePath

_HOSTS = re.compile(r"[1-9]\d*(\.\.[1-9]\d*)?")


class ClusterConfig(Settings):
    """The hosts that a run has."""

    backend: Literal["local", "ray"] = Field(
        default="local", description="local: this machine alone. ray: hosts of a Ray cluster."
    )
    address: str | None = Field(
        default=None,
        description="Address of the Ray cluster; None: the cluster that this host belongs to.",
    )
    hosts: int | str = Field(
        default=1,
        description="Number of hosts. With `ray` also a range such as 2..8: the run takes as "
        "many as there are, and goes on when some are lost or join. With `local` this machine is "
        "divided into as many equal parts that work as hosts.",
    )
    cpus_per_host: int = Field(
        default=1, ge=1, description="With `ray`: CPU cores to reserve on each host."
    )
    gpus_per_host: int = Field(
        default=0, ge=0, description="With `ray`: GPUs to reserve on each host."
    )
    insecure: bool = Field(
        default=False, description="Accept a Ray cluster that takes commands without a token."
    )

    @property
    def fewest(self) -> int:
        """Hosts that the run needs."""
        return int(str(self.hosts).partition("..")[0])

    @property
    def most(self) -> int:
        """Hosts that it can use."""
        return int(str(self.hosts).rpartition("..")[2])

    @model_validator(mode="after")
    def _range(self) -> ClusterConfig:
        if not _HOSTS.fullmatch(str(self.hosts)) or self.fewest > self.most:
            raise ValueError(
                f"cluster.hosts is {self.hosts}: write a number such as 2, or, with "
                "cluster.backend `ray`, a range such as 2..8"
            )
        if self.backend == "local" and isinstance(self.hosts, str):
            raise ValueError(
                f"cluster.hosts is {self.hosts}, but one machine has always as many parts: say how "
                "many, or set cluster.backend to `ray`"
            )
        return self

    @model_validator(mode="after")
    def _only_ray(self) -> ClusterConfig:
        for name in ("address", "cpus_per_host", "gpus_per_host", "insecure"):
            default = type(self).model_fields[name].default
            if self.backend == "local" and getattr(self, name) != default:
                raise ValueError(
                    f"cluster.{name} belongs to a Ray cluster: set cluster.backend to `ray`, or "
                    "leave it out"
                )
        return self


class ExperienceConfig(Settings):
    """Processes of rewards and advantages. Each reads and writes the rows of its own groups; only
    moments (count, mean, M2) are exchanged."""

    ranks: int = Field(
        default=1, ge=1, description="Number of processes that compute rewards and advantages."
    )


class DispatchConfig(Settings):
    """Storage and verification of shards."""

    directory: Place = Field(
        default_factory=lambda: str(user_directory()),
        description="Folder in shared memory for the runs of one user; by default "
        "/dev/shm/earl-<user id>.",
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Largest size of a run's shards in the shared memory of a host, without "
        "published weights. None: three quarters of what two versions of the weights leave of "
        "the file system.",
    )
    wait_seconds: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a writer waits for free space when the shared memory is full.",
    )
    verify: Literal["resume", "always"] = Field(
        default="resume",
        description="When checksums are verified: on resume, or on every read as well.",
    )
    retain_hours: float = Field(
        default=72.0,
        ge=0,
        description="Hours for which the shards of a stopped run are kept for a resume.",
    )
    retain_bytes: int = Field(
        default=16 * 2**30,
        ge=0,
        description="Shared memory that all stopped runs together may hold; the oldest are "
        "removed first.",
    )
    durability: Literal["memory", "spill"] = Field(
        default="memory",
        description="memory: shards lost with the machine are computed again. spill: they are "
        "copied to spill_url in the background and read back on resume.",
    )
    spill_url: str | None = Field(
        default=None,
        description="Any fsspec URL to copy shards to, or a reference to one (env:NAME, "
        "file:PATH); credentials come from the storage's environment variables.",
    )

    @model_validator(mode="after")
    def _spill(self) -> DispatchConfig:
        if (self.durability == "spill") != (self.spill_url is not None):
            raise ValueError(
                "dispatch.durability and dispatch.spill_url contradict each other: set durability "
                "to `spill` and give a URL, or neither"
            )
        return self


class CheckpointConfig(Settings):
    """Iterations that end with a checkpoint, and the checkpoints that are kept."""

    every: int = Field(
        default=1, ge=1, description="Iterations between checkpoints; the last one always has one."
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        description="Number of checkpoints to keep, besides the best evaluated one; older ones "
        "are removed.",
    )


class EvaluationConfig(Settings):
    """Held-out evaluation inside `train`; 0 switches it off."""

    every: int = Field(
        default=0, ge=0, description="Iterations between evaluations; 0: no evaluations."
    )
    episodes: int = Field(
        default=256,
        ge=1,
        description="Episodes of each evaluation, each from a held-out prompt of its own.",
    )
    first_episodes: int | None = Field(
        default=None,
        ge=1,
        description="Episodes of the evaluation before training, for which the first iteration "
        "waits; None: as many as in the others.",
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="Sampling temperature. None: that of the rollout; 0: greedy.",
    )
    options: Options = Field(
        default_factory=dict, description="Environment options that differ from those of training."
    )
    suites: tuple[SuiteConfig, ...] = Field(
        default=(), description="Further environments that are played in the same evaluations."
    )

    @model_validator(mode="after")
    def _gates(self) -> EvaluationConfig:
        gates = [suite.label for suite in self.suites if suite.gate]
        if gates and not self.every:
            raise ValueError(
                f"the suite {gates[0]} is a gate, and evaluation.every is 0, so no checkpoint is "
                "evaluated: set evaluation.every, or leave `gate` out"
            )
        return self

    def episodes_of(self, version: int) -> int:
        """Return the number of episodes that the evaluation of a policy version plays."""
        return self.first_episodes or self.episodes if version == 0 else self.episodes


class TrackingConfig(Settings):
    """MLflow. A tracker that is down never stops a run."""

    enabled: bool = Field(
        default=True,
        description="Send the run to MLflow; the run directory keeps all metrics either way.",
    )
    uri: str | None = Field(
        default=None,
        description="Tracking URI of MLflow, or a reference to one (env:NAME, file:PATH). None: "
        "MLFLOW_TRACKING_URI, else a database beside the runs.",
    )
    experiment: str = Field(
        default="earl", description="Name of the MLflow experiment, made when it does not exist."
    )
    trace_episodes: int = Field(
        default=2,
        ge=0,
        description="Kept episodes of each iteration that become traces in MLflow, turn by turn.",
    )
    keep_episodes: Literal["all", "none"] | PositiveInt = Field(
        default="all",
        description="Episodes of each iteration that the run directory keeps as a Parquet file, "
        "with or without MLflow: all, a number of them (the first), or none.",
    )
    keep_episodes_bytes: int = Field(
        default=4 * 2**30,
        ge=0,
        description="Largest size of a run's kept episodes; those of the oldest iterations are "
        "removed first.",
    )
    redact: WholePath | None = Field(
        default=None,
        description="File with rules of redaction for all that leaves the run directory: traces, "
        "pages, tables, reports, logs; relative to the working directory. The kept episodes stay "
        "as they are.",
    )


class DeadlineConfig(Settings):
    """Time limits in seconds, after which a wait becomes an error, and numbers of further tries."""

    start: float = Field(
        default=300.0, gt=0, description="Time limit of the start of a worker group."
    )
    stage: float = Field(
        default=3600.0, gt=0, description="Time limit of one stage of one iteration."
    )
    heartbeat: float = Field(
        default=120.0, ge=2, description="Silence of a worker after which it counts as lost."
    )
    run_in_use: float = Field(
        default=86400.0,
        ge=0,
        description="Seconds that a flow run of a Prefect deployment waits for its run while "
        "another process has it. `earl train` and `earl resume` never wait.",
    )
    repeats: int = Field(
        default=3,
        ge=0,
        description="Number of times that the stages of an iteration, all together, are repeated "
        "because ranks died or missed a deadline.",
    )
