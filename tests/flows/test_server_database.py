"""Transactions of a Prefect server on SQLite wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import asyncio
import sqlalchemy as sa
from flows.server_database import wait_for_writers
from prefect.server.database import provide_database_interface

wait_for_writers()
ADD = "INSERT INTO told SELECT coalesce(max(number), 0) + 1, :who FROM told"

async def main():
    db = provide_database_interface()
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(sa.text("CREATE TABLE told (number INTEGER, who TEXT)"))
    read = asyncio.Event()

    async def first():
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(sa.text("SELECT * FROM told"))
            read.set()
            await asyncio.sleep(0.5)
            # As Prefect does, where an event of a changed row is made.
            async with db.session_context() as inner:
                await inner.execute(sa.text("SELECT * FROM told"))
            await session.execute(sa.text(ADD), {"who": "first"})

    async def second():
        await read.wait()
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(sa.text(ADD), {"who": "second"})

    await asyncio.wait_for(asyncio.gather(first(), second()), 100)
    async with db.session_context() as session:
        print((await session.execute(sa.text("SELECT who FROM told ORDER BY number"))).all())

asyncio.run(main())
"""


def test_a_transaction_that_reads_first_is_not_refused(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/prefect.db",
    }
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[('first',), ('second',)]\n", done.stdout + done.stderr
