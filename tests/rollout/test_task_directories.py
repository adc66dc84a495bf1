"""Task directories, unchanged, played through the gateway by a program."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from earl_core.environments.hosting.pool import write_host_archive
from earl_core.environments.registry import check
from earl_core.environments.task_directories import scratch
from earl_core.environments.task_directories.environment import read_tasks
from earl_core.system.errors import ConfigError
from earl_core.system.private_paths import note_private
from earl_core.trajectory.samples import Episode
from tests.environments.test_pool import until
from tests.rollout.asking import answering, limits
from tests.rollout.test_gateway import played

OTHER_USER = 61234
SYSTEM_PYTHON = "/usr/bin/python3"
SLEEPS = ("3610", "3611", "3612")
AGENT = str(Path(__file__).with_name("task_agent.py"))
COMMAND = [sys.executable, "-S", AGENT]
SOLVED = "test -f solved.txt && echo 1 > /logs/verifier/reward.txt"
TIMES = "[agent]\ntimeout_sec = {}\n[verifier]\ntimeout_sec = {}\n"


def harbor(folder: Path, does: str, test: str, toml: str = TIMES.format(20, 20)) -> Path:
    """A task of Harbor's form without a Dockerfile."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f'version = "1.0"\n{toml}')
    (folder / "instruction.md").write_text(f"<!-- canary 1 -->\n\n{does}\n")
    (folder / "environment" / "given.txt").write_text("given")
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    return folder


def terminal_bench(folder: Path, does: str, test: str) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text(
        f"instruction: |-\n  {does}\nparser_name: pytest\nmax_test_timeout_sec: 20\n"
        "max_agent_timeout_sec: 20\n"
    )
    (folder / "Dockerfile").write_text("FROM x\nWORKDIR /home/made/here\nCOPY . .\n")
    (folder / "docker-compose.yaml").write_text("services:\n  client:\n    image: x\n")
    (folder / "run-tests.sh").write_text(f"{test}\n")
    (folder / "solution.sh").touch()
    (folder / "tests" / "test_outputs.py").touch()
    return folder


def play(tasks: Path, seconds: float = 60.0, **options: Any) -> dict[str, Episode]:
    """One episode of each task, by its name."""
    return asyncio.run(playing(tasks, seconds, **options))


async def playing(tasks: Path, seconds: float = 60.0, **options: Any) -> dict[str, Episode]:
    count = len([each for each in tasks.iterdir() if each.is_dir()])
    given = {"path": str(tasks), "command": COMMAND, **options}
    settings = limits(max_failed_share=1.0)
    asked = played(answering(), "task_directories", 2 * count, settings, given, seconds)
    found, _, _ = await asked
    names = sorted(each.name for each in tasks.iterdir() if each.is_dir())
    return dict(zip(names, found[::2], strict=True))


@pytest.fixture
def no_namespaces(tmp_path: Path) -> None:
    harbor(tmp_path / "probe" / "one", "nothing", SOLVED)
    try:
        check("agent:task_directories", {"path": str(tmp_path / "probe"), "command": COMMAND})
    except ConfigError as error:
        if "user namespaces" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.usefixtures("no_namespaces")
def test_tests_say_the_reward_and_what_they_do_wrong_costs_their_own_episode(
    tmp_path: Path,
) -> None:
    tests = {
        "exit 1": "exit 1",
        "float": "echo ' 0.25 ' > /logs/verifier/reward.txt",
        "is slow": "sleep 3610",
        "infinite": "echo inf > /logs/verifier/reward.txt",
        "json": """echo '{"reward": 0.5, "speed": 3}' > /logs/verifier/reward.json""",
        "nan": "echo NaN > /logs/verifier/reward.txt",
        "number": "echo 1 > /logs/verifier/reward.json",
        "several": """echo '{"one": 1, "two": 2}' > /logs/verifier/reward.json""",
        "solved": SOLVED,
        "words": "echo well done > /logs/verifier/reward.txt",
    }
    tasks = tmp_path / "tasks"
    for name, test in tests.items():
        harbor(tasks / name, name, test, TIMES.format(20, 1 if name == "is slow" else 20))
    found = play(tasks)
    rewards = {"float": 0.25, "is slow": 0.0, "json": 0.5, "number": 1.0, "solved": 1.0}
    for name, reward in rewards.items():
        assert (found[name].finish_reason, found[name].total_reward) == ("done", reward), name
        assert found[name].samples[0].tokens
    assert found["is slow"].info["outcome"] == "tests_timed_out"
    assert found["json"].info["metrics"]["speed"] == 3
    assert found["solved"].info["outcome"] == "passed"
    failures = {name: str(each.info.get("failure")) for name, each in found.items()}
    for name, told in {
        "exit 1": "wrote neither reward.txt nor reward.json to /logs/verifier; exit code 1",
        "infinite": "inf is no finite number",
        "nan": "nan is no finite number",
        "several": "has several numbers, one, two, and no `reward`",
        "words": "could not convert string to float",
    }.items():
        assert found[name].finish_reason == "environment_error"
        assert told in failures[name], failures[name]
    check_nothing_is_left()


