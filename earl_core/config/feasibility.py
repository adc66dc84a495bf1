"""The stage deployments that a run file asks for, and whether model and hardware allow them."""

from __future__ import annotations

from collections.abc import Iterator

from earl_core.config.engine_models import (
    check_cache,
    check_context,
    check_on_vllm,
    check_trained,
    check_tried,
)
from earl_core.config.rollout import RolloutConfig
from earl_core.config.run import RunConfig
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.placement import hosts_of, most_on_a_host
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.system.errors import ConfigError


def configured(
    stages: StagesConfig,
    rollout: RolloutConfig,
    update: UpdateConfig,
    hardware: Hardware,
    iteration: int,
    usual: tuple[StageDeployment, StageDeployment] | None = None,
) -> tuple[StageDeployment, StageDeployment]:
    """Return the stage deployments of rollout and update in an iteration. Hosts beyond the fewest
    have as many replicas as those. Threads that are not configured are a host's cores, divided as
    the placement says.

    usual: deployments of the stages that the run file leaves open; None: one rank of each on every
    host.
    """
    fewest = hardware.fewest_hosts or hardware.hosts

    def laid_out(number: int, stage: str) -> StageDeployment:
        given = stages.at(iteration)[number]
        if given is None and usual is not None:
            return usual[number]
        given = given or StageDeployment(stage)
        return given._replace(replicas=given.replicas * hardware.hosts // fewest)

    engines, mesh = laid_out(0, "rollout"), laid_out(1, "update")
    of_host = [most_on_a_host(each, hardware.hosts) for each in (engines, mesh)]
    shares = stages.placed.threads(hardware.cpu_cores, *of_host)
    of_engine = rollout.threads // engines.tensor_parallel or shares[0]
    of_rank = update.threads or shares[1]
    return (
        engines._replace(threads=of_engine, max_running_requests=rollout.max_running_requests),
        mesh._replace(
            threads=of_rank,
            max_tokens_per_microbatch=update.tokens_per_microbatch(hardware.gpus > 0),
            activation_checkpointing=update.activation_checkpointing,
        ),
    )


def engines_of_a_host(config: RunConfig, hardware: Hardware) -> int:
    """The most engines that the run file asks for on one host, in any iteration."""
    found = []
    for _, at in config.stages.steps():
        engines, _ = configured(config.stages, config.rollout, config.update, hardware, at)
        found.append(most_on_a_host(engines, hardware.hosts) // engines.tensor_parallel)
    return max(found, default=1)


def check_stages(config: RunConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise `ConfigError` for stage deployments that this model or this machine does not allow, and
    for a model that engine or trainer does not compute.

    The message names the degrees that work, or the devices there are.
    """
    check_devices(config, hardware)
    if model.states is not None:
        _check_states(config.rollout, model.model_type, hardware)
    check_trained(model)
    check_tried(model, config.rollout.engine)
    check_context(model.max_positions, config.rollout.max_model_len or 0)
    if config.rollout.vllm.expert_parallel and model.experts <= 1:
        raise ConfigError(
            "rollout.vllm.expert_parallel divides experts, and this model has none: leave it out"
        )
    if config.rollout.vllm.expert_parallel and not hardware.gpus:
        raise ConfigError(
            "rollout.vllm.expert_parallel wants GPUs: vLLM on a CPU computes with experts that "
            "another rank has as if they were its own; leave it out"
        )
    _check_experts(config, model, hardware)
    for key, iteration in config.stages.steps():
        for deployment in filter(None, config.stages.at(iteration)):
            for name, degree, problem in layout_problems(model, deployment):
                degrees = tensor_degrees(model, deployment.stage == "rollout")
                working = " or ".join(map(str, degrees)) if name == "tensor_parallel" else "1"
                raise ConfigError(
                    f"{key}.{deployment.stage}.{name} is {degree}: {problem}: use {working}"
                )
        if config.rollout.engine == "vllm":
            engines = config.stages.at(iteration)[0] or StageDeployment("rollout")
            check_on_vllm(model, engines.tensor_parallel, not hardware.gpus)


def _check_states(rollout: RolloutConfig, kind: str, hardware: Hardware) -> None:
    if rollout.engine == "vllm" and not hardware.gpus:
        raise ConfigError(
            f"rollout.engine=vllm plays no {kind} model without a GPU: vLLM's CPU build computes "
            "layers with a state in bfloat16 alone, and reuses none of their prefixes for requests "
            "with a seed; set rollout.engine=torch"
        )
    if rollout.drafts is not None:
        raise ConfigError(
            f"rollout.drafts is set, and layers of {kind} models have a state, from which wrong "
            "draft tokens are not taken back here: leave rollout.drafts out"
        )


def _check_experts(config: RunConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise `ConfigError` where the update's ranks cannot divide the model's experts, or an engine
    cannot record them beside drafts."""
    stages, rollout = config.stages, config.rollout
    recorded = model.experts > 1 and rollout.record_routing == "auto"
    if recorded and rollout.drafts is not None and rollout.engine == "vllm" and hardware.gpus:
        raise ConfigError(
            "rollout.drafts is set, and vLLM on a GPU cannot draft and record a mixture's experts: "
            "leave rollout.drafts out, or set rollout.record_routing to off"
        )
    for key, iteration in stages.steps():
        given = stages.at(iteration)[1]
        if given is None or given.expert_parallel == 1:
            continue
        name, degree = f"{key}.update.expert_parallel", given.expert_parallel
        if problem := expert_problem(model, degree):
            raise ConfigError(f"{name} is {degree}: {problem}")
        mesh = configured(stages, config.rollout, config.update, hardware, iteration)[1]
        ranks = most_on_a_host(mesh, hardware.hosts) // mesh.context_parallel
        if ranks % degree:
            working = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ConfigError(
                f"{name} is {degree}: tokens go to experts of their own host, and {degree} does "
                f"not divide its {ranks} data-parallel ranks: use {working}"
            )


def expert_problem(model: ModelShape, degree: int) -> str:
    """Return the reason why the model's experts cannot be divided over so many ranks; empty when
    they can."""
    if degree > 1 and model.experts <= 1:
        return "this model has no experts to divide: leave it out"
    if model.experts % degree:
        working = " or ".join(str(n) for n in range(1, degree) if model.experts % n == 0)
        return f"{degree} does not divide the model's {model.experts} experts: use {working}"
    return ""


def check_devices(config: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` when stage deployments need more devices than there are, or engines a
    cache that these devices do not have."""
    if config.rollout.engine == "vllm" and not hardware.gpus:
        check_cache(config.rollout.vllm)
    stages, there = config.stages, hardware.devices_per_host
    placed, placement = stages.placed, stages.division.placement
    unit = "GPUs" if hardware.gpus else "CPU cores"
    for key, iteration in stages.steps():
        rollout, update = configured(stages, config.rollout, config.update, hardware, iteration)
        of_host = [most_on_a_host(each, hardware.hosts) for each in (rollout, update)]
        if not placed.fits(there, *of_host):
            where = "this machine" if hardware.hosts == 1 else f"each of {hardware.hosts} hosts"
            given = [len(side) for side in placed.sides(there, *of_host)]
            short = f"which has {given[0]} and {given[1]} devices for them"
            if needed := placed.needed(of_host[0], of_host[1], there + 1):
                short = f"which need {needed} devices"
            raise ConfigError(
                f"{key} asks for {rollout.replicas} engines on {rollout.ranks} devices and for "
                f"{update.ranks} ranks, {placement}, {short}; {where} has {there} {unit}: lower a "
                "degree"
                + ("" if placement == "colocated" else ", or set stages.placement=colocated")
            )
        players, learners = (hosts_of(each, hardware.hosts) for each in (rollout, update))
        # Left open, it is on all GPUs.
        named = stages.at(iteration)[1] is not None or not hardware.gpus
        fixed = named and "update" not in config.selector.moves
        if fixed and players > learners and config.cluster.backend != "local":
            raise ConfigError(
                f"{key} has engines on {players} hosts and ranks of the update on {learners}: "
                "weights are published on the hosts of these ranks alone",
                remedy=f"have {players} replicas of the update or more, or fewer engines",
            )
        if hardware.gpus:
            left_open = [given is None for given in stages.at(iteration)]
            asked = [None if o else n for o, n in zip(left_open, of_host, strict=True)]
            placed.check_memory(there, *asked)
        together = placed.side_by_side and not placed.overlaps(there)
        cores = hardware.cpu_cores * hardware.hosts
        wanted = rollout.threads * rollout.ranks + update.threads * update.ranks
        if together and wanted > max(cores, rollout.ranks + update.ranks):
            raise ConfigError(
                f"rollout.threads and update.threads make {wanted} threads that work at the same "
                f"time under stages.placement {placement}, more than the {cores} CPU "
                "cores: lower them, or set both to 0"
            )


def answers_of_placement(config: RunConfig, hardware: Hardware, iteration: int) -> str:
    """Return what a placement of the user's own answers in an iteration, so that a plan can be told
    from one that an older version of it made; empty for one of EARL's."""
    placed = config.stages.placed
    if not placed.own:
        return ""
    both = configured(config.stages, config.rollout, config.update, hardware, iteration)
    of_host = [most_on_a_host(each, hardware.hosts) for each in both]
    cores, there = hardware.cpu_cores, hardware.devices_per_host
    return placed.answers(there, cores, of_host[0], of_host[1])


def layout_problems(
    model: ModelShape, deployment: StageDeployment
) -> Iterator[tuple[str, int, str]]:
    """Name the degrees of a deployment that the model does not allow, each with the reason."""
    tensor, context = deployment.tensor_parallel, deployment.context_parallel
    if problem := tensor_problem(model, tensor, deployment.stage == "rollout"):
        yield "tensor_parallel", tensor, problem
    if problem := context_problem(model, context):
        yield "context_parallel", context, problem


def context_problem(model: ModelShape, degree: int) -> str:
    """Return the reason why samples cannot be divided over so many ranks; empty when they can."""
    if degree > 1 and model.states is not None:
        return f"its {model.states.layers} layers with a state need all of a sample on one rank"
    return ""


def tensor_degrees(model: ModelShape, engine: bool) -> list[int]:
    """Tensor-parallel degrees that divide the model; engine as in `tensor_problem`."""
    degrees = range(1, model.attention_heads + 1)
    return [degree for degree in degrees if not tensor_problem(model, degree, engine)]


def tensor_problem(model: ModelShape, degree: int, engine: bool) -> str:
    """Return the reason why the model cannot be split over so many ranks; empty when it can.

    engine: engines copy key-value heads; copies that are trained would drift apart.
    """
    if degree > 1 and model.states is not None and not engine:
        return f"its {model.states.layers} layers with a state are not split over ranks that train"
    heads, pairs = model.attention_heads, model.key_value_heads
    if degree > 1 and not engine and model.experts > 1:
        return "experts are not split over tensor-parallel ranks in training"
    if heads % degree:
        return f"{degree} does not divide the {heads} attention heads"
    if pairs % degree and not engine:
        return f"{degree} does not divide the {pairs} key-value heads"
    if pairs % degree and degree % pairs:
        return f"{degree} neither divides the {pairs} key-value heads nor is a multiple of them"
    if model.states is not None and model.states.key_heads % degree:
        return f"{degree} does not divide the {model.states.key_heads} key heads of its states"
    for part, width in model.widths.items():
        if width % degree:
            return f"{degree} does not divide the {part} width of {width}"
    return ""
