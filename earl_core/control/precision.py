"""The value of `auto` for `rollout.dtype` and `update.precision`: decided once for a run, by its
hosts.

A run keeps what it began with, whatever machine it goes on with: another precision would repeat
the stages of an iteration under way, and mix two kinds of log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from earl_core.cluster.host import Host, local_hosts
from earl_core.config import RunConfig
from earl_core.control.device_figures import cores_of, distinct, with_figures
from earl_core.control.hardware import hardware_of
from earl_core.run import RunDirectory
from earl_core.run.record import RunDamaged, read_record
from earl_core.selector.model.devices import is_known

logger = logging.getLogger(__name__)

SETTINGS = ("rollout.dtype", "update.precision")
"""Settings that may be `auto`; the reference follows the second."""

_LEAST_CAPABILITY = 8.0
"""Compute capability of the first GPUs with units for bf16 (Ampere)."""


class Verdict(NamedTuple):
    """A judgement of a device. fast: true when bf16 takes no longer than float32. why: a noun
    phrase. factor: time of bf16 as a multiple of the time of float32; 0: its instructions say
    enough."""

    fast: bool
    why: str
    factor: float = 0.0


class Decision(NamedTuple):
    """The value that `auto` stands for. why: a clause. factor: of the slowest device, as in
    `Verdict`."""

    precision: Literal["bf16", "fp32"]
    why: str
    factor: float = 0.0

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """Number format of the engine."""
        return "bfloat16" if self.precision == "bf16" else "float32"


class Resolved(NamedTuple):
    """config: without `auto`. decision: None where nobody had to look. said: lines about it."""

    config: RunConfig
    decision: Decision | None
    said: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def tell(self, say: Callable[[str], object]) -> None:
        """Say what was chosen and why; warn of what is slow."""
        for text in self.said:
            say(text)
        for text in self.warnings:
            logger.warning("%s", text)

    def keep(self, run: RunDirectory) -> None:
        """Have the run's record say what it begins with, and why."""
        if self.decision is not None and "precision" not in run.record:
            auto, why, factor = self.decision
            seen = {"auto": auto, "why": why, "bf16_factor": round(factor, 2)}
            run.update_record(precision={**_both(self.config), **seen})


def resolved(
    config: RunConfig,
    hosts: Sequence[Host] = (),
    run: Path | None = None,
    settings: Sequence[str] = SETTINGS,
) -> Resolved:
    """The configuration with what `auto` is: in a run that exists what it began with, else what all
    hosts compute fast. Warns of bf16 that is slow here, whoever chose it.

    hosts: none: this machine. run: its directory. settings: those of `SETTINGS` that matter. Raises
    what worker groups raise, if a device has to be measured.
    """
    began = _began(run) if run is not None else {}
    given = {name: value for name, value in _both(config).items() if name in settings}
    kept = {name: began[name] for name, v in given.items() if v == "auto" and name in began}
    config, given = _with(config, kept), given | kept
    named = [name for name, value in given.items() if value in ("bf16", "bfloat16")]
    if "auto" not in given.values() and not named:
        return Resolved(config, None, _kept_text(kept))
    decision = decide(hosts or local_hosts(1))
    values = dict(zip(SETTINGS, (decision.dtype, decision.precision), strict=True))
    chosen = {name: values[name] for name, value in given.items() if value == "auto"}
    said = list(_kept_text(kept))
    if chosen:
        told = ", ".join(f"{name} {value}" for name, value in chosen.items())
        said.append(f"{told}: {decision.why}")
    slow = [_slow_text(named, decision)] if named and decision.precision == "fp32" else []
    return Resolved(_with(config, chosen), decision, tuple(said), tuple(slow))


def decide(hosts: Sequence[Host]) -> Decision:
    """One decision for all hosts: bf16 where each of them computes it fast. Raises what worker
    groups raise, if one has to be measured."""
    found = [(host, judge(host)) for host in distinct(hosts)]
    slow = [(host, verdict) for host, verdict in found if not verdict.fast]
    factor = max(verdict.factor for _, verdict in found)
    if not slow:
        return Decision("bf16", found[0][1].why, factor)
    host, verdict = max(slow, key=lambda each: each[1].factor)
    if len(slow) == len(found):
        return Decision("fp32", verdict.why, factor)
    fast = next(host.name for host, verdict in found if verdict.fast)
    why = f"one precision for all hosts, and {host.name} is unlike {fast}: {verdict.why}"
    return Decision("fp32", why, factor)


def judge(host: Host) -> Verdict:
    """Judge whether a host's devices compute bf16 fast, by what they say of themselves, else by
    timed products. Raises what worker groups raise."""
    site = host.resources
    if not site.gpus:
        if site.bf16:
            return Verdict(True, f"the processor has {site.bf16}")
        return _timed(cores_of(host).bf16_factor, f"the processor ({site.processor})")
    hardware = hardware_of([host])
    if is_known(hardware) or site.gpu_capability >= _LEAST_CAPABILITY:
        return Verdict(True, f"{site.gpu_name} has units for bf16")
    figures = with_figures(hardware, [host]).figures
    assert figures is not None
    return _timed(figures.bf16_factor, site.gpu_name)


def _timed(factor: float, device: str) -> Verdict:
    if factor <= 1.0:
        return Verdict(True, f"bf16 products take no longer than float32's on {device}", factor)
    why = f"bf16 products take {factor:.3g} times as long as float32's on {device}"
    return Verdict(False, why, factor)


def _both(config: RunConfig) -> dict[str, str]:
    values = config.rollout.dtype, config.update.precision
    return dict(zip(SETTINGS, values, strict=True))


def _with(config: RunConfig, values: Mapping[str, str]) -> RunConfig:
    for name, value in values.items():
        section, _, key = name.partition(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def _began(run: Path) -> dict[str, str]:
    """Return the settings that a run was last worked with; nothing of one that has not begun."""
    settings: dict[str, Any] = {}
    # Whoever opens the run says what is wrong with it.
    with suppress(FileNotFoundError, RunDamaged):
        settings = read_record(run).get("settings", {})
    found = {
        "rollout.dtype": settings.get("rollout", {}).get("dtype", "auto"),
        "update.precision": settings.get("update", {}).get("precision", "auto"),
    }
    return {name: value for name, value in found.items() if value != "auto"}


def _kept_text(kept: Mapping[str, str]) -> tuple[str, ...]:
    values = ", ".join(f"{name} {value}" for name, value in kept.items())
    return (f"{values}: as the run began",) if kept else ()


def _slow_text(named: Sequence[str], decision: Decision) -> str:
    faster = {"rollout.dtype": "float32", "update.precision": "fp32"}
    remedy = " ".join(f"--set {name}={faster[name]}" for name in named)
    are = f"{' and '.join(named)} {'are' if len(named) > 1 else 'is'} bf16"
    return f"{are}, which is slow here: {decision.why}; faster with {remedy}"
