"""Whether the selector lays out a run that leaves `selector.policy` at `auto`.

Reasons against it are clauses. With none of them `live_tokens` starts wherever `fixed` would.
"""

from __future__ import annotations

from earl_core.config.run import RunConfig
from earl_core.config.selector import SelectorConfig
from earl_core.deployment.shapes import Hardware
from earl_core.selector.choice.policy import choose_as_far_as_it_fits
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.profile_table import ProfileTable

_COMPARED = 2
"""Kinds of engines that must have been measured on cores: the roofline alone does not know whether
two engines beat two threads of one (regret 32 % without a profile, 0 % with one)."""


def under_live_tokens(config: RunConfig) -> SelectorConfig:
    """The run's settings of the selector, had the run file named that policy."""
    return config.selector.model_copy(update={"policy": "live_tokens"})


def configured_layout(config: RunConfig, hardware: Hardware) -> str:
    """Say why the run must be laid out as configured, whatever its model is; empty: it need not.
    The precision is settled."""
    rollout, update, stages = config.rollout, config.update, config.stages
    if update.deterministic:
        return "update.deterministic asks for equal bits"
    exact = rollout.dtype == "float32" and update.precision == "fp32"
    if rollout.engine == "torch" and exact and rollout.threads and update.threads:
        return "the torch engine in fp32 with given threads is to give equal bits"
    if stages.rollout or stages.update or stages.changes:
        return "`stages` names the layout"
    if hardware.devices < 2:
        return "there is one device, and so nothing to choose"
    if not hardware.gpus and (rollout.threads or update.threads):
        return "the run file names the threads of engines or ranks"
    try:
        under_live_tokens(config).check_stages(stages, config, config.schedule.staleness)
    except ValueError:
        return f"stages.placement is `{stages.placement}`"
    return ""


def unknown_speeds(profile: ProfileTable) -> str:
    """Say why a host without GPUs is not known well enough to choose; empty: it is."""
    if len({p.key for p in profile.points if p.key.startswith("rollout")}) < _COMPARED:
        return "engines on these cores were not measured (earl profile)"
    return ""


def no_plan(given: SelectionInput) -> str:
    """Say why no plan can be made of the input of a first choice; empty: one can."""
    try:
        choose_as_far_as_it_fits(given)
    except NoFeasiblePlan as error:
        return str(error).partition("\n")[0]
    return ""
