"""The model card of an exported checkpoint: what trained it, on what, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_core import __version__
from earl_core.config import RunConfig
from earl_core.config.model import ModelConfig
from earl_core.config.yaml_text import read_yaml, write_yaml
from earl_core.secrets import shareable
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text

Line = Mapping[str, Any]

_KNOWN_BASES = {
    "earl_core.models.smollm2:build": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
}
"""Name and license of the models that builders of ours make."""

_MADE_ANEW = "earl_core.models.tiny:build"
"""Makes a model that was trained from no other one."""

_CURVE_ROWS = 12


def model_card(
    config: RunConfig,
    version: int,
    label: str,
    iterations: Sequence[Line],
    evaluations: list[Line],
    ancestors: Sequence[Line] = (),
    *,
    library: str = "transformers",
) -> str:
    """Markdown with the front matter of the model hub.

    version, label: of the policy. ancestors: as the run's record has them, the nearest first.
    iterations, evaluations: all of the run, ascending; those after the policy's version are left
    out. library: the one that loads the directory.
    """
    trained = [line for line in iterations if line["iteration"] < version]
    sections = [
        _front(config, ancestors, library),
        f"# {config.name}\n\n{_summary(config, version, label, ancestors)}",
        _lineage(ancestors),
        _curve(trained),
        _evaluations([line for line in evaluations if line["iteration"] <= version]),
        _reproduce(config),
        _license(config, ancestors),
    ]
    return shareable("\n\n".join(section for section in sections if section) + "\n")


def _base(config: RunConfig, ancestors: Sequence[Line]) -> tuple[str, str]:
    """Name and license of the model that training began with, in the first of the runs where there
    are several; empty where they are not known."""
    first = _first_model(config, ancestors)
    if first.from_hub:
        return first.path, _license_in(Path(first.path))
    known = _KNOWN_BASES.get(first.builder or "")
    return known or ("", _license_in(Path(first.path)))


def _first_model(config: RunConfig, ancestors: Sequence[Line]) -> ModelConfig:
    if not ancestors:
        return config.model
    first = ancestors[-1]
    return ModelConfig(**first.get("model", {"path": first["path"]}))


def _lineage(ancestors: Sequence[Line]) -> str:
    """One line for each ancestor, the nearest first."""
    rows = []
    for each in ancestors:
        iteration = each.get("iteration")
        at = "" if iteration is None else f", its checkpoint of iteration {iteration}"
        critic = f", of its critic `{each['critic_digest']}`" if "critic_digest" in each else ""
        rows.append(f"* `{each['name']}`{at} (digest `{each['digest']}`{critic})")
    head = (
        "## Ancestors\n\nTraining began with the weights of the first; each of them began with "
        "the next:\n"
    )
    return "\n".join([head, *rows]) if rows else ""


def _license_in(model: Path) -> str:
    """Read the license that the model's own card names; empty without one."""
    try:
        what = str(model / "README.md")
        text = read_text(Path(what), what)
        front = read_yaml(text.split("---")[1], what) if text.startswith("---") else {}
    except (OSError, IndexError, ConfigError):
        return ""
    return str(front.get("license", "")) if isinstance(front, dict) else ""


def _front(config: RunConfig, ancestors: Sequence[Line], library: str) -> str:
    name, _ = _base(config, ancestors)
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if name:
        front["base_model"] = name
    front["tags"] = ["reinforcement-learning", "earl"]
    return f"---\n{write_yaml(front)}---"


