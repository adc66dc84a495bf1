"""Prefect's own command line, with a server whose database is as `earl` sets it."""

from __future__ import annotations

from prefect.cli import app

from flows.server_database import wait_for_writers

if __name__ == "__main__":
    wait_for_writers()
    app()
