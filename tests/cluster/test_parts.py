"""The wire's framing, ending process trees, reading logs, and what importing the package costs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.cluster.errors import LogFile
from earl_core.system.frames import FrameBuffer, WireError, encode
from earl_core.system.processes import descendants, end_processes, inspect
from tests.cluster.targets import SLEEPER, STUBBORN

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(st.text(), values, max_size=4)


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(messages, max_size=5), data=st.data())
def test_frames_survive_any_cutting(sent: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    edges = [0, *cuts, len(stream)]
    frames = FrameBuffer()
    received: list[dict[str, Any]] = []
    for begin, end in pairwise(edges):
        received += frames.feed(stream[begin:end])
    assert received == sent


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{x", b"\0\0\0\1\xff"]
)
def test_nonsense_on_the_wire_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameBuffer().feed(data))


def test_ending_a_tree_is_polite_first_and_sure_at_last() -> None:
    script = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-S', '-c', {STUBBORN!r}]); "
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"stubborn\n"
    found = inspect(parent.pid)
    assert found is not None
    tree = [found, *descendants(parent.pid)]
    assert len(tree) == 2
    begin = time.monotonic()

    def living() -> list[Any]:
        return [now for process in tree if (now := inspect(process.pid)) is not None]

    def reap() -> None:
        parent.poll()

    assert end_processes(living, 0.5, reap)
    assert 0.4 < time.monotonic() - begin < 60
    assert parent.wait() == -15
    parent.stdout.close()


def test_a_log_tail_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n" + b"10%\r50%\r100% done\n\n\x1b[31mred\x1b[0m\n\xff\n" * 20)
    assert LogFile(path, 4).tail(3).splitlines() == ["100% done", "red", "\ufffd"]
    assert "old" in LogFile(path).tail(100)
    assert LogFile(tmp_path / "missing").tail() == ""


def test_importing_the_package_is_light() -> None:
    script = (
        "import sys, earl_core.cluster.worker_group, earl_core.cluster.rank_process\n"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm', 'prefect', 'mlflow', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
    script = "import sys, earl_core.cluster.supervisor; print('asyncio' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"


def test_a_process_whose_main_thread_is_gone_still_counts_with_its_children() -> None:
    # So looks a large process in the middle of being killed: a zombie to /proc, with its memory
    # and its children still its own.
    number = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    script = (
        "import ctypes, subprocess, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}])\n"
        "print(child.pid, flush=True)\n"
        f"ctypes.CDLL(None).syscall({number}, 0)\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    stat = Path(f"/proc/{leader.pid}/stat")
    while stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    assert inspect(leader.pid) is not None
    found = {process.pid for process in descendants(os.getpid())}
    assert {leader.pid, child} <= found

    def reap() -> None:
        leader.poll()

    assert end_processes(lambda: descendants(leader.pid), 2.0, reap)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert inspect(child) is None
