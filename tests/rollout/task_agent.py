"""An agent that solves task directories: it asks the policy once, and does what it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(os.path.dirname(__file__))

from program_agent import ask


def main() -> None:
    task = json.load(sys.stdin)
    assert task == json.loads(Path(os.environ["EARL_TASK"]).read_text())
    assert os.getcwd() == os.environ["EARL_DIRECTORY"] == task["directory"]
    does = task["instruction"].strip()
    messages = [{"role": "user", "content": does}]
    status, reply = ask("chat/completions", {"model": "policy", "messages": messages})
    assert status == 200, reply
    Path("solved.txt").write_text("yes")
    if does == "looks":
        _look(task)
    elif does == "cheats":
        assert ask("reward", 1.0)[0] == 409
        for path in ("/logs/verifier", "/tests"):
            subprocess.run(["rm", "-rf", path], check=True)
        os.rmdir("/logs/agent")
        os.rmdir("/logs")
        os.symlink("/etc", "/logs")
        os.mkdir("/tests")
        Path("/tests/test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    elif does == "brings a shell":
        os.unlink("/bin")
        os.mkdir("/bin")
        for name in ("sh", "bash"):
            Path("/bin", name).write_text(
                f"#!{sys.executable}\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
            )
            os.chmod(f"/bin/{name}", 0o755)
    elif does == "wrecks":
        shutil.rmtree("/tmp/home")
        os.rename("/var", "/v2")
        os.symlink("/etc", "/var")
        os.chmod("/logs", 0)
        for name in os.listdir("/"):
            if os.path.islink(f"/{name}"):
                os.unlink(f"/{name}")
        os.chmod("/", 0)
    elif does == "is killed":
        os.kill(os.getpid(), 9)
    elif does == "breaks tests":
        os.unlink("given.txt")
    elif does == "digs":
        for _ in range(1500):
            os.mkdir("deep")
            os.chdir("deep")
        os.chmod(".", 0)
    elif does == "exit 1":
        Path("/logs/verifier/reward.txt").write_text("1")
    elif does == "hangs":
        subprocess.Popen(["sleep", "3611"], start_new_session=True)
        time.sleep(3600)
    elif does == "leaves a child":
        subprocess.Popen(["sleep", "3612"], start_new_session=True)
    elif does == "locks up":
        os.mkdir("closed")
        Path("closed/file").touch()
        os.chmod("closed", 0)
    elif does == "fails":
        sys.exit("the agent is lost")


def _look(task: dict[str, object]) -> None:
    """What an episode sees is written where its tests read it."""
    begun = Path(os.environ["TASKS"]).parent
    found = {
        "private": {
            str(each): _seen(begun / each)
            for each in (".git", "history", "elsewhere/linked", "runs", "gateway.key", "open.txt")
        },
        "files": sorted(os.listdir(".")),
        "bytes": list(Path("a b.bin").read_bytes()),
        "link": os.readlink("link"),
        "runs": subprocess.run(["tool"], capture_output=True, text=True, check=True).stdout,
        "variable": os.environ["OF_IMAGE"],
        "secret": "OF_THE_TRAINER" in os.environ,
        "tests": os.path.exists("/tests"),
        "named": Path(os.environ["NAMED"]).read_text(),
        "tasks": os.listdir(str(os.environ["TASKS"])) if os.path.isdir(os.environ["TASKS"]) else [],
        "others": [each for each in os.listdir("/tmp") if each.startswith("earl-tasks")],
        "processes": len([each for each in os.listdir("/proc") if each.isdecimal()]),
        "written": _writes("/etc/earl-was-here"),
    }
    Path("/logs/agent/found.json").write_text(json.dumps(found))


def _seen(path: Path) -> object:
    return os.listdir(path) if path.is_dir() else path.read_text()


def _writes(path: str) -> bool:
    try:
        Path(path).touch()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
