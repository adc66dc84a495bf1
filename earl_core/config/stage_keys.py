"""When two executions of a stage are the same.

The key that a stage's sealed manifest must carry covers the run, the iteration, the stage, the data
of its inputs and the settings that the table of stages names. It never covers how the stage was
laid out on the hardware: a plan may change before the resume, and finished work stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from earl_core.config.algorithm import INITIAL
from earl_core.config.run import RunConfig
from earl_core.deployment.stages import EVALUATION, STAGE_SETTINGS, stage_of
from earl_core.system.files import canonical_json
from earl_core.system.wait import LATER, WAITING

_SUPERVISION = (
    "hosts",
    "deterministic",
    "tool_timeout_seconds",
    "step_timeout_seconds",
    "start_timeout_seconds",
    "call_timeout_seconds",
    "episode_timeout_seconds",
)
"""Settings of an environment that decide how it is supervised, not what is played."""


_LATER = {
    "model.adapter": None,
    "model.freeze_routers": False,
    "update.zero_advantage": None,
    "update.least_sample_size": 0.3,
    "update.small_sample": "warn",
    "rollout.alike_groups": "keep",
    "rollout.max_waves": 3,
    "rollout.deal": "contiguous",
    "rollout.drafts": None,
    "rollout.record_routing": "auto",
    "rollout.vllm.expert_parallel": False,
    "algorithm.router_aux_loss_coef": 0.0,
    "algorithm.kl.reference": INITIAL,
    "algorithm.kl.until": None,
    "imitation.format": "auto",
    "rollout.chat_template_kwargs": {},
    "rollout.requests": {"constrained": "free"},
    "algorithm.importance_correction.low": 0.0,
    "algorithm.importance_correction.outside": "cut",
    "algorithm.importance_correction.anchor": "recompute",
    "guard": "warn",
}
"""Settings that are in no key while they have their default: keys of runs that were begun before
the setting existed stay as they are."""

_LEARNT = ("kl", "reward_weight", "curriculum")
"""Settings of environments that decide what is learnt from episodes, or which prompts are played,
and not what is played of a prompt. As `environments.kl` they are a list, in no key while none is
set."""


def stage_key(
    config: RunConfig,
    uid: str,
    iteration: int,
    stage: str,
    inputs: Sequence[str],
    branch: Sequence[Any] = (),
) -> str:
    """sha256 in hex; `inputs` are the data digests of the input manifests, in order. branch: what
    `run.branches.Branches.key` says of the stage."""
    content = [uid, iteration, stage, list(inputs), stage_settings(config, stage), *branch]
    return hashlib.sha256(canonical_json(content)).hexdigest()


def stage_settings(config: RunConfig, stage: str) -> dict[str, Any]:
    """The settings that a stage's result depends on, by dotted name."""
    # Keys of runs without such a thing are as they were before there was one.
    absent = tuple(name for name in ("imitation", "critic") if getattr(config, name) is None)
    names = [name for name in STAGE_SETTINGS[stage_of(stage)] if not name.startswith(absent)]
    whole = config.model_dump(mode="json", include={name.partition(".")[0] for name in names})
    suites = whole.get("evaluation", {}).get("suites", ())
    for played in (whole.get("environment"), *whole.get("environments", ()), *suites):
        for name in _SUPERVISION if played else ():
            del played[name]
        if played and played["train"] == "policy":
            # As it was before there was a choice.
            del played["train"]
    for suite in suites:
        del suite["gate"], suite["curriculum"]
    if functions := whole.get("reward", {}).get("functions"):
        whole["reward"]["functions"] = _asked(functions, stage)
    if whole.get("guard") == "off":
        # Whoever looks on changes nothing.
        whole["guard"] = "warn"
    # An address decides nothing that is played.
    whole.get("rollout", {}).pop("gateway", None)
    if config.critic is None and (selector := whole.get("selector")):
        # As it was before there could be one.
        selector["stages"] = [each for each in selector["stages"] if each != "critic"]
    if (stages := whole.get("stages", {})).get("placement", "") is None:
        # Its default had a name before the selector could choose another.
        stages["placement"] = "colocated"
    for layout in (stages, *stages.get("changes", ())):
        if layout.get("update") and layout["update"]["expert_parallel"] == 1:
            # As it was before experts could be divided.
            del layout["update"]["expert_parallel"]
    for name, default in _LATER.items():
        section, _, key = name.rpartition(".")
        # There is no section where it is null.
        with suppress(KeyError, TypeError):
            if look_up(whole, section)[key] == default:
                del look_up(whole, section)[key]
    learnt = {
        f"environments.{key}": [each.pop(key) for each in whole.get("environments", ())]
        for key in _LEARNT
    }
    alone = (each for each in [whole.get("environment")] if each)
    learnt["environment.curriculum"] = [each.pop("curriculum") for each in alone]
    found: dict[str, Any] = {}
    for name in names:
        if any(value is not None for value in learnt.get(name, ())):
            found[name] = learnt[name]
    for name in set(names) - learnt.keys():
        section, _, key = name.rpartition(".")
        if name not in _LATER or key in look_up(whole, section):
            found[name] = look_up(whole, name)
    if (adapter := config.initial_model.adapter) is not None and _ADAPTER in found:
        found[_ADAPTER]["digest"] = adapter.source_digest
    return found


def _asked(functions: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    """The functions that a stage asks, without how long scores are waited for, which decides none
    of them. Evaluations wait for nobody."""
    found = []
    for each in functions:
        if each["function"] != LATER:
            found.append(each)
        elif stage != EVALUATION.name:
            kept = {key: each["options"][key] for key in each["options"] if key not in WAITING}
            found.append({**each, "options": kept})
    return found


_ADAPTER = "model.adapter"


def look_up(mapping: dict[str, Any], dotted: str) -> Any:
    """The setting of this dotted name; all of them of the empty one."""
    value: Any = mapping
    for part in filter(None, dotted.split(".")):
        value = value[part]
    return value
