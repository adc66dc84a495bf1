"""`earl rescore`."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from earl_core.config import ConfigError, RunConfig
from earl_core.experience.rescoring import Rescored, run_rescore
from earl_core.run.record import config_of_run
from earl_core.system.errors import EarlError
from earl_core.system.plural import plural
from flows.cli.errors import without_frames
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console, rows_table

_FAILURES = 3
_LONGEST = 400


def rescore(
    run: tuple[str, str], functions: list[str], overrides: list[str], as_json: bool
) -> None:
    """Score a run's kept episodes by each of the functions, and say how they agree with the rewards
    that the run has trained on. A function that cannot be run is named, and the others go on.

    Raises `ConfigError` for wrong input, and `EarlError` where a function scores no episode at all.
    """
    path = find_run(*run)
    # Which episodes failed is told at the end, and not at each attempt.
    logging.getLogger("earl_core.experience.scoring").setLevel(logging.ERROR)
    configs = [_config(path, function, overrides) for function in functions]
    titles = [config.reward.functions[0].title for config in configs]
    if twice := next((each for each in titles if titles.count(each) > 1), None):
        raise ConfigError(f"two functions are called {twice}: score by one at a time")
    found, failed = [], []
    for function, config in zip(functions, configs, strict=True):
        try:
            found.append(run_rescore(path, config))
        except EarlError as error:
            if len(functions) == 1:
                raise
            failed.append(f"{function}: {error}")
    rows = [_row(each) for each in found]
    if as_json:
        print(json.dumps(rows))
    else:
        _print(found, rows, make_console())
    failed += [_scoreless(each) for each in found if not each.scored]
    if failed:
        others = ["the other functions' scores are written"] if len(failed) < len(functions) else []
        raise EarlError("\n".join([*failed, *others]))


def _scoreless(found: Rescored) -> str:
    told = f"{found.path} says why of each"
    return f"{found.label} gave none of {plural(len(found.table), 'episode')} a score: {told}"


def _config(path: Path, function: str, overrides: list[str]) -> RunConfig:
    whole = function if function.startswith("{") else json.dumps({"function": function})
    given = f"reward.functions=[{whole}]"
    return config_of_run(path, [*overrides, given])


def _row(found: Rescored) -> dict[str, Any]:
    seen = found.agreement()
    return {
        "function": found.label,
        "episodes": seen.episodes,
        "failed": sum(bool(each) for each in found.table["failure"].to_pylist()),
        "rank correlation": _number(seen.rank_correlation),
        "pairs in groups": seen.pairs,
        "ordered alike": _number(seen.agreeing),
        "file": str(found.path),
    }


def _number(value: float) -> float | None:
    return None if value != value else round(value, 4)


def _print(found: list[Rescored], rows: list[dict[str, Any]], console: Console) -> None:
    shown = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    console.print(rows_table(shown))
    for each in found:
        why = dict.fromkeys(map(_why, each.failures))
        for text in (*each.damaged, *list(why)[:_FAILURES]):
            console.print(text, style="yellow", markup=False)


def _why(failure: str) -> str:
    """A failure in a line; the file has all of it."""
    lines = without_frames(failure).splitlines()
    said = [line for line in lines if not line.startswith("  ")]
    # Where a function was at its deadline.
    said += [line for line in lines[-1:] if line not in said]
    return textwrap.shorten(" ".join(said), _LONGEST)
