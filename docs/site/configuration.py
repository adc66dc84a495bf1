"""Write docs/reference/configuration.md from the models of a run file.

`python docs/site/configuration.py` writes it; a test compares it with `page()`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, TypeAdapter

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.algorithms.registry import Registry
from earl_core.config.run import RunConfig
from earl_core.environments import registry
from earl_core.environments.options import Options
from earl_core.environments.rewards.reward_functions import BUILT_IN as REWARD_FUNCTIONS
from earl_core.system.import_path import load_object

PAGE = Path(__file__).resolve().parents[1] / "reference" / "configuration.md"
_SCHEMA = RunConfig.model_json_schema()
_GIB = 2**30
_REPEATED = {"environments[]": "environment", "evaluation.suites[]": "environment"}
"""Sections whose models extend that of another section, which lists the common keys."""

_TOP = """# Configuration

Every key of a run file. `--set a.b=c` overrides any of them; unknown keys and invalid combinations
are refused before work starts. In descriptions None is `null`; *derived* stands for a default that
the description explains. Sizes are in bytes and times in seconds unless the description says
otherwise. `docs/site/configuration.py` writes this page.
"""


class Key(NamedTuple):
    """A row of a table. name: without its section. description: empty where there is none."""

    name: str
    kind: str
    default: str
    description: str


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Each section of a run file: its dotted name (empty: the top level), what it is, its keys."""
    yield from _walk("", _SCHEMA)


def parameters() -> Iterator[tuple[str, str, list[Key]]]:
    """Each named choice that has settings of its own: where it is named, its name, its keys."""
    families: dict[str, Registry[Any]] = {
        "algorithm.advantage": ADVANTAGE_ESTIMATORS,
        "algorithm.policy_loss": POLICY_LOSSES,
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.kl.estimator": KL_ESTIMATORS,
    }
    for where, family in families.items():
        for name in family.names():
            yield where, name, list(_fields(family.resolve(name)))
    for name, path in registry.BUILT_IN.items():
        model = load_object(path).options_model
        where = "environment.agent" if name.startswith("agent:") else "environment.name"
        yield where, name.removeprefix("agent:"), list(_options(model))
    for name, path in REWARD_FUNCTIONS.items():
        yield "reward.functions[].function", name, list(_arguments(load_object(path)))


def page() -> str:
    """The whole page."""
    parts = [_TOP]
    for name, about, keys in sections():
        parts += [f"## {name or 'Top level'}\n", f"{about}\n", _table(keys)]
    parts.append("## Parameters of algorithms, environments and reward functions\n")
    parts.append(
        "An algorithm's part has its parameters beside its `name`; an environment, an agent and a\n"
        "reward function have theirs under `options`.\n"
    )
    before = ""
    for where, name, keys in parameters():
        parts += [f"### {where}\n"] if where != before else []
        parts += [f"**{name}**" + (": no parameters.\n" if not keys else "\n")]
        parts += [_table(keys)] if keys else []
        before = where
    return "\n".join(parts)


def _walk(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Key]]]:
    base = _REPEATED.get(path)
    common = _SCHEMA["$defs"]["EnvironmentConfig"]["properties"] if base else {}
    keys, below = [], []
    for name, field in schema["properties"].items():
        if name in common and field == common[name]:
            continue
        inner, suffix = _inner(field)
        if inner is not None:
            below.append((f"{path}.{name}".lstrip(".") + suffix, inner))
        required = name in schema.get("required", ())
        keys.append(Key(name, _kind(field), _default(field, required), _text(field)))
    about = _sentence(schema.get("description", "").partition("Raises `")[0])
    if base:
        about += f" It has the keys of [`{base}`](#{base}), too."
    yield path, about, keys
    for dotted, inner in below:
        yield from _walk(dotted, inner)


