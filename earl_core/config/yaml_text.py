"""YAML of run files, `--set` and `--options`: one reading for all of them.

Scalars are those of YAML 1.2's core schema, which is what people expect of JSON's superset: `1e-3`
is a number, and `on`, `1:30`, `1_000` and `2026-01-02` are texts, as is all that stands in quotes.
A key that stands twice is refused, and so is what grows by its anchors beyond bounds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from earl_core.secrets import redact
from earl_core.system.errors import ConfigError

MOST_BYTES = 4 << 20
"""Largest size of a text."""

_MOST_NODES = 200_000
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?(?:\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
)
_PLAIN = (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT))


class _Loader(yaml.SafeLoader):
    """yaml_implicit_resolvers: replaced below."""

    def integer(self, node: yaml.ScalarNode) -> int:
        """Octal is `0o17` alone; `010` is ten."""
        text = str(self.construct_scalar(node))
        if not _INT.fullmatch(text):
            raise ConfigError(f"{text!r:.80} is no whole number of YAML 1.2")
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError:
            raise ConfigError(f"{text[:20]}... has too many digits: write fewer") from None

    def number(self, node: yaml.ScalarNode) -> float:
        """`.inf` and `.nan` are numbers, too."""
        text = str(self.construct_scalar(node))
        if not _FLOAT.fullmatch(text):
            raise ConfigError(f"{text!r:.80} is no number of YAML 1.2")
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML reads as something else than a text."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _PLAIN:
    _exact = re.compile(rf"(?:{_pattern.pattern})\Z")
    # Resolvers are found by a scalar's first character, None: of any.
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _exact, None)
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", _exact, None)
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<\Z"), ["<"])
_Loader.add_constructor(f"{_TAG}int", _Loader.integer)
_Loader.add_constructor(f"{_TAG}float", _Loader.number)


def read_yaml(text: str, what: str) -> Any:
    """The value of a text. what: names it in errors. Raises `ConfigError`."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{what} has more than {MOST_BYTES >> 20} MiB")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, loader, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError as error:
        raise ConfigError(redact(f"{what}: {error}")) from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{what} is not valid YAML: {redact(str(error))}") from None


def write_yaml(value: Any, *, allow_unicode: bool = False) -> str:
    """Plain data as YAML, in its order; `read_yaml` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode)


def _check(node: yaml.Node, loader: _Loader, sizes: dict[int, int]) -> int:
    """Count the nodes that this one stands for with its anchors written out. Raises `ConfigError`
    for too many, for a key that stands twice, and for an anchor that holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        if any("\ud800" <= each <= "\udfff" for each in node.value):
            raise ConfigError(f"the text in line {node.start_mark.line + 1} holds half a character")
        return 1
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConfigError(f"the anchor in line {node.start_mark.line + 1} holds itself")
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, loader)
        inner = [each for pair in node.value for each in pair]
    size = 1 + sum(_check(each, loader, sizes) for each in inner)
    if size > _MOST_NODES:
        raise ConfigError(f"it holds more than {_MOST_NODES:,} values with its anchors written out")
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode, loader: _Loader) -> None:
    seen: dict[Hashable, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"the key in line {key.start_mark.line + 1} is no text: write one")
        # Of anchors, several may be merged.
        name = loader.construct_object(key) if key.tag != f"{_TAG}merge" else object()
        line = key.start_mark.line + 1
        if name in seen:
            raise ConfigError(
                f"the key {name!r} stands twice, in line {seen[name]} and in line {line}",
                remedy="join the two, or remove one",
            )
        seen[name] = line
