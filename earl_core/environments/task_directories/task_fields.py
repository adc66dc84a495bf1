"""Fields of task directories that decide a result and are not done here, which are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earl_core.system.errors import ConfigError

_HARBOR = {
    "agent": {"timeout_sec", "user", "network_mode", "allowed_hosts"},
    "verifier": {
        "timeout_sec", "env", "user", "network_mode", "allowed_hosts", "environment",
        "environment_mode",
    },
    "environment": {
        "build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb", "storage",
        "gpus", "gpu_types", "allow_internet", "network_mode", "allowed_hosts", "mcp_servers",
        "skills_dir", "env", "workdir", "os", "tpu", "healthcheck",
    },
}  # fmt: skip
_ROOT = (None, "", "root", 0, "0")
_SERVICE = {
    "build", "image", "container_name", "command", "environment", "volumes", "tty", "stdin_open",
    "init",
}  # fmt: skip
_COMPOSE = "T_BENCH_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)


def check_harbor(
    directory: Path,
    said: Mapping[str, Any],
    agent: Mapping[str, Any],
    verifier: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    """Raise `ConfigError` for what a task.toml asks for that is not done."""
    sections = {"agent": agent, "verifier": verifier, "environment": environment}
    refused = {
        "several steps": said.get("steps"),
        "a verifier of its own environment": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "MCP servers": environment.get("mcp_servers"),
        "skills": environment.get("skills_dir"),
        "a health check": environment.get("healthcheck"),
        "a TPU": environment.get("tpu"),
        "GPUs": environment.get("gpus"),
        "Windows": str(environment.get("os", "linux")).lower() != "linux",
        "containers of environment/docker-compose.yaml": any(
            (directory / "environment" / f"{stem}.{end}").exists()
            for stem in ("docker-compose", "compose")
            for end in ("yaml", "yml")
        ),
        "no internet": environment.get("allow_internet", True) is not True,
    }
    for name, section in sections.items():
        mode = section.get("network_mode", "public")
        refused[f"{name}.network_mode {mode!r}"] = mode != "public"
        refused[f"{name}.allowed_hosts"] = section.get("allowed_hosts")
        user = section.get("user")
        refused[f"{name}.user {user!r}, another than root"] = user not in _ROOT
        for unknown in sorted(set(section) - _HARBOR[name]):
            refused[f"{name}.{unknown}"] = True
    for what, present in refused.items():
        if present:
            raise wrong(directory, f"asks for {what}, which is not done here", "leave it out")


def check_terminal_bench(directory: Path, said: Mapping[str, Any], compose: Any) -> None:
    """Raise `ConfigError` for what a task.yaml and its docker-compose.yaml ask for that is not
    done: any service but one that waits, as the template of Terminal-Bench has it."""
    if said.get("run_tests_in_same_shell"):
        told = "asks for run_tests_in_same_shell, which is not done here"
        raise wrong(directory, told, "leave it out")
    services = compose.get("services") if isinstance(compose, dict) else None
    if not isinstance(services, dict):
        return
    if len(services) > 1:
        told = f"has the services {', '.join(map(str, services))} in docker-compose.yaml"
        raise wrong(directory, f"{told}, and one is done here", "leave the task out")
    for name, service in services.items():
        for key, value in (service or {}).items():
            if not _as_the_template(key, value):
                told = f"gives its service {name} in docker-compose.yaml {key} {value!r:.80}"
                raise wrong(directory, f"{told}, which is not done here", "leave the task out")


def _as_the_template(key: str, value: Any) -> bool:
    if key == "command":
        words = value if isinstance(value, list) else [value]
        return " ".join(map(str, words)).endswith("sleep infinity")
    if key == "environment":
        pairs = value if isinstance(value, list) else [f"{k}={v}" for k, v in value.items()]
        return all(str(each).partition("=")[0] == "TEST_DIR" for each in pairs)
    if key == "volumes":
        return all(_COMPOSE in str(each) for each in value)
    if key == "build":
        named = value if isinstance(value, dict) else {"context": value}
        plain = {"context": (".", "./"), "dockerfile": ("Dockerfile", "./Dockerfile")}
        return all(each in plain and at in plain[each] for each, at in named.items())
    return key in _SERVICE


def megabytes(directory: Path, size: Any) -> int | None:
    """The memory of an older task.toml, such as "2G"."""
    if size is None:
        return None
    found = _SIZE.fullmatch(str(size).strip())
    if not found:
        raise wrong(directory, f"has environment.memory {size!r}", 'give it as "2G", or memory_mb')
    return max(int(float(found[1]) * 1024.0 ** ("KMGT".index(found[2].upper()) - 1)), 1)


def wrong(directory: Path, problem: str, remedy: str = "correct it") -> ConfigError:
    """Make the error of a task that cannot be played."""
    return ConfigError(f"the task directory {str(directory)!r} {problem}", remedy=remedy)
