"""Checks of a start before its run directory is opened, and so bound to a configuration.

Code of the user's, and of packages that bring environments, runs in a process of its own.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from earl_core.cluster.errors import WorkerError
from earl_core.cluster.host import Cluster, Host
from earl_core.config import ConfigError, RunConfig, check_references
from earl_core.config.feasibility import check_devices, check_stages, engines_of_a_host
from earl_core.config.gateway import check_gateway
from earl_core.config.redaction import redaction_of
from earl_core.control.ancestor import Ancestor, beginning
from earl_core.control.failure_diagnosis import is_loss
from earl_core.control.hardware import hardware_of
from earl_core.control.host_checks import check_agreement
from earl_core.control.precision import Resolved, resolved
from earl_core.control.routing_checks import check_routing, routing_warning
from earl_core.control.selector_policy import Settled, settled
from earl_core.control.shared_memory_need import judged_room, need_of
from earl_core.control.teachers import Teachers, check_teachers, reference_shapes
from earl_core.control.worker_groups import WorkerGroups, preload_ranks
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.guard.seen import Bounds, environment_source, function_source
from earl_core.models.foreseen import check_builder, expected_shape
from earl_core.pretrained.adapter_checks import check_adaptable, check_first_pairs
from earl_core.pretrained.architecture import check_code
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.pretrained.vocabulary import check_tokenizer_file
from earl_core.run.remote_stores import HostStores
from earl_core.system.shared_memory import SMALL_BYTES, enlarge

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Preflight(NamedTuple):
    """The findings of a start. hardware: the part that all hosts have alike, before anything is
    measured. model: None where it has yet to be made. prompt_counts: as of
    `environments.hosting.check.Found`. ranges: declared ones of sources of rewards, by name."""

    hosts: Sequence[Host]
    hardware: Hardware
    model: ModelShape | None
    precision: Resolved
    policy: Settled
    prompt_counts: Mapping[str, int]
    ranges: Mapping[str, Bounds]


def preflight(
    config: RunConfig,
    cluster: Cluster,
    ancestor: Ancestor | None = None,
    teachers: Teachers | None = None,
) -> Preflight:
    """Look at the hosts, and check that they agree, references, devices, stage deployments and the
    tokenizer's size (where the model is there), and environments; settle precision and policy.

    ancestor, teachers: models that the run has yet to keep. Writes nothing of the run. Raises
    `ConfigError`, or `WorkerCallFailed` with what the environment's code raised, whose log is then
    kept unless the error says all.
    """
    hosts = cluster.hosts()
    begins = beginning(config, ancestor)
    check_agreement(begins, hosts)
    preload_ranks(hosts)
    # From here on this process hides what they lead to.
    check_references(config)
    redaction_of(config)
    suites = config.evaluation.suites
    hardware = hardware_of(hosts, config.cluster.fewest)
    engines = engines_of_a_host(config, hardware)
    played = [*config.played.values(), *suites]
    check_gateway(config.rollout.gateway, played, len(hosts), engines)
    model = None
    if (Path(begins.model.path) / "config.json").is_file():
        model = fitting_model(begins, hardware)
        check_teachers(config, Path(begins.model.path), teachers)
    else:
        check_devices(config, hardware)
        check_expected(begins, hardware)
    counts, ranges = surely(lambda: _check_environments(config, hardware), config.deadlines.repeats)
    precision = resolved(config, hosts, Path(config.runs_directory) / config.name)
    references = () if model is None else reference_shapes(begins, teachers)
    policy = settled(precision.config, hardware, model, references, hosts)
    if model is not None and (text := routing_warning(policy.config, model)):
        logger.warning("%s", text)
    return Preflight(hosts, hardware, model, precision, policy, counts, ranges)


def warn_of_turns(config: RunConfig) -> None:
    """Warn where older episodes gain nothing. The policy is settled."""
    stale = config.schedule.pinned
    if stale and not config.divides and not config.stages.placed.side_by_side:
        logger.warning(
            "schedule.staleness is %d, but under stages.placement %r rollout and update take "
            "turns: episodes are older and nothing is gained; set the placement to `separate` or "
            "`shared`",
            stale, config.stages.division.placement,
        )  # fmt: skip


def fitting_model(config: RunConfig, hardware: Hardware) -> ModelShape:
    """The shape of the model of policy version 0. Raises `ConfigError` unless stages, tokenizer,
    adapter and what is asked of routers fit it."""
    shape = whole_model(config)
    check_stages(config, shape, hardware)
    return shape


def whole_model(config: RunConfig) -> ModelShape:
    """The shape of the model of policy version 0. Raises `ConfigError` unless its code is known,
    and tokenizer, adapter and what is asked of routers fit it."""
    path = Path(config.initial_model.path)
    shape = read_model_shape(path)
    check_code(path, config.model.trust_remote_code)
    check_tokenizer_file(path, shape.vocabulary)
    check_first_pairs(config.initial_model)
    check_routing(config, shape)
    return shape


def check_expected(config: RunConfig, hardware: Hardware) -> None:
    """Raise `EarlError` where a model that has yet to be made cannot be, or will not fit, as far as
    that is known before; `fitting_model` knows all."""
    if (shape := expected_shape(config.model)) is not None:
        check_stages(config, shape, hardware)
        check_adaptable(config.model, shape)
        check_routing(config, shape)
    check_builder(config.model.made)


def check_shared_memory(config: RunConfig, stores: HostStores) -> None:
    """Raise `ConfigError` unless two versions of the model's weights fit on every host beside the
    shards that a given `dispatch.max_bytes` allows; warn where little is left for shards."""
    room = stores.room()
    if room is None:
        return
    if room.free < SMALL_BYTES:
        logger.warning("little shared memory for a run, %s: %s", room, enlarge())
    for finding in judged_room(need_of(config), room, config.dispatch.max_bytes):
        if finding.level == "blocks":
            raise ConfigError(finding.text, remedy=finding.advice)
        logger.warning("%s: %s", finding.text, finding.advice)


def surely(
    work: Callable[[], Result], repeats: int, stopping: Callable[[], bool] = lambda: False
) -> Result:
    """Do what comes before the first stage; again when its ranks are lost."""
    tried = 0
    while True:
        try:
            return work()
        except WorkerError as error:
            if tried == repeats or not is_loss(error) or stopping():
                raise
            logger.warning("tried again: %s: %s", error.where.sentence(), error.reason)
        tried += 1


def _check_environments(
    config: RunConfig, hardware: Hardware
) -> tuple[dict[str, int], dict[str, Bounds]]:
    logs = Path(tempfile.mkdtemp(prefix="earl-environment-"))
    groups = WorkerGroups(config, logs, logs, hardware)
    told = True
    try:
        (found,) = groups.call(StageDeployment("environment"), "environment", "check", 0)
        for note in found["notes"]:
            logger.warning("%s", note)
        ranges = {environment_source(label): each for label, each in found["returns"].items()}
        ranges |= {function_source(title): each for title, each in found["scores"].items()}
        return found["prompt_counts"], {name: (low, high) for name, (low, high) in ranges.items()}
    except WorkerError as error:
        told = error.expected
        raise
    finally:
        groups.close()
        if told:
            shutil.rmtree(logs, ignore_errors=True)
