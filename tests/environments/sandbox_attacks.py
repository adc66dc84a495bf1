"""Attacks on the tool `python` by the code that it runs; a program, so that any user may run it.

    python sandbox_attacks.py ARCHIVE FOLDER MODE

Prints the JSON of what each attack printed, and what the machine is said not to hold. MODE:
"namespaces" as the tool chooses, "filters" as where there are none.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

START = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, *arguments):
    try:
        print("DONE", what(*arguments))
    except BaseException as error:
        print("held", type(error).__name__, error)
def called(result):
    print("held" if result == -1 else f"DONE {result}")
"""

ATTACKS = {
    "variables": "tried(lambda: open('/proc/{pid}/environ').read())",
    "own variables": "print(dict(os.environ)); tried(lambda: open('/proc/self/environ').read())",
    "all variables": "for each in filter(str.isdecimal, os.listdir('/proc')):\n"
    "    if each != str(os.getpid()): tried(lambda: open(f'/proc/{{each}}/environ').read())",
    "memory of others": "tried(lambda: open('/proc/{pid}/mem', 'rb'))\n"
    "tried(lambda: open('/proc/1/mem', 'rb'))\ntried(os.listdir, '/proc/{pid}/root/')",
    "setns": "tried(lambda: os.open('/proc/{pid}/ns/net', 0))\ncalled(libc.setns(0, 0))\n"
    "tried(lambda: os.open('/proc/{ppid}/ns/net', 0))",
    "unshare": "called(libc.unshare(0x10000000)); called(libc.unshare(0x20000)); "
    "called(libc.syscall(435, 0, 0))",
    "clone": "called(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, "
    "ctypes.c_long(0x10000011), None, None, None, None))",
    "mount": "called(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)); called(libc.chroot(b'/tmp'))",
    "ptrace": "called(libc.ptrace(16, {pid}, None, None)); called(libc.ptrace(16, 1, None, None))",
    "signals": "tried(os.kill, {pid}, 9)\ntried(os.killpg, {group}, 9)\n"
    "try:\n    os.kill(-1, 15)\nexcept OSError: pass\nprint('held')",
    "limits of others": "import resource\n"
    "tried(resource.prlimit, {pid}, resource.RLIMIT_NOFILE, (5, 5))",
    "priority of others": "tried(os.setpriority, os.PRIO_PROCESS, {pid}, 19)\n"
    "tried(os.sched_setaffinity, {pid}, [0])",
    "forks": "born = 0\ntry:\n    while born < 2000:\n        if not os.fork(): time.sleep(30)\n"
    "        born += 1\nexcept OSError: pass\nprint('DONE' if born > 70 else 'held', born)",
    "threads": "import threading\nborn = 0\ntry:\n    while born < 300:\n"
    "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); born += 1\n"
    "except RuntimeError: pass\nprint('DONE' if born > 70 else 'held', born); os._exit(0)",
    "memory of many": "read, write = os.pipe()\nfor _ in range(12):\n    if not os.fork():\n"
    "        held = bytearray(b'x') * (250 << 20); os.write(write, b'x'); time.sleep(30)\n"
    "time.sleep(1.5)\nos.set_blocking(read, False)\n"
    "try: got = len(os.read(read, 99))\nexcept BlockingIOError: got = 0\n"
    # Without a control group somebody looks now and then, and ends all once they hold too much.
    "if got > 4: time.sleep(4)\n"
    "print('DONE' if got > 4 else 'held', got)\nos._exit(0)",
    "memory in files": "tried(lambda: ctypes.CDLL(None, use_errno=True) and os.memfd_create('x'))\n"
    "called(libc.shmget(0, 1 << 20, 0o1600))",
    "abstract socket": "tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0{abstract}'))",
    "loopback": "tried(lambda: socket.create_connection(('127.0.0.1', {port}), 1))",
    "packets": "tried(lambda: socket.socket(17, 3, 0))",
    "shared memory": "tried(lambda: open('/dev/shm/{shared}').read())",
    "secrets": "tried(lambda: open('{secret}').read())\ntried(os.listdir, '{folder}')",
    "other files": "tried(lambda: open('/etc/passwd').read())\ntried(os.listdir, '/home')\n"
    "tried(os.listdir, '/root/.ssh')\ntried(os.listdir, '/sys')\ntried(os.listdir, '/var')",
    "writing": "for each in ('/usr/x', '/etc/x', sys.prefix + '/lib/x', '/x', '/dev/x'):\n"
    "    tried(lambda: open(each, 'w'))",
    "kernel settings": "tried(lambda: open('/proc/sys/kernel/core_pattern', 'w').write('x'))",
    "descriptors": "for each in range(3, 64):\n    try: os.fstat(each)\n"
    "    except OSError: continue\n    print('DONE', each)",
    "keys": "called(libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 0))",
    "capabilities": "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
    "data = (ctypes.c_uint32 * 6)()\nlibc.capget(header, data)\n"
    "print('DONE' if any(data) else 'held', list(data), os.geteuid())",
    "new session": "if not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(98.76)'])\n",
    "stays": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if not os.fork():\n    os.setsid()\n    while True: time.sleep(98.76)\ntime.sleep(98.76)",
    "disk": "try:\n    for each in range(40): open(f'f{{each}}', 'wb').write(bytes(1 << 23))\n"
    "except OSError as error: print('held', error)\nelse: print('DONE')",
}  # fmt: skip

USES = {
    "printed": "import json, decimal; print(json.dumps({{'a': 1}}), file=sys.stderr)\nprint(2)",
    "folder": "open('a', 'w').write('x')\nimport tempfile\nprint(os.listdir('.'), "
    "tempfile.gettempdir() == os.getcwd() == os.environ['HOME'])",
    "child": "import subprocess\nprint(subprocess.run([sys.executable, '-c', 'print(5)'], "
    "capture_output=True, text=True).stdout)",
    "exit": "sys.exit('bye')",
    "raised": "def f():\n    1 / 0\nf()",
}


async def _all(run: object, place: dict[str, object]) -> dict[str, str]:
    texts = {name: START + code.format(**place) for name, code in (ATTACKS | USES).items()}
    few = asyncio.Semaphore(3)

    async def one(text: str) -> str:
        async with few:
            return await run(text)  # type: ignore[operator, no-any-return]

    return dict(zip(texts, await asyncio.gather(*map(one, texts.values())), strict=True))


def main(archive: str, folder: str, mode: str) -> None:
    """See the module."""
    sys.path.insert(0, archive)
    from earl_core.environments.tools import python as tool

    tool._SECONDS = 3  # type: ignore[misc]
    if mode == "filters":
        tool._containment = lambda: (False, [])
    listening, abstract = socket.create_server(("127.0.0.1", 0)), f"earl-attacked-{os.getpid()}"
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0{abstract}")
    hidden.listen()
    secret, shared = Path(folder, "secret"), Path("/dev/shm", abstract)
    for path in (secret, shared):
        path.write_text("SESAME")
    place = {
        "pid": os.getpid(), "ppid": os.getppid(), "group": os.getpgrp(), "abstract": abstract,
        "port": listening.getsockname()[1], "shared": shared.name, "secret": secret,
        "folder": folder,
    }  # fmt: skip
    try:
        answers = asyncio.run(_all(tool.python, place))
    finally:
        shared.unlink()
    check = getattr(tool.python, "check")  # noqa: B009 - a decorator adds it
    print(json.dumps({"answers": answers, "notes": check()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
