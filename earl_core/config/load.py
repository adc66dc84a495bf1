"""Make a `RunConfig` whose references lead somewhere of a YAML file and `--set a.b=c` overrides."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from earl_core.config.refusal import references, refuse_override
from earl_core.config.run import RunConfig
from earl_core.config.yaml_text import MOST_BYTES, read_yaml, write_yaml
from earl_core.secrets import redact, resolve
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text
from earl_core.system.similar import meant

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""The run files that come with the package."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML run file and apply `a.b=c` overrides (the value is YAML, as in the file).

    path: a file, or the name of a recipe, such as `demo`.

    Raises `ConfigError` with every problem in one readable block: a missing or malformed file,
    unknown keys, wrong values, combinations that cannot work. What the file alone would not have
    is said of the overrides.
    """
    file = _run_file(path)
    what = f"the configuration {file}"
    try:
        content = read_text(file, what, MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the configuration {file} cannot be read: {error.strerror}. "
            f"{meant(path, recipe_names()).capitalize()}Give a file, or one of the recipes "
            f"{', '.join(recipe_names())}"
        ) from error
    raw = read_yaml(content, what)
    if not isinstance(raw, dict):
        raise ConfigError(f"{what} must be a mapping of settings")
    return parse_config(raw, str(file), overrides)


def recipe_names() -> list[str]:
    """List the names of the recipes, sorted."""
    return sorted(recipe.stem for recipe in RECIPES.glob("*.yaml"))


def _run_file(path: str | Path) -> Path:
    """A bare name is a recipe's; whatever lies in the working directory cannot take its place."""
    recipe = RECIPES / f"{path}.yaml"
    return recipe if Path(path).name == str(path) and recipe.is_file() else Path(path)


def parse_config(
    raw: Mapping[str, Any], source: str = "the configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """Validate a plain mapping under `a.b=c` overrides; problems become one `ConfigError`, which
    says for each whether the mapping has it or the overrides bring it."""
    try:
        return RunConfig.model_validate(_overridden(raw, overrides))
    except ValidationError as error:
        own = _problems_of(raw) if overrides else []
        blamed: dict[str, list[ErrorDetails]] = {}
        for problem in error.errors():
            of_file = not overrides or (problem["loc"], problem["msg"]) in own
            named = source if of_file else _bringing(problem["loc"], overrides, source)
            blamed.setdefault(named, []).append(problem)
        told = [explain(problems, named) for named, problems in blamed.items()]
        raise ConfigError("\n".join(told)) from error


def _problems_of(raw: Mapping[str, Any]) -> list[tuple[tuple[int | str, ...], str]]:
    try:
        RunConfig.model_validate(dict(raw))
    except ValidationError as error:
        return [(problem["loc"], problem["msg"]) for problem in error.errors()]
    return []


def _bringing(place: tuple[int | str, ...], overrides: Sequence[str], source: str) -> str:
    """Name the overrides that touch a place of the file; all, where none does: one setting may
    forbid another."""
    path = [str(part) for part in place]

    def touches(override: str) -> bool:
        keys = override.partition("=")[0].strip().split(".")
        return all(a == b for a, b in zip(keys, path, strict=False))

    found = list(filter(touches, overrides)) or overrides
    some = "override" if len(found) == 1 else "overrides"
    return f"the {some} {' and '.join(repr(redact(each)) for each in found)} for {source}"


def _overridden(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `a.b=c` set; intermediate mappings are made when missing."""
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"the override {redact(override)!r} is not of the form a.b=c, for example "
                "`update.learning_rate=1e-5`"
            )
        node = result
        for key in keys[:-1]:
            child = node.get(key)
            if child is None:
                child = node[key] = {}
            elif isinstance(child, str) and key in ("advantage", "policy_loss", "aggregation"):
                child = node[key] = {"name": child}
            if not isinstance(child, dict):
                raise ConfigError(f"the override {redact(override)!r}: {key!r} is not a section")
            node = child
        # A run may be called 7 or 1e5.
        what = f"the value of the override {redact(override)!r}"
        value = text if keys == ["name"] else read_yaml(text, what)
        refuse_override(dotted.strip(), value)
        node[keys[-1]] = value
    return result


def check_references(config: RunConfig) -> None:
    """Check that each reference leads to something, and hide from now on the value it leads to.

    Raises `ConfigError`. Nothing is returned: the process that uses a value resolves it.
    """
    for key, text, _ in references(config.model_dump(mode="json")):
        try:
            resolve(text)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; reading it back gives an equal configuration."""
    return write_yaml(config.model_dump(mode="json"))


def explain(problems: Iterable[ErrorDetails], source: str) -> str:
    """All problems of a validation error, a line each, named by their dotted key."""
    lines = [f"{source} cannot be used:"]
    for problem in problems:
        key = ".".join(str(part) for part in problem["loc"]) or "configuration"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown key: {_advice(problem['loc'])}"
        elif problem["type"] == "missing":
            message = "missing: give it a value"
        elif problem["type"] == "literal_error" and isinstance(problem["input"], str):
            choices = re.findall("'([^']*)'", problem["ctx"]["expected"])
            near = meant(problem["input"], choices)
            message = f"{message}: {near.strip()}" if near else message
        elif problem["type"] == "finite_number":
            message = f"{problem['input']} is not a finite number: give it one"
        lines.append(redact(f"  {key}: {message}"))
    return "\n".join(lines)


_NAMED = 3
"""So many sections are named at most."""


@cache
def _sections() -> dict[str, frozenset[str]]:
    """The keys of each section by its dotted name, "" for the whole file. A list of sections has
    the name of the list, such as `evaluation.suites`."""
    return {
        name: frozenset(field.alias or key for key, field in model.model_fields.items())
        for name, model in _walk("", RunConfig)
    }


def _advice(path: tuple[int | str, ...]) -> str:
    """Advise on an unknown key, named with the keys and list positions that lead to it."""
    *around, key = [str(part) for part in path if not isinstance(part, int)]
    here = _sections().get(".".join(around), frozenset())
    places = [name for name, keys in _sections().items() if key in keys]
    if similar := difflib.get_close_matches(key, here, n=1, cutoff=0.75):
        return f"did you mean `{similar[0]}`?"
    if places:
        named = " and of ".join(f"`{name}`" if name else "the file" for name in places[:_NAMED])
        return f"`{key}` is a key of {named}: move it there"
    return "remove it or correct its spelling"


def _walk(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield from _walk(f"{name}.{key}".lstrip("."), inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