def _summary(config: RunConfig, version: int, label: str, ancestors: Sequence[Line]) -> str:
    name, first = _base(config, ancestors)[0], _first_model(config, ancestors)
    made = f"made by `{first.builder}`" if first.builder else "as it was given"
    base = f"`{name or first.path}`" + ("" if name else f" ({made})")
    if ancestors:
        base = f"`{ancestors[0]['name']}`, which goes back to {base},"
    played = sorted({each.played for each in config.played.values()})
    games = ", ".join(f"`{each}`" for each in played)
    imitating = version - config.played_before(version)
    resting = min(version, config.critic.warmup_iterations) if config.critic else 0
    episodes = config.played_before(version) * config.rollout.episodes_per_iteration
    how = (
        f"by {version} iteration{'' if version == 1 else 's'} of {config.iterations}, of "
        f"{config.rollout.prompts_per_iteration} prompts and {config.rollout.group_size} episodes "
        f"a prompt ({episodes:,} episodes)"
        + (f", the first {imitating} from demonstrations" if imitating else "")
        + (f", the first {resting} of a critic alone" if resting else "")
        if version
        else "not at all: this is the model before training"
    )
    return (
        f"Trained from {base} by reinforcement learning in {games} with EARL {__version__}, {how}. "
        f"This is {label}.\n\n"
        f"Advantage `{config.algorithm.advantage['name']}`, policy loss "
        f"`{config.algorithm.policy_loss['name']}`, learning rate {config.update.learning_rate:g}, "
        f"rollout temperature {config.rollout.temperature:g}, seed {config.seed}{_pairs(config)}."
    )


def _pairs(config: RunConfig) -> str:
    adapter = config.model.adapter
    if adapter is None:
        return ""
    return f"; low-rank pairs of rank {adapter.rank} and alpha {adapter.alpha:g}, the rest frozen"


def _curve(trained: Sequence[Line]) -> str:
    if not trained:
        return ""
    step = max(1, -(-len(trained) // _CURVE_ROWS))
    shown = [*trained[:-1:step], trained[-1]]
    rows = [
        f"| {line['iteration']} | {_number(line, 'reward/mean')} "
        f"| {_number(line, 'rollout/context/mean', '.0f')} |"
        for line in shown
    ]
    head = "| iteration | mean return | mean tokens an episode |\n|--:|--:|--:|"
    return "\n".join(["## Training", "", head, *rows])


def _evaluations(evaluations: Sequence[Line]) -> str:
    if not evaluations:
        return ""
    last = evaluations[-1]
    names = [
        name.removeprefix("outcome/").removesuffix("/count")
        for name in last
        if name.startswith("outcome/") and name.endswith("/count")
    ]
    rows = [
        f"| {name} | {last[f'outcome/{name}/count']:.0f} | {last[f'outcome/{name}/share']:.1%} "
        f"| {last[f'outcome/{name}/low']:.1%} to {last[f'outcome/{name}/high']:.1%} |"
        for name in names
    ]
    count, first = sum(last[f"outcome/{name}/count"] for name in names), evaluations[0]
    text = (
        f"{count:.0f} held-out episodes of policy version {last['iteration']}: mean return "
        f"{_number(last, 'return/mean')}; of version {first['iteration']} "
        f"{_number(first, 'return/mean')}."
    )
    head = "| outcome | episodes | share | 95 % Wilson interval |\n|:--|--:|--:|--:|"
    return "\n".join(["## Evaluation", "", text, "", head, *rows])


def _number(line: Line, name: str, form: str = "+.3f") -> str:
    return format(line[name], form) if name in line else ""


def _reproduce(config: RunConfig) -> str:
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude={"runs_directory"})
    text = write_yaml(settings).rstrip()
    return (
        "## Reproduce\n\nWith EARL "
        f"{__version__}, save this as `{config.name}.yaml` and run "
        f"`earl train {config.name}.yaml`:\n\n```yaml\n{text}\n```"
    )


def _license(config: RunConfig, ancestors: Sequence[Line]) -> str:
    name, known = _base(config, ancestors)
    if known:
        base = f"That of the base model {f'`{name}` ' if name else ''}is `{known}`."
    elif _first_model(config, ancestors).builder == _MADE_ANEW:
        base = "The model was trained from no other one."
    else:
        base = "That of the base model is not known here: look it up first."
    return "## License\n\nNot chosen yet: add `license:` to the front matter of this file. " + base
