"""The forms in Prefect's interface: types of the flows' parameters, and the runs to choose from.

Prefect takes a field's description from the flow's docstring, and its title from the parameter's
name unless `json_schema_extra` has another. The choices of a union are tabs, each with its title.
Which runs exist is known while a server runs, not when a flow is deployed: the deployments' schema
is written anew when they have changed. Any other directory stays valid, because a run may be made
after the form was.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from earl_core.config.load import recipe_names
from flows.flow_ledger import TAG
from flows.server_access import Access

_NAMES = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credentials?",
    "authorization",
    "(?:api|access|secret|private|account|signing|encryption|ssh|auth)[._-]?keys?",
    r"(?:^|\.)(?:(?:access|api|auth|aws_session|bearer|github|hf|id|refresh|controller)[_-])?token",
)
_VALUES = (
    r"(?:^|\W)(?:sk|pk|rk)[-_][\w-]*\d[\w-]{8}",
    r"hf_\w{16}",
    r"gh[pousr]_\w{16}",
    r"github_pat_",
    r"(?:AKIA|ASIA)[0-9A-Z]{12}",
    r"xox[a-z]-\w",
    r"-----BEGIN [A-Z ]*PRIVATE",
    r"eyJ[\w-]+\.eyJ",
    r"://[^\s/?#:@]*:[^\s/?#]+@",
)


def _any_case(pattern: str) -> str:
    """Make the pattern match both cases, for patterns without classes of letters; neither side's
    flags can be relied on."""
    return "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in pattern)


NO_SECRET = (
    rf"^(?![^=]*(?:{_any_case('|'.join(_NAMES))})\s*=\s*(?!env:|file:)\S)"
    rf"(?![\s\S]*(?:{'|'.join(_VALUES)}))"
)
"""By this Prefect's server refuses secrets in overrides before it stores them: it knows the
parameter's JSON schema only, and has stored a flow run's parameters before the flow could look at
them. The pattern is coarse: `earl_core.config` looks again, and closely."""

Overrides = Annotated[
    list[Annotated[str, Field(json_schema_extra={"pattern": NO_SECRET})]],
    Field(json_schema_extra={"title": "Overrides"}),
]


logger = logging.getLogger(__name__)


def titled(title: str, **extra: Any) -> Any:
    """The title of a field, and what else its schema has that Python does not check."""
    return Field(json_schema_extra={"title": title, **extra})


Unset = Annotated[None, Field(title="As configured")]
AtLeastOne = Annotated[int, Field(title="A number", ge=1)]

Config = Annotated[
    Annotated[str, titled("A recipe", enum=[*recipe_names()])]
    | Annotated[str, Field(title="A run file")],
    titled("Configuration"),
]
RunPath = Annotated[str, titled("Run")]
Checkpoint = Annotated[
    Annotated[Literal["last", "best", "initial"], Field(title="Last, best or initial")]
    | Annotated[str, titled("An iteration", pattern="^([0-9]+|last|best|initial)$")],
    titled("Checkpoint"),
]

FIRST_RUN = "tictactoe_tiny"
"""The run's name in forms that nobody has changed: that of the recipe that `train` begins with."""

_WITH_RUN = ["iteration", "evaluate"]
"""Flows, and their deployments, with a parameter `run`."""

_MOST_RUNS = 100
_QUICK_SECONDS = 2.0


def existing_runs(runs_directory: str | Path) -> list[Path]:
    """The run directories in a runs directory, absolute, the one used last first."""
    dated = []
    for config in Path(runs_directory).resolve().glob("*/config.yaml"):
        with suppress(OSError):
            lock = config.with_name("lock")
            dated.append(((lock if lock.exists() else config).stat().st_mtime, config.parent))
    return [path for _, path in sorted(dated, reverse=True)][:_MOST_RUNS]


def renew_runs(access: Access, runs_directory: str | Path, timeout: float = 10.0) -> None:
    """Offer the runs that exist in the forms of our deployments; asks once where none has changed.

    Runs of other runs directories stay in a form as long as they exist. The default that a
    deployment began with becomes the newest run where it names none; what somebody has set stays,
    because a schedule must not go on with another run. Raises `OSError` or `ValueError` when the
    server cannot be asked.
    """
    chosen = {"flows": {"name": {"any_": _WITH_RUN}}, "deployments": {"tags": {"all_": [TAG]}}}
    here = [str(path) for path in existing_runs(runs_directory)]
    for deployment in access.ask("deployments/filter", chosen, timeout=timeout):
        schema = deployment["parameter_openapi_schema"] or {}
        form = (schema.get("properties") or {}).get("run")
        if form is None:
            continue
        offered = form["anyOf"][0].get("enum", []) if "anyOf" in form else []
        elsewhere = [run for run in offered if run not in here and _is_run(run)]
        runs = (here + elsewhere)[:_MOST_RUNS]
        parameters = dict(deployment["parameters"] or {})
        given = str(parameters.get("run", ""))
        if _is_run(given):
            parameters["run"] = str(Path(given).resolve())
        elif runs and Path(given).name == FIRST_RUN:
            parameters["run"] = runs[0]
        renewed = {**schema, "properties": {**schema["properties"], "run": _run_form(form, runs)}}
        if (renewed, parameters) == (schema, deployment["parameters"]):
            continue
        body = {"parameter_openapi_schema": renewed, "parameters": parameters}
        access.ask(f"deployments/{deployment['id']}", body, method="PATCH", timeout=timeout)


def try_to_renew_runs(access: Access, runs_directory: str | Path) -> None:
    """Renew the runs as `renew_runs` does, quickly; the forms of a server that cannot be asked now
    stay as they are."""
    try:
        renew_runs(access, runs_directory, _QUICK_SECONDS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("the runs in Prefect's forms were not renewed: %s", error)


def _run_form(form: dict[str, Any], runs: list[str]) -> dict[str, Any]:
    """The schema of the parameter `run` with these choices; a plain text field without any."""
    plain = {name: value for name, value in form.items() if name not in ("type", "anyOf")}
    if not runs:
        return {**plain, "type": "string"}
    choices = [
        {"title": "An existing run", "type": "string", "enum": runs},
        {"title": "Another directory", "type": "string"},
    ]
    return {**plain, "anyOf": choices}


def _is_run(path: str) -> bool:
    return bool(path) and (Path(path) / "config.yaml").is_file()
