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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earl_core.environments.task_directories.dockerfile import rooted
from earl_core.environments.task_directories.task_fields import (
    check_harbor,
    check_terminal_bench,
    megabytes,
    wrong,
)
from earl_core.system.import_path import import_package

FORMS = ("task.toml", "task.yaml")
_AGENT_SECONDS, _TEST_SECONDS = 360.0, 60.0
_VERIFIER_SECONDS, _BUILD_SECONDS = 600.0, 600.0
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")
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


def read_task(directory: Path, passed: Collection[str] = ()) -> Task:
    """Read a task directory. passed: variables of this process that it may ask for. Raises
    `ConfigError`."""
    harbor = (directory / FORMS[0]).is_file()
    file = directory / FORMS[not harbor]
    try:
        text = file.read_text(encoding="utf-8")
        said = tomllib.loads(text) if harbor else _yaml(text)
    except (OSError, ValueError) as error:
        raise wrong(directory, f"has an unreadable {file.name} ({_short(error)})") from None
    if not isinstance(said, dict):
        raise wrong(directory, f"has a {file.name} that is no mapping")
    _check_links(directory)
    return _harbor(directory, said, passed) if harbor else _terminal_bench(directory, said)


def _harbor(directory: Path, said: Mapping[str, Any], passed: Collection[str]) -> Task:
    agent, verifier, environment = (
        _section(directory, said, name) for name in ("agent", "verifier", "environment")
    )
    check_harbor(directory, said, agent, verifier, environment)
    file = directory / "instruction.md"
    if not file.is_file():
        raise wrong(directory, "has no instruction.md", "add it, or leave the task out")
    context = directory / "environment"
    test = directory / "tests" / "test.sh"
    if not test.is_file():
        raise wrong(directory, "has no tests/test.sh", "add it, or leave the task out")
    image = environment.get("docker_image")
    if not context.is_dir() and not image:
        raise wrong(directory, "has neither environment/ nor a docker_image", "add one")
    return Task(
        directory=directory,
        instruction=_instruction(directory, _text(directory, file)),
        context=context if context.is_dir() else None,
        outside=(),
        image=image,
        workdir=_workdir(directory, environment.get("workdir")),
        rewards=True,
        test=test,
        agent_seconds=_seconds(directory, agent, "agent.timeout_sec", None),
        test_seconds=_seconds(directory, verifier, "verifier.timeout_sec", _VERIFIER_SECONDS)
        or _VERIFIER_SECONDS,
        build_seconds=_seconds(
            directory, environment, "environment.build_timeout_sec", _BUILD_SECONDS
        )
        or _BUILD_SECONDS,
        variables=_variables(directory, environment, "environment.env", passed),
        test_variables=_variables(directory, verifier, "verifier.env", passed),
        cpus=environment.get("cpus"),
        memory_mb=environment.get("memory_mb") or megabytes(directory, environment.get("memory")),
    )


def _terminal_bench(directory: Path, said: Mapping[str, Any]) -> Task:
    test = directory / "run-tests.sh"
    if not test.is_file():
        raise wrong(directory, "has no run-tests.sh", "add it, or leave the task out")
    compose = directory / "docker-compose.yaml"
    try:
        services = _yaml(_text(directory, compose)) if compose.is_file() else None
    except ValueError as error:
        raise wrong(directory, f"has an unreadable {compose.name} ({_short(error)})") from None
    check_terminal_bench(directory, said, services)
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


def _check_links(directory: Path) -> None:
    """Raise `ConfigError` where a test or a solution lies elsewhere: agents would see it, and tests
    are copied to a place where the link leads nowhere."""
    tests, secret = directory / "tests", ("solution", "solution.sh", "solution.yaml")
    inside = {tests: directory, directory / "run-tests.sh": directory}
    inside |= {directory / name: directory for name in secret}
    for folder, bound in ((tests, tests), (directory / "solution", directory)):
        for above, folders, files in os.walk(folder):
            inside |= {Path(above, each): bound for each in (*folders, *files)}
    for path, bound in inside.items():
        if path.is_symlink():
            away = not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(bound))
            if away or (bound == tests and os.path.isabs(os.readlink(path))):
                raise wrong(
                    directory,
                    f"has the link {path.relative_to(directory)}, which leads out of {bound.name}/",
                    "put a copy in its place (cp -rL copies a folder so)",
                )


def _workdir(directory: Path, given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.startswith("/"):
        raise wrong(directory, f"has environment.workdir {given!r}", "give an absolute path")
    return rooted(given)


def _instruction(directory: Path, text: Any) -> str:
    """The instruction without the marks by which data sets are found, as Harbor leaves them out."""
    if not isinstance(text, str):
        raise wrong(directory, "has no instruction", "add it, or leave the task out")
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.match(lines[0].strip())):
        del lines[0]
    if not lines:
        raise wrong(directory, "has an empty instruction", "write it, or leave the task out")
    return "\n".join(lines)


def _section(directory: Path, said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = said.get(name, {})
    if not isinstance(section, dict):
        raise wrong(directory, f"has a {name} in {FORMS[0]} that is no table")
    return section


def _seconds(
    directory: Path, section: Mapping[str, Any], path: str, otherwise: float | None
) -> float | None:
    value = section.get(path.rpartition(".")[2])
    if value is None:
        return otherwise
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise wrong(directory, f"has {path} {value!r}", "give seconds above 0")
    return float(value)


def _variables(
    directory: Path, section: Mapping[str, Any], path: str, passed: Collection[str]
) -> dict[str, str]:
    """Variables of a table, with ${NAME} and ${NAME:-default} filled in from those that are
    passed."""
    given = section.get("env", {})
    if not isinstance(given, dict) or not all(_NAME.fullmatch(each) for each in given):
        raise wrong(directory, f"has {path} that is no table of variables")

    def filled(match: re.Match[str]) -> str:
        known = match[1] in passed
        value = os.environ.get(match[1], match[2]) if known else match[2]
        if value is None:
            told = f"needs the variable {match[1]} for {path}"
            remedy = "set it before the run begins"
            if not known:
                told += ", which is not among pass_variables"
                remedy = "name it there if the task may know it, or leave the task out"
            raise wrong(directory, told, remedy)
        return value

    return {name: _VARIABLE.sub(filled, str(value)) for name, value in given.items()}


def _text(directory: Path, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise wrong(directory, f"has an unreadable {file.name} ({_short(error)})") from None


def _yaml(text: str) -> Any:
    yaml = import_package("yaml", "pyyaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
