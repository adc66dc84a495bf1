"""What a task directory says, of both forms, and what cannot be done with it.

Harbor: task.toml, instruction.md, environment/, tests/test.sh, and a reward that the tests write.
Terminal-Bench: task.yaml with the instruction, Dockerfile, tests/, run-tests.sh, whose exit code is
the reward.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

FORMS = ("task.toml", "task.yaml")
_AGENT_SECONDS, _TEST_SECONDS = 360.0, 60.0
_VERIFIER_SECONDS, _BUILD_SECONDS = 600.0, 600.0
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_OUTSIDE = ("tests", "solution.sh", "solution.yaml", "run-tests.sh", *FORMS)


@dataclass(frozen=True)
class Task:
    """One task. context: the folder that its image is built from; None: it has none. outside: names
    there that the agent must not see. image: a built one. workdir: None: the image's. rewards:
    whether its tests write a file, else their exit code tells. test: the script in `tests`, or
    beside it. variables: of the agent and the tests; test_variables: of the tests."""

    directory: Path
    instruction: str
    context: Path | None
    outside: tuple[str, ...]
    image: str | None
    workdir: str | None
    rewards: bool
    test: Path
    agent_seconds: float | None
    test_seconds: float
    build_seconds: float
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    cpus: float | None = None
    memory_mb: int | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def tests(self) -> Path:
        """Where its tests are."""
        return self.directory / "tests"


def read_task(directory: Path) -> Task:
    """Read a task directory. Raises `ConfigError`."""
    harbor = (directory / FORMS[0]).is_file()
    file = directory / FORMS[not harbor]
    try:
        text = file.read_text(encoding="utf-8")
        said = tomllib.loads(text) if harbor else _yaml(text)
    except (OSError, ValueError) as error:
        raise _wrong(directory, f"has an unreadable {file.name} ({_short(error)})") from None
    if not isinstance(said, dict):
        raise _wrong(directory, f"has a {file.name} that is no mapping")
    return _harbor(directory, said) if harbor else _terminal_bench(directory, said)


def _harbor(directory: Path, said: Mapping[str, Any]) -> Task:
    agent, verifier, environment = (
        _section(directory, said, name) for name in ("agent", "verifier", "environment")
    )
    refused = {
        "several steps": said.get("steps"),
        "a verifier of its own environment": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "MCP servers": environment.get("mcp_servers"),
        "a health check": environment.get("healthcheck"),
        "a TPU": environment.get("tpu"),
        "Windows": str(environment.get("os", "linux")).lower() != "linux",
    }
    for what, present in refused.items():
        if present:
            raise _wrong(directory, f"asks for {what}, which is not done here", "leave it out")
    file = directory / "instruction.md"
    if not file.is_file():
        raise _wrong(directory, "has no instruction.md", "add it, or leave the task out")
    context = directory / "environment"
    test = directory / "tests" / "test.sh"
    if not test.is_file():
        raise _wrong(directory, "has no tests/test.sh", "add it, or leave the task out")
    image = environment.get("docker_image")
    if not context.is_dir() and not image:
        raise _wrong(directory, "has neither environment/ nor a docker_image", "add one")
    return Task(
        directory=directory,
        instruction=_instruction(directory, _text(directory, file)),
        context=context if context.is_dir() else None,
        outside=(),
        image=image,
        workdir=environment.get("workdir"),
        rewards=True,
        test=test,
        agent_seconds=_seconds(directory, agent, "agent.timeout_sec", None),
        test_seconds=_seconds(directory, verifier, "verifier.timeout_sec", _VERIFIER_SECONDS)
        or _VERIFIER_SECONDS,
        build_seconds=_seconds(
            directory, environment, "environment.build_timeout_sec", _BUILD_SECONDS
        )
        or _BUILD_SECONDS,
        variables=_variables(directory, environment, "environment.env"),
        test_variables=_variables(directory, verifier, "verifier.env"),
        cpus=environment.get("cpus"),
        memory_mb=environment.get("memory_mb"),
    )


def _terminal_bench(directory: Path, said: Mapping[str, Any]) -> Task:
    test = directory / "run-tests.sh"
    if not test.is_file():
        raise _wrong(directory, "has no run-tests.sh", "add it, or leave the task out")
    _one_service(directory)
    return Task(
        directory=directory,
        instruction=_instruction(directory, said.get("instruction")),
        context=directory,
        outside=_OUTSIDE,
        image=None,
        workdir=None,
        rewards=False,
        test=test,
        agent_seconds=_seconds(directory, said, "max_agent_timeout_sec", _AGENT_SECONDS),
        test_seconds=_seconds(directory, said, "max_test_timeout_sec", _TEST_SECONDS)
        or _TEST_SECONDS,
        build_seconds=_BUILD_SECONDS,
        variables={},
        test_variables={"TEST_DIR": "/tests"},
    )


def _one_service(directory: Path) -> None:
    file = directory / "docker-compose.yaml"
    if not file.is_file():
        return
    try:
        said = _yaml(_text(directory, file))
    except ValueError as error:
        raise _wrong(directory, f"has an unreadable {file.name} ({_short(error)})") from None
    services = said.get("services") if isinstance(said, dict) else None
    if isinstance(services, dict) and len(services) > 1:
        told = f"has the services {', '.join(map(str, services))} in {file.name}"
        raise _wrong(directory, f"{told}, and one is done here", "leave the task out")


def _instruction(directory: Path, text: Any) -> str:
    """The instruction without the marks by which data sets are found, as Harbor leaves them out."""
    if not isinstance(text, str):
        raise _wrong(directory, "has no instruction", "add it, or leave the task out")
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.match(lines[0].strip())):
        del lines[0]
    if not lines:
        raise _wrong(directory, "has an empty instruction", "write it, or leave the task out")
    return "\n".join(lines)


def _section(directory: Path, said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = said.get(name, {})
    if not isinstance(section, dict):
        raise _wrong(directory, f"has a {name} in {FORMS[0]} that is no table")
    return section


def _seconds(
    directory: Path, section: Mapping[str, Any], path: str, otherwise: float | None
) -> float | None:
    value = section.get(path.rpartition(".")[2])
    if value is None:
        return otherwise
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise _wrong(directory, f"has {path} {value!r}", "give seconds above 0")
    return float(value)


def _variables(directory: Path, section: Mapping[str, Any], path: str) -> dict[str, str]:
    """Variables of a table, with ${NAME} and ${NAME:-default} filled in from this process's."""
    given = section.get("env", {})
    if not isinstance(given, dict):
        raise _wrong(directory, f"has {path} that is no table")

    def filled(match: re.Match[str]) -> str:
        value = os.environ.get(match[1], match[2])
        if value is None:
            told = f"needs the variable {match[1]} for {path}"
            raise _wrong(directory, told, "set it before the run begins")
        return value

    return {name: _VARIABLE.sub(filled, str(value)) for name, value in given.items()}


def _text(directory: Path, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _wrong(directory, f"has an unreadable {file.name} ({_short(error)})") from None


def _yaml(text: str) -> Any:
    yaml = import_package("yaml", "pyyaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _wrong(directory: Path, problem: str, remedy: str = "correct it") -> ConfigError:
    return ConfigError(f"the task directory {str(directory)!r} {problem}", remedy=remedy)
