"""The processor of this machine, as the kernel describes it; without torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    # Arm's name of them; no x86 processor has a flag of this name.
    "bf16": "Arm's BF16 instructions",
}
"""Flags of processors that multiply bf16 faster than float32, the fastest first."""

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables that keep torch from using what there is."""


def processor_name(root: Path = Path("/")) -> str:
    """Return the name of the first core; where the kernel does not say, the kind of its
    instructions."""
    names = _values(root, "model name", "CPU part")
    return names[0] if names else platform.machine()


def bf16_instructions(root: Path = Path("/")) -> str:
    """Name the instructions for bf16 that all cores have and torch may use, such as `AVX-512 BF16`;
    empty where there are none, or the kernel does not say: then only a measurement tells how fast
    bf16 is."""
    flags = [set(line.split()) for line in _values(root, "flags", "Features")]
    if not flags or instruction_limit():
        return ""
    common = set.intersection(*flags)
    return next((name for flag, name in _INSTRUCTIONS.items() if flag in common), "")


def instruction_limit() -> str:
    """Return the limits that the environment sets on torch's instructions; empty: none."""
    return " ".join(os.environ.get(name, "") for name in _LIMITS).strip()


def _values(root: Path, *keys: str) -> list[str]:
    """List the values of these keys over all cores; none where the kernel has no such file."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":")[::2] for line in lines)
    return [value.strip() for key, value in pairs if key.strip() in keys]
