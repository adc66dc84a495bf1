"""The part of a Dockerfile that needs no docker: folders, variables and files that are copied."""

from __future__ import annotations

import glob
import json
import os
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from earl_core.system.errors import ConfigError

_NO_EFFECT = {
    "FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "SHELL",
    "MAINTAINER", "USER",
}  # fmt: skip
"""A program of the run takes the place of what an image would start, as its user."""

_HERE_DOCUMENT = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")
_REFERENCE = re.compile(r"\\\$|\$(?:\{(\w+)(?:(:[-+])([^}]*))?\}|(\w+))")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass
class Image:
    """workdir: where commands run. copies: file or folder of the context to a path, or into it
    where the path ends in a slash. made: folders that it makes. commands: its RUN instructions."""

    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def read_image(context: Path, path: str | None) -> Image:
    """Read the Dockerfile of a context; without one, all of the context is copied to `/app`. path:
    what $PATH is. Raises `ConfigError`, which names the instruction that cannot be done."""
    file = context / "Dockerfile"
    if not file.is_file():
        return Image("/app", {}, [(context, "/app")], ["/app"])
    image, arguments = Image(), {"PATH": path or os.defpath}
    try:
        for name, rest, heres in _instructions(file.read_text(encoding="utf-8")):
            if name == "FROM":
                # The last stage is the image.
                image = Image()
            _take(image, arguments, context, name, rest, heres)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} {error}", remedy="use runtime: docker, or leave the task out"
        ) from None
    return image


def rooted(path: str) -> str:
    """The path from the root that it means there; of several slashes at its beginning, which have
    a meaning of their own, one is left."""
    return "/" + posixpath.normpath(f"/{path}").lstrip("/")


def _take(
    image: Image,
    arguments: dict[str, str],
    context: Path,
    name: str,
    rest: str,
    heres: bool,
) -> None:
    def filled(text: str) -> str:
        return _filled(text, {**arguments, **image.variables})

    if name in _NO_EFFECT:
        return
    if name == "RUN":
        image.commands.append(rest)
    elif name == "ARG":
        key, _, value = rest.partition("=")
        arguments[key.strip()] = filled(value.strip().strip("\"'"))
    elif name == "ENV":
        image.variables |= {key: filled(value) for key, value in _pairs(rest)}
    elif name == "WORKDIR":
        image.workdir = rooted(posixpath.join(image.workdir, filled(rest.strip())))
        image.made.append(image.workdir)
    elif name in ("COPY", "ADD") and not heres:
        image.copies += _copied(context, image.workdir, name, filled(rest))
    else:
        raise ValueError(f"has an instruction that is not done without docker: {name} {rest}")


def _instructions(text: str) -> list[tuple[str, str, bool]]:
    """Name, arguments and whether there is a document below, of each instruction."""
    found, lines = [], iter(text.splitlines())
    for line in lines:
        whole = line.strip()
        if not whole or whole.startswith("#"):
            continue
        while whole.endswith("\\"):
            more = next(lines, "").strip()
            # Comments may stand in between.
            whole = whole if more.startswith("#") else f"{whole[:-1].rstrip()} {more}"
        name, _, rest = whole.partition(" ")
        heres = _HERE_DOCUMENT.findall(rest) if name.upper() in ("RUN", "COPY", "ADD") else []
        for end in heres:
            for below in lines:
                if below.strip() == end:
                    break
        found.append((name.upper(), rest.strip(), bool(heres)))
    return found


def _pairs(rest: str) -> list[tuple[str, str]]:
    first, _, value = rest.partition(" ")
    if "=" not in first:
        return [(first, value.strip())]
    pairs = (word.partition("=") for word in shlex.split(rest))
    return [(key, value) for key, _, value in pairs]


def _filled(text: str, values: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        value = values.get(match[1] or match[4], "")
        if match[2] == ":-":
            return value or match[3]
        return (match[3] if value else "") if match[2] else value

    return _REFERENCE.sub(one, text)


def _copied(context: Path, workdir: str, name: str, rest: str) -> list[tuple[Path, str]]:
    options = []
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        options.append(option)
        rest = rest.lstrip()
    if refused := [each for each in options if each.startswith(("--from", "--exclude"))]:
        raise ValueError(f"has {name} {refused[0]}, which is not done without docker")
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    *sources, target = words
    into = posixpath.join(workdir, target)
    folder = target.endswith(("/", "/.")) or target == "."
    found: list[tuple[Path, str]] = []
    for source in sources:
        if name == "ADD" and ("://" in source or source.endswith(_ARCHIVES)):
            raise ValueError(f"has ADD {source}, which is not done without docker")
        paths = _matching(context, source)
        if not paths:
            raise ValueError(f"copies {source!r}, which its folder does not have")
        for each in paths:
            above = Path(os.path.realpath(context if each == context else each.parent))
            if not above.is_relative_to(os.path.realpath(context)):
                raise ValueError(f"copies {source!r} through a link out of its folder")
        folder = folder or len(paths) > 1 or len(sources) > 1
        found += [
            (each, into if each.is_dir() or not folder else posixpath.join(into, each.name))
            for each in paths
        ]
    return [(each, rooted(path)) for each, path in found]


def _matching(context: Path, source: str) -> Sequence[Path]:
    inside = posixpath.normpath(f"/{source}").lstrip("/")
    if os.path.lexists(context / inside):
        return [context / inside]
    found = glob.glob(inside, root_dir=context, include_hidden=True)
    return [context / each for each in sorted(found)]