def _inner(field: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The section that a field holds, and [] where it is a list of such."""
    for each in field.get("anyOf", [field]):
        items = each.get("items", {})
        for schema, suffix in ((each, ""), (items, "[]")):
            if "$ref" in schema:
                return _SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], suffix
            if "properties" in schema:
                return schema, suffix
    return None, ""


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"])
    if "$ref" in field or "properties" in field:
        return "a section"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{each}`" for each in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of: {_kind(field.get('items', {}))}"
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
        "null": "`null`",
        "object": "mapping",
    }
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:g}" for key, sign in bounds.items() if key in field]
    return " ".join([names.get(field.get("type", ""), "anything"), ", ".join(limits)]).strip()


def _default(field: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    inner, suffix = _inner(field)
    if inner is not None and not suffix and field.get("default") is not None:
        return "below"
    if "default" not in field:
        return "`{}`" if field.get("type") == "object" else "*derived*"
    return _written(field["default"])


def _written(value: Any) -> str:
    text = f"`{json.dumps(value)}`"
    sized = isinstance(value, int) and value >= _GIB and value % _GIB == 0
    return f"{text} ({value // _GIB} GiB)" if sized else text


def _text(field: Mapping[str, Any]) -> str:
    return str(field.get("description", ""))


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _fields(model: type[BaseModel]) -> Iterator[Key]:
    """The parameters of a registered algorithm."""
    schema = model.model_json_schema()
    meanings = described(model, schema.get("properties", {}))
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        yield Key(name, _kind(field), _default(field, required), meanings.get(name, ""))


def _options(model: type[Options], prefix: str = "") -> Iterator[Key]:
    """The options of an environment, those inside of others dotted."""
    fields = dataclasses.fields(model)  # type: ignore[arg-type]
    meanings, hints = described(model, [each.name for each in fields]), get_type_hints(model)
    for field in fields:
        kind = hints[field.name]
        if isinstance(kind, type) and issubclass(kind, Options):
            yield from _options(kind, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        shown = "required" if required else _written(default)
        meaning = meanings.get(field.name, "")
        yield Key(f"{prefix}{field.name}", _hinted(kind), shown, meaning)


def _arguments(function: type) -> Iterator[Key]:
    """The options of a reward function."""
    given = inspect.signature(function).parameters
    meanings, hints = described(function, given), get_type_hints(function.__init__)
    for name, each in given.items():
        required = each.default is inspect.Parameter.empty
        shown = "required" if required else _written(each.default)
        if name == "timeout_seconds":
            shown = "`reward.timeout_seconds`"
        yield Key(name, _hinted(hints[name]), shown, meanings.get(name, ""))


def _hinted(hint: Any) -> str:
    """As `_kind`, of a Python type."""
    schema = TypeAdapter(hint).json_schema()
    schema = {key: each for key, each in schema.items() if key != "$defs"}
    return _kind(schema).replace("a section", "mapping")


def described(owner: type, names: Iterable[str]) -> dict[str, str]:
    """The meanings of names that the docstrings of a class and its bases give as `name: text`."""
    names, found = list(names), {}
    choice = "|".join(re.escape(name) for name in names)
    start = re.compile(rf"(?:^|(?<=[.:;] )|(?<=\n))((?:{choice})(?:, (?:{choice}))*): ")
    for cls in reversed(owner.__mro__) if choice else ():
        lines = [_sentence(line) for line in (cls.__doc__ or "").splitlines()]
        text = "\n".join(lines).partition("\nRaises")[0]
        starts = list(start.finditer(text))
        ends = [each.start() for each in starts[1:]] + [len(text)] * bool(starts)
        for each, end in zip(starts, ends, strict=True):
            meaning = _sentence(text[each.end() : end].partition("\n\n")[0])
            meaning = meaning[:1].upper() + meaning[1:]
            found |= dict.fromkeys(each[1].split(", "), meaning)
    return found


def _table(keys: list[Key]) -> str:
    rows = [f"| `{k.name}` | {k.kind} | {k.default} | {_escaped(k.description)} |" for k in keys]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _escaped(text: str) -> str:
    """Braces and angle brackets as they stand, no bar that would end a cell."""
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
