"""Task directories, options and Dockerfiles that are read, or refused before work."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import check
from earl_core.environments.task_directories.docker_runtime import executed, started
from earl_core.environments.task_directories.dockerfile import read_image
from earl_core.environments.task_directories.environment import read_tasks
from earl_core.system.errors import ConfigError
from tests.rollout.test_task_directories import COMMAND, SOLVED, TIMES, harbor, terminal_bench


def _removed(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _said(text: str, name: str = "task.toml") -> Any:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_removed("instruction.md"), "has no instruction.md"),
        (_said("  \n", "instruction.md"), "has an empty instruction"),
        (_removed("tests/test.sh"), "has no tests/test.sh"),
        (_said("version = "), "has an unreadable task.toml .Invalid value"),
        (_said("[agent]\ntimeout_sec = '5 min'"), "has agent.timeout_sec '5 min': give seconds"),
        (_said("[verifier]\ntimeout_sec = -1"), "has verifier.timeout_sec -1: give seconds"),
        (_said("[[steps]]\nname = 'one'"), "asks for several steps, which is not done"),
        (_said("[environment]\nos = 'windows'"), "asks for Windows"),
        (_said("[verifier]\nenv = {A = '${NO_SUCH}'}"), "needs the variable NO_SUCH"),
        (_said("[environment]\ndocker_image = 'x'"), "needs the image 'x'.*use runtime: docker"),
        (_removed("task.toml"), "has neither task.toml nor task.yaml"),
        (_said("FROM x\nRUN apt-get install y\n", "environment/Dockerfile"), "runs 'apt-get inst"),
        (_said("FROM x\nCOPY no .\n", "environment/Dockerfile"), "copies 'no', which its folder"),
        (_said("FROM x\nCOPY --from=a b .\n", "environment/Dockerfile"), "has COPY --from=a"),
        (_said("instruction: [", "task.yaml"), "asks for"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_before_work(
    tmp_path: Path, change: Any, message: str
) -> None:
    task = harbor(tmp_path / "tasks" / "one", "nothing", SOLVED)
    if message == "asks for":
        task = terminal_bench(tmp_path / "tasks" / "two", "nothing", "true")
        message = "has an unreadable task.yaml"
    change(task)
    options = {"path": str(tmp_path / "tasks"), "command": COMMAND}
    with pytest.raises(ConfigError, match=message):
        check("agent:task_directories", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["no-such-program"]}, "names no program 'no-such-program'"),
        ({"path": "nowhere"}, "the folder of tasks 'nowhere' does not exist"),
        ({"only": ["x"]}, "has no task directory that is played"),
        ({"network": "host"}, "are for the runtime docker"),
        ({"timeout_multiplier": 0}, "timeout_multiplier is not above 0"),
        ({"command": ["sh", "{tasks}/one/agent.sh"]}, "lies in the task directory"),
    ],
)
def test_options_are_checked_before_work(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    task = harbor(tmp_path / "one", "nothing", SOLVED)
    (task / "agent.sh").touch()
    given = {"path": str(tmp_path), "command": COMMAND, **options}
    given["command"] = [each.format(tasks=tmp_path) for each in given["command"]]
    with pytest.raises(ConfigError, match=message):
        check("agent:task_directories", given)


def test_limits_of_tasks_beyond_that_of_the_episode_are_refused(tmp_path: Path) -> None:
    harbor(tmp_path / "one", "nothing", SOLVED, TIMES.format(500, 300))
    options = {"path": str(tmp_path), "command": COMMAND}
    pool = EnvironmentPool("agent:task_directories", options, step_timeout_seconds=600.0)

    async def start() -> None:
        try:
            await pool.start()
        finally:
            await pool.stop()

    with pytest.raises(ConfigError, match=r"may take 800 s .*episode_timeout_seconds to 800"):
        asyncio.run(start())


def test_a_dockerfile_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    for name in ("one.py", "two.py", "data/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "Dockerfile").write_text(
        'FROM a\nWORKDIR /lost\nRUN lost\nFROM b\nARG WHERE=/srv\nENV A=1 B="x ${WHERE:-y}"\n'
        "ENV PATH=/opt/bin:$PATH\nWORKDIR ${WHERE}/app\nWORKDIR sub\nRUN <<EOF\nCOPY not one\nEOF\n"
        "RUN apt-get update && \\\n    # a comment\n    apt-get install x\n"
        'COPY *.py ./\nCOPY ["one.py", "/etc/single"]\nADD data /data\n'
    )
    image = read_image(tmp_path, "/bin")
    assert image.workdir == "/srv/app/sub"
    assert image.variables == {"A": "1", "B": "x /srv", "PATH": "/opt/bin:/bin"}
    assert image.commands == ["<<EOF", "apt-get update && apt-get install x"]
    assert [(each.name, path) for each, path in image.copies] == [
        ("one.py", "/srv/app/sub/one.py"), ("two.py", "/srv/app/sub/two.py"),
        ("one.py", "/etc/single"), ("data", "/data"),
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not here")
def test_dockers_client_takes_the_arguments(tmp_path: Path) -> None:
    """There is no daemon: a client that does not know an argument says so before it looks."""
    toml = TIMES.format(5, 5) + "[environment]\ncpus = 1\nmemory_mb = 64\n"
    (task,) = read_tasks(harbor(tmp_path / "one", "nothing", SOLVED, toml))
    folder = tmp_path / "one" / "environment"
    (folder / "Dockerfile").write_text("FROM x\n")
    calls = [
        started("name", "image", task, "host", ["/a:/b"]),
        executed("name", ["sh", "-c", "true"], {"A": "b"}, "/app"),
        ["build", "--quiet", "--tag", "x", str(folder)],
        ["rm", "--force", "--volumes", "name"],
    ]
    away = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    for words in calls:
        done = subprocess.run(
            ["docker", *words], env=away, capture_output=True, text=True, check=False
        )
        assert done.returncode
        assert "nowhere.sock" in done.stderr, done.stderr
        assert "unknown flag" not in done.stderr
