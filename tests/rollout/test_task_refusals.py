"""Task directories, options and Dockerfiles that are read, or refused before work."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.rank_process import WorkerContext
from earl_core.config import parse_config
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import check
from earl_core.environments.task_directories.docker_runtime import executed, lines_of, started
from earl_core.environments.task_directories.dockerfile import read_image
from earl_core.environments.task_directories.environment import read_tasks
from earl_core.environments.task_directories.hidden import hidden_paths
from earl_core.environments.task_directories.root import fill
from earl_core.run.worker import RunWorker
from earl_core.system.errors import ConfigError
from tests.rollout.test_task_directories import COMMAND, SOLVED, TIMES, harbor, terminal_bench


def _removed(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _said(text: str, name: str = "task.toml") -> Any:
    return lambda folder: (folder / name).write_text(text)


def _linked(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).symlink_to(folder.parent / "blob")

    return change


def _service(says: str) -> Any:
    text = f"services:\n  client:\n    image: x\n    {says}\n"
    return _said(text, "docker-compose.yaml")


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
        (
            _said("[verifier]\nenv = {A = '${HOME}'}"),
            "needs the variable HOME .*not among pass_variables: name it there",
        ),
        (_said("[verifier]\nenv = {A = '${NO_SUCH}'}"), "needs the variable NO_SUCH for verifier"),
        (_said("[environment]\nenv = {'A B' = ''}"), "no table of variables"),
        (_said("[environment]\nworkdir = 'app'"), "workdir 'app': give an absolute path"),
        (_said("[environment]\nallow_internet = false"), "asks for no internet"),
        (_said("[environment]\ngpus = 1"), "asks for GPUs"),
        (_said("[environment]\nmemory = 'much'"), "has environment.memory 'much'"),
        (_said("[agent]\nnetwork_mode = 'no-network'"), "agent.network_mode 'no-network'"),
        (_said("[agent]\nallowed_hosts = ['x']"), "asks for agent.allowed_hosts"),
        (_said("[agent]\nuser = 'me'"), "asks for agent.user 'me', another than root"),
        (_said("[verifier]\nuser = 1000"), "asks for verifier.user 1000"),
        (_said("[verifier]\nretries = 2"), "asks for verifier.retries, which is not done"),
        (_said("services: {}", "environment/docker-compose.yaml"), "environment/docker-compose"),
        (_said("x", "environment/.dockerignore"), "has a .dockerignore"),
        (_linked("tests/data"), "has the link tests/data, which leads out of tests/: put a copy"),
        (_linked("solution/solve.sh"), "has the link solution/solve.sh, which leads out"),
        (_said("[environment]\ndocker_image = 'x'"), "needs the image 'x'.*use runtime: docker"),
        (_removed("task.toml"), "has neither task.toml nor task.yaml"),
        (_said("FROM x\nRUN apt-get install y\n", "environment/Dockerfile"), "runs 'apt-get inst"),
        (_said("FROM x\nCOPY no .\n", "environment/Dockerfile"), "copies 'no', which its folder"),
        (_said("FROM x\nCOPY --from=a b .\n", "environment/Dockerfile"), "has COPY --from=a"),
        (_said("FROM x\nCOPY up/x .\n", "environment/Dockerfile"), "through a link out of its"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_before_work(
    tmp_path: Path, change: Any, message: str
) -> None:
    task = harbor(tmp_path / "tasks" / "one", "nothing", SOLVED)
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "x").touch()
    (task / "environment" / "up").symlink_to(tmp_path / "up")
    change(task)
    options = {"path": str(tmp_path / "tasks"), "command": COMMAND}
    with pytest.raises(ConfigError, match=message):
        check("agent:task_directories", options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_said("instruction: [", "task.yaml"), "has an unreadable task.yaml"),
        (
            _said("instruction: x\nrun_tests_in_same_shell: true", "task.yaml"),
            "run_tests_in_same_shell, which is not done",
        ),
        (_linked("tests/run-tests.sh"), "has the link tests/run-tests.sh, which leads out"),
        (_service("working_dir: /x"), "working_dir '/x', which is not done here"),
        (_service("command: [serve]"), "command .'serve'., which"),
        (_service("environment: [TEST_DIR=x, A=b]"), "environment .*'A=b'., which"),
        (_service("build: {dockerfile: Other}"), "build .'dockerfile': 'Other'., which"),
        (_service("volumes: ['/data:/data']"), "volumes .'/data:/data'., which"),
    ],
)
def test_a_task_of_terminal_bench_that_cannot_be_played_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    task = terminal_bench(tmp_path / "one", "nothing", "true")
    change(task)
    with pytest.raises(ConfigError, match=message):
        read_tasks(tmp_path)


def test_what_tasks_say_otherwise_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_HOST", "given")
    task = harbor(
        tmp_path / "one",
        "nothing",
        SOLVED,
        "[agent]\nuser = 'root'\n[environment]\nmemory = '2G'\nallow_internet = true\n"
        "workdir = '/../../x'\n[environment.env]\nA = '${OF_HOST:-else}'\n",
    )
    (task / "tests" / "same").symlink_to("test.sh")
    terminal_bench(tmp_path / "two", "nothing", "true")
    _service(
        "build: {dockerfile: Dockerfile}\n    command: [sh, -c, sleep infinity]\n"
        "    environment: ['TEST_DIR=${T_BENCH_TEST_DIR}']\n    volumes: ['${T_BENCH_A}:/b']"
    )(tmp_path / "two")
    one, _ = read_tasks(tmp_path)
    assert (one.workdir, one.memory_mb, one.variables) == ("/x", 2048, {"A": "else"})
    assert read_tasks(tmp_path, passed=["OF_HOST"])[0].variables == {"A": "given"}


def test_a_copy_writes_nothing_outside_of_its_root(tmp_path: Path) -> None:
    away, root = tmp_path / "away", tmp_path / "root"
    away.mkdir()
    (away / "file").write_text("the host's")
    task = harbor(tmp_path / "tasks" / "one", "nothing", SOLVED)
    context = task / "environment"
    for name, target in (("a/x", away), ("a/f", away / "file"), ("c/d/d", away / "file")):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).symlink_to(target)
    for name in ("b/x/pwned", "e/f", "g/d"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("of the task")

    def filled(*copies: str) -> None:
        (context / "Dockerfile").write_text("\n".join(["FROM x", *copies]))
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        fill(root, read_tasks(task)[0], read_image(context, None), threading.Event())

    for copies in (
        ("COPY a/ /app/", "COPY b/x/pwned /app/x/"),
        ("COPY a/ /app/", "COPY b/ /app/"),
        ("COPY a/ /", "COPY e/f /x/deep/f"),
    ):
        with pytest.raises(ConfigError, match=r"through a link to .*have its Dockerfile copy"):
            filled(*copies)
    with pytest.raises(OSError, match="to what is a folder"):
        filled("COPY c/ /app/", "COPY g/ /app/")
    filled("COPY a/ /app/", "COPY e/ /app/", "WORKDIR //away")
    assert (root / "app" / "f").read_text() == "of the task"
    assert (root / "away").is_dir()
    assert [each.name for each in away.iterdir()] == ["file"]
    assert (away / "file").read_text() == "the host's"


def test_what_agents_must_not_read_is_known_from_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EARL_PRIVATE_PATHS", "")
    secret = ["home/.ssh/id", "gateway.key", "token", "runs/x/serve.key", "repository/.git/HEAD"]
    for file in secret:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    tasks = tmp_path / "repository" / "tasks"
    for name in ("one", "held-out"):
        harbor(tasks / name, "nothing", SOLVED)
    given = {
        "name": "x", "iterations": 1, "runs_directory": str(tmp_path / "runs"),
        "model": {"path": "x"},
        "environment": {
            "agent": "program",
            "options": {"command": ["true"], "variables": {"KEY": f"file:{tmp_path / 'token'}"}},
        },
        "rollout": {
            "prompts_per_iteration": 1, "group_size": 2, "max_turns": 1,
            "gateway": {
                "public_url": "https://x:{port}", "certfile": "x",
                "keyfile": str(tmp_path / "gateway.key"),
            },
        },
    }  # fmt: skip
    dumped = parse_config(given).model_dump(mode="json")
    context = WorkerContext(0, 1, "rollout", tmp_path / "log")
    run = str(tmp_path / "runs" / "x")
    RunWorker(context, StageDeployment("rollout")._asdict(), config=dumped, run_directory=run)
    private = {"home/.ssh", "gateway.key", "token", "runs", "runs/x", "repository/.git"}
    named = {f"repository/tasks/{each}" for each in ("one", "held-out")}

    def hidden(needed: str) -> set[str]:
        found = map(Path, hidden_paths(tasks, [str(tmp_path / needed)]))
        return {str(each.relative_to(tmp_path)) for each in found if tmp_path in each.parents}

    assert hidden("agent.py") == private | named | {"repository/tasks"}
    assert hidden("repository/tasks/agent.py") == private | named
    for needed, told in (
        ("repository/tasks/held-out/x", "lies in the task directory .*must not see: move it out"),
        ("runs/x", "runs', whose secrets it must not see: move it out, choose another runs_dir"),
    ):
        with pytest.raises(ConfigError, match=told):
            hidden(needed)


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
def test_a_variable_of_several_lines_is_refused_for_docker(tmp_path: Path) -> None:
    toml = TIMES.format(5, 5) + '[environment.env]\nA = "b\\nHOME"\n'
    harbor(tmp_path / "one", "nothing", SOLVED, toml)
    options = {"path": str(tmp_path), "command": COMMAND, "runtime": "docker"}
    with pytest.raises(ConfigError, match=r"the variable A .* has several lines"):
        check("agent:task_directories", options)


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not here")
def test_dockers_client_takes_the_arguments(tmp_path: Path) -> None:
    """There is no daemon: a client that does not know an argument says so before it looks."""
    toml = TIMES.format(5, 5) + "[environment]\ncpus = 1\nmemory_mb = 64\n"
    (task,) = read_tasks(harbor(tmp_path / "one", "nothing", SOLVED, toml))
    folder = tmp_path / "one" / "environment"
    (folder / "Dockerfile").write_text("FROM x\n")
    variables = tmp_path / "variables"
    variables.write_text(lines_of({"A": "b c=d"}))
    calls = [
        started("name", "image", task, "host", ["/a:/b"]),
        executed("name", ["sh", "-c", "true"], str(variables), "/app"),
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