LOOK = """
import json, pathlib
found = json.loads(pathlib.Path('/logs/agent/found.json').read_text())
wanted = json.loads({!r})
wrong = {{key: found[key] for key in wanted if found[key] != wanted[key]}}
assert found['processes'] < 9 and not found['written'], found
assert not wrong, wrong
pathlib.Path('/logs/verifier/reward.txt').write_text('1')
"""


def lay_out(environment: Path) -> None:
    """Give a task binary files, names with spaces, links, programs and two stages."""
    (environment / "given.txt").unlink()
    (environment / "files" / "deep folder").mkdir(parents=True)
    (environment / "files" / "a b.bin").write_bytes(bytes([0, 255, 10]))
    (environment / "files" / "link").symlink_to("a b.bin")
    (environment / "tool").write_text("#!/bin/sh\necho it runs\n")
    (environment / "tool").chmod(0o755)
    (environment / "Dockerfile").write_text(
        "# a comment\nFROM debian AS base\nFROM base\nENV OF_IMAGE='two words' \\\n  OTHER=x\n"
        "WORKDIR /app\nCOPY --chown=root files/ .\nCOPY tool /bin/\nCMD ['x']\n"
    )


@pytest.mark.usefixtures("no_namespaces")
def test_an_agent_has_the_files_of_its_task_and_sees_no_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder where the run began is shown, and in it that of the tasks is not.
    (tmp_path / "begun").mkdir()
    tasks = tmp_path / "begun" / "tasks"
    monkeypatch.chdir(tmp_path / "begun")
    monkeypatch.setenv("OF_THE_TRAINER", "SESAME")
    tasks.mkdir()
    # What the agent could read otherwise: a task that lies elsewhere, the tests' history, secrets.
    linked = harbor(tasks.parent / "elsewhere" / "linked", "solves", SOLVED)
    (tasks / "linked").symlink_to(linked)
    for file in ("history/config", "runs/one/serve.key", "gateway.key", "open.txt"):
        (tasks.parent / file).parent.mkdir(parents=True, exist_ok=True)
        (tasks.parent / file).write_text("text")
    (tasks.parent / ".git").write_text("gitdir: history")
    monkeypatch.setenv("EARL_PRIVATE_PATHS", "")
    note_private([str(tasks.parent / each) for each in ("runs", "gateway.key")])
    private = {
        ".git": "gitdir: history",
        "history": [],
        "elsewhere/linked": [],
        "runs": [],
        "gateway.key": "",
        "open.txt": "text",
    }
    wanted = {
        "private": private,
        "files": ["a b.bin", "deep folder", "link", "solved.txt"], "bytes": [0, 255, 10],
        "link": "a b.bin", "runs": "it runs\n", "variable": "two words", "secret": False,
        "tests": False, "tasks": [], "others": [], "named": "of a variable",
    }  # fmt: skip
    looks = harbor(
        tasks / "looks",
        "looks",
        "cd /tests && python3 look.py",
        TIMES.format(20, 20) + '[environment.env]\nTASKS = "${TASKS_OF_TEST}"\n',
    )
    monkeypatch.setenv("TASKS_OF_TEST", str(tasks))
    (looks / "tests" / "look.py").write_text(LOOK.format(json.dumps(wanted)))
    lay_out(looks / "environment")
    bench = "ls $TEST_DIR/test_outputs.py && test -f solved.txt && "
    terminal_bench(tasks / "bench", "solves", bench + "test ! -e tests -a ! -e solution.sh")
    terminal_bench(tasks / "bench wrong", "solves", "exit 1")
    (tmp_path / "named.pem").write_text("of a variable")
    found = play(
        tasks,
        variables={"NAMED": str(tmp_path / "named.pem")},
        pass_variables=["TASKS_OF_TEST"],
    )
    for name, reward in (("looks", 1.0), ("linked", 1.0), ("bench", 1.0), ("bench wrong", 0.0)):
        assert (found[name].finish_reason, found[name].total_reward) == ("done", reward), found[
            name
        ]
    check_nothing_is_left()


