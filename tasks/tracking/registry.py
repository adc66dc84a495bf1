"""The best and the last checkpoint of a run as versions of a registered model.

The model has the run's name, and the aliases `best` and `last` are moved as the run goes on. The
weights stay where they are, in the run directory: each version's tag `path` names a directory that
`transformers` loads, or PEFT where it is an adapter's. Where MLflow lets a version's source be that
path, it is; a server lets only what lies among its artifacts be one, so there the source is a page
that names the paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from earl_core.pretrained.adapter_directory import is_adapter, policy_in
from earl_core.run import RunDirectory
from tasks.tracking.database import sqlite_path
from tasks.tracking.mlflow_client import MlflowRun, patient

PAGE = "checkpoints/README.md"
_UID = "earl.uid"


def checkpoints_to_register(run: RunDirectory) -> dict[str, int]:
    """The iteration of each alias; empty before the first checkpoint."""
    last, best = run.last_stable(), run.best_stable()
    if last < 0:
        return {}
    return {"last": last} | ({} if best is None else {"best": best})


def register(mlflow: MlflowRun, run: RunDirectory, wanted: Mapping[str, int]) -> None:
    """Make the registered model's versions and aliases those of `wanted`.

    A version of this run without an alias goes, because pruning takes its checkpoint; versions that
    others registered under the name stay. Raises `MlflowException` when the tracker fails.
    """
    paths = {alias: _policy(run, iteration) for alias, iteration in wanted.items()}
    mlflow.log_text(_page(wanted, paths), PAGE)
    client, model = mlflow.client, _registered_model(mlflow, run)
    name = model.name
    found = patient(lambda: client.search_model_versions(f"name = '{name}'"))
    ours = {each.tags["path"]: each for each in found if each.tags.get(_UID) == run.uid}
    for alias, path in paths.items():
        if str(path) not in ours:
            make = partial(_create, mlflow, run, name, wanted[alias], path)
            ours[str(path)] = patient(make)
        version = str(ours[str(path)].version)
        if str(model.aliases.get(alias)) != version:
            patient(partial(client.set_registered_model_alias, name, alias, version))
    for known, each in ours.items():
        if known not in map(str, paths.values()):
            patient(partial(client.delete_model_version, name, each.version))


def _registered_model(mlflow: MlflowRun, run: RunDirectory) -> Any:
    """The model of the run's name; where another run has that name, one with a part of the uid."""
    from mlflow.exceptions import MlflowException

    client, names = mlflow.client, (run.config.name, f"{run.config.name}-{run.uid[:8]}")
    for name in names:
        try:
            model = patient(partial(client.get_registered_model, name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            note = f"Checkpoints of {run.path.resolve()}"
            model = patient(partial(client.create_registered_model, name, {_UID: run.uid}, note))
        if model.tags.get(_UID) == run.uid:
            return model
    raise MlflowException(f"the registered models {' and '.join(names)} are of other runs")


def _create(mlflow: MlflowRun, run: RunDirectory, name: str, iteration: int, path: Path) -> Any:
    local = sqlite_path(mlflow.uri) is not None
    return mlflow.client.create_model_version(
        name,
        path.as_uri() if local else f"runs:/{mlflow.run_id}/{Path(PAGE).parent}",
        mlflow.run_id,
        {_UID: run.uid, "iterations": str(iteration + 1), "path": str(path)},
        description=f"After {iteration + 1} iterations.\n\n{_load(path)}",
    )


def _policy(run: RunDirectory, iteration: int) -> Path:
    return policy_in(run.checkpoint_path(iteration)).resolve()


def _load(path: Path) -> str:
    if is_adapter(path):
        return (
            "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{path}")\n```\n'
        )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'path = "{path}"\nmodel = AutoModelForCausalLM.from_pretrained(path)\n'
        "tokenizer = AutoTokenizer.from_pretrained(path)\n```\n"
    )


def _page(wanted: Mapping[str, int], paths: Mapping[str, Path]) -> str:
    parts = ["# Checkpoints\n\nThe weights are in the run directory, not in MLflow.\n"]
    for alias, iteration in wanted.items():
        parts.append(f"## {alias}: after {iteration + 1} iterations\n\n{_load(paths[alias])}")
    return "\n".join(parts)
