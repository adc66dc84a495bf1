"""`earl up` and `earl down`: services of a runs directory, and how to log in to them."""

from __future__ import annotations

import shlex

from earl_core.system.service import directories_with_services
from flows.services.process import TITLES
from flows.services.service_manager import ServiceManager
from tasks.tracking.mlflow_client import without_login


def up(runs_directory: str, port: int | None, mlflow_port: int | None) -> None:
    """Start what is missing, wait until it answers, say where it is."""
    manager = ServiceManager(runs_directory)
    outside = manager.up({"prefect": port, "mlflow": mlflow_port}, _say)
    services = manager.services
    for name, title in TITLES.items():
        if name in manager.started:
            continue
        if name in services and services[name].alive:
            print(f"{title} runs already.")
    elsewhere = "another server, which your settings name"
    if outside.prefect is None:
        print(f"\nPrefect  {services['prefect'].url.removesuffix('/api')}")
    else:
        print(f"\nPrefect  {outside.prefect.url.removesuffix('/api')}  ({elsewhere})")
    if outside.mlflow is None:
        print(f"MLflow   {services['mlflow'].url}")
    else:
        print(f"MLflow   {without_login(outside.mlflow)}  ({elsewhere})")
    if None in outside:
        print(f"\nTo log in, take the passwords from {manager.login}: Prefect asks for the whole")
        print("PREFECT_API_AUTH_STRING, MLflow for the user earl and MLFLOW_TRACKING_PASSWORD.")
        login = shlex.quote(str(manager.login))
        print(f"`earl` finds them itself; for other programs: source {login}")
    option = "" if runs_directory == "runs" else f" --runs-directory {shlex.quote(runs_directory)}"
    print(f"\nearl status{option}  shows what runs; earl down{option}  ends it.", flush=True)


def down(runs_directory: str) -> None:
    """End what `up` started, and say what that was."""
    ended = ServiceManager(runs_directory).down(_say)
    for name in ended:
        print(f"{TITLES[name]} has ended.")
    if not ended:
        print("Nothing that `earl up` started runs.")
    for other in directories_with_services():
        print(f"That of {other} does: earl down --runs-directory {shlex.quote(str(other))}")


def _say(text: str) -> None:
    print(f"{text} …", flush=True)