@pytest.mark.usefixtures("no_namespaces")
def test_an_episode_ends_whole_whatever_its_agent_does(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for does in ("leaves a child", "locks up"):
        harbor(tasks / does, does, SOLVED)
    harbor(tasks / "cheats", "cheats", "echo 0 > /logs/verifier/reward.txt")
    harbor(tasks / "fails", "fails", SOLVED)
    for does, test in {
        "brings a shell": "echo 0 > /logs/verifier/reward.txt",
        "wrecks": "ls /var/tmp && " + SOLVED,
        "breaks tests": "test -f given.txt && echo 0.5 > /logs/verifier/reward.txt",
        "digs": SOLVED,
        "is killed": "echo 0 > /logs/verifier/reward.txt",
    }.items():
        harbor(tasks / does, does, test)
    found = play(tasks)
    rewards = {"cheats": 0.0, "leaves a child": 1.0, "locks up": 1.0}
    rewards |= {"brings a shell": 0.0, "wrecks": 1.0, "breaks tests": 0.0, "digs": 1.0}
    rewards["is killed"] = 0.0
    for name, reward in rewards.items():
        assert (found[name].finish_reason, found[name].total_reward) == ("done", reward), found[
            name
        ]
    assert found["brings a shell"].info["outcome"] == "failed"
    assert found["breaks tests"].info["outcome"] == "tests_broken"
    assert "exit code 1: the agent is lost" in str(found["fails"].info["failure"])
    check_nothing_is_left()
    # Its own time ends an agent that hangs, and the deadline its whole episode. Nothing else is
    # played beside them: an agent that has not answered once in its time fails.
    harbor(tmp_path / "ended" / "hangs", "hangs", SOLVED, TIMES.format(8, 20))
    harbor(tmp_path / "late" / "hangs", "hangs", SOLVED, "[verifier]\ntimeout_sec = 1\n")

    async def hanging() -> list[dict[str, Episode]]:
        return await asyncio.gather(playing(tmp_path / "ended"), playing(tmp_path / "late", 2.0))

    ended, late = (each["hangs"] for each in asyncio.run(hanging()))
    assert (ended.finish_reason, ended.total_reward) == ("done", 1.0), ended
    assert ended.info["metrics"]["agent_timed_out"] == 1
    assert late.finish_reason == "environment_timeout"
    check_nothing_is_left()


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists(),
    reason="only root becomes another user, who needs a Python to read",
)
@pytest.mark.usefixtures("no_namespaces")
def test_another_user_plays_under_a_python_that_has_nothing_of_ours(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="earl-other-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        write_host_archive(folder).chmod(0o644)
        task = harbor(folder / "tasks" / "one", "nothing", SOLVED)
        (task / "tests" / "test.sh").chmod(0o644)
        (folder / "agent.sh").write_text(
            "test $(id -u) = 0 && echo yes > solved.txt; mkdir closed; touch closed/file\n"
            "chmod 0 closed; setsid sleep 3610 & \n"
        )
        (folder / "work").mkdir()
        os.chown(folder / "work", OTHER_USER, OTHER_USER)
        program = (
            "import asyncio, os, sys; sys.path.insert(0, sys.argv[1] + '/environment_host.pyz')\n"
            "from earl_core.environments.registry import create\n"
            "options = {'path': sys.argv[1] + '/tasks', 'command': ['sh', sys.argv[1] + "
            "'/agent.sh']}\n"
            "made = create('agent:task_directories', options)\n"
            "made.policy = {'base_url': 'http://127.0.0.1:1/v1', 'api_key': 'k'}\n"
            "made.reset(0, 0)\n"
            "print(asyncio.run(made.step('')).reward, os.listdir(sys.argv[1] + '/work'),\n"
            "      made.prompt_count)\n"
        )
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", program, str(folder)],
            cwd="/",
            env={"PATH": os.defpath, "TMPDIR": str(folder / "work")},
            user=OTHER_USER,
            group=OTHER_USER,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if "user namespaces" in done.stderr:
            pytest.skip(done.stderr[-300:])
        assert done.stdout == "1.0 [] 1\n", done.stderr
    finally:
        shutil.rmtree(folder)
    check_nothing_is_left()


def check_nothing_is_left() -> None:
    sleeping = [["sleep", each] for each in SLEEPS]
    until(lambda: not any(p.info["cmdline"] in sleeping for p in psutil.process_iter(["cmdline"])))
    # Other tests that play beside these have folders there, too, for a while.
    until(lambda: not scratch.base().exists())


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        program = (
            "import os, tempfile; from earl_core.environments.task_directories import scratch\n"
            f"tempfile.tempdir = {str(tmp_path)!r}\n"
            "made = scratch.scratch(); (made.__enter__() / 'file').touch(); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", program], check=False)
        (left,) = scratch.base().iterdir()
        held = os.open(left, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("a folder in a folder", dir_fd=held)
            inner = os.open("a folder in a folder", os.O_RDONLY, dir_fd=held)
            os.close(held)
            held = inner
        os.close(held)
        with scratch.scratch() as kept:
            scratch.sweep()
            assert kept.exists()
            assert not left.exists()
        assert not scratch.base().exists()
        (tmp_path / "real").mkdir()
        scratch.base().symlink_to(tmp_path / "real")
        with pytest.raises(OSError, match="not this user's alone"), scratch.scratch():
            pass


def test_prompts_take_tasks_in_turn_and_some_are_held_out(tmp_path: Path) -> None:
    for name in ("b", "a", "c", "test-1"):
        harbor(tmp_path / name, name, SOLVED)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").touch()
    assert [each.name for each in read_tasks(tmp_path)] == ["a", "b", "c", "test-1"]
    assert [each.name for each in read_tasks(tmp_path, None, ["test-*"])] == ["a", "b", "c"]
    assert [each.name for each in read_tasks(tmp_path, ["test-*"])] == ["test-1"]
    (one,) = read_tasks(tmp_path / "a")
    assert (one.instruction, one.agent_seconds, one.test_seconds) == ("a\n", 20.0, 20.0)
