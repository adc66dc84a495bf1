"""`earl server`, and a server's word against the run directory's."""

from __future__ import annotations

import base64
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from flows.server_access import Access, read_access
from tests.cli.conftest import CONFIG, Earl


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def status(url: str, access: Access | None = None) -> int:
    request = urllib.request.Request(url)
    if access is not None:
        word = base64.b64encode((access.auth or "").encode()).decode()
        request.add_header("Authorization", f"Basic {word}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def said(process: subprocess.Popen[str], pattern: str) -> str:
    """The first group of the next line that matches."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("".join(lines))


def test_earl_server_serves_pages_behind_a_password_until_ctrl_c(fresh_earl: Earl) -> None:
    port = free_port()
    process = fresh_earl.start("server", "--port", str(port))
    try:
        site = said(process, r"pages: (\S+)")
        note = Path(said(process, r"password they ask for is in (\S+)"))
        assert site == f"http://127.0.0.1:{port}"
        assert (fresh_earl.directory / note).stat().st_mode & 0o777 == 0o600
        access = read_access(fresh_earl.directory / note)
        assert access is not None
        assert status(site) == 200
        assert status(f"{access.url}/admin/version") == 401
        assert status(f"{access.url}/admin/version", access) == 200
        again = fresh_earl.run("server", "--port", str(free_port()))
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert "runs already" in again.stderr
        taken = fresh_earl.run("server", "--port", str(port), "--runs-directory", "others")
        assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
        assert "choose another with --port" in taken.stderr
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert not (fresh_earl.directory / note).exists()
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        process.kill()


def test_a_run_is_over_when_its_directory_says_so(earl: Earl) -> None:
    # As with a server that takes every state for a finished one.
    program = (
        "import flows.running; flows.running.run_flow = lambda *_, **__: {}; "
        "from flows.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(CONFIG), "--name", "unfinished", "--plain"],
        cwd=earl.directory,
        env=earl.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "unfinished says that it is not: continue with earl resume" in done.stderr
    assert "Traceback" not in done.stderr
