"""Transactions of a Prefect server on SQLite: each takes the write lock when it begins.

Prefect begins them deferred: they read, and the lock is taken by the first write. Where another has
written in between, SQLite refuses at once ("database is locked"), without the minute's patience
that Prefect asks for. Worse, the refused cursor lives on in the error's traceback, and its
connection in the pool: when the event loop frees the cursor while a thread waits with that
connection for the lock, the loop waits for the thread, and whoever holds the lock cannot commit
without the loop. The server then answers nobody until the minute is over.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


class _Immediate(AioSqliteConfiguration):
    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        async with session.begin() as transaction:
            # Sessions that are opened within this one only read, and must not want the lock.
            mode = SQLITE_BEGIN_MODE.set("IMMEDIATE")
            try:
                await session.connection()
            finally:
                SQLITE_BEGIN_MODE.reset(mode)
            yield transaction


def wait_for_writers() -> None:
    """Have the server of this process begin its transactions so, if its database is SQLite's. Call
    it before the server starts."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url is not None and url.startswith("sqlite"):
        set_database_config(_Immediate(connection_url=url))
