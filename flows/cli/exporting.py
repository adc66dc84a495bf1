"""`earl export`."""

from __future__ import annotations

import shutil
from pathlib import Path

from earl_core.config import ConfigError
from earl_core.config.model import ModelConfig
from earl_core.config.redaction import load_rules, redaction_of
from earl_core.control.policy_player import find_checkpoint
from earl_core.pretrained.adapter_directory import is_adapter
from earl_core.run.episode_export import export_episodes
from earl_core.run.export import check_target, export_policy
from earl_core.run.model_card import model_card
from earl_core.run.record import lineage, read_record, stored_config
from earl_core.secrets.rules import Redaction
from earl_core.system.files import make_directory
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from flows.cli.tables import make_console


def export(
    run: str,
    runs_directory: str,
    to: str,
    checkpoint: str,
    output: Path | None,
    rules: Path | None = None,
) -> None:
    """Write the checkpoint's directory, or the episodes, and say where. Raises `ConfigError`."""
    path = find_run(run, runs_directory)
    if to == "episodes":
        _episodes(path, output or path / "export" / "episodes.parquet", rules)
        return
    if to not in ("hf", "adapter"):
        raise ConfigError(
            "--to takes hf, a Hugging Face directory, adapter, one of PEFT's, or episodes, and not "
            f"{to!r}"
        )
    if rules is not None:
        raise ConfigError("--redact goes with --to episodes: leave it out")
    config = stored_config(path)
    redaction_of(config)
    evaluations = evaluations_of(path)
    target = output or path / "export" / checkpoint
    check_target(target)
    found = find_checkpoint(path, config, checkpoint)
    pairs = is_adapter(found.policy)
    if to == "adapter" and not pairs:
        raise ConfigError(f"{found.label} of {config.name} is a whole model: export it --to hf")
    merges = pairs and to == "hf"

    def fill(target: Path) -> None:
        if merges:
            _merge(found.policy, config.initial_model, target)
        else:
            shutil.copytree(found.policy, target, dirs_exist_ok=True)

    console = make_console()
    for text in found.damaged:
        console.print(text, style="yellow")
    lines, ancestors = iterations_of(path), lineage(read_record(path))
    library = "peft" if to == "adapter" else "transformers"
    card = model_card(
        config, found.version, found.label, lines, evaluations, ancestors, library=library
    )
    files = export_policy(fill, found.marker, target, card)
    console.print(f"{target}: {found.label} of {config.name}")
    console.print(f"  {', '.join(files)}")
    loader = "AutoPeftModelForCausalLM" if to == "adapter" else "AutoModelForCausalLM"
    console.print(f'  {loader}.from_pretrained("{target}") loads it')
    console.print("  README.md names no license: put yours in")


def _episodes(run: Path, target: Path, rules: Path | None) -> None:
    """Write the kept episodes, and say what was hidden and what is left to look at."""
    config = stored_config(run)
    redaction = redaction_of(config) if rules is None else Redaction(load_rules(rules))
    make_directory(target.absolute().parent)
    try:
        done = export_episodes(run, target, redaction)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror})") from None
    console = make_console()
    for text in done.damaged:
        console.print(text, style="yellow", markup=False)
    console.print(f"{target}: {done.episodes:,} episodes of {run.name}, without their tokens")
    for name, times in done.found.items():
        said = f"{times:,} times" if times else "found nothing"
        console.print(f"  {name}: {said}", style=None if times else "yellow", markup=False)
    left = done.remnants
    console.print(
        f"  left to look at: {left['tokens']['rare_strings']:,} rare strings, "
        f"{left['turns']['verbatim']:,} stretches copied from prompts, "
        f"{left['linked']['identifiers']:,} identifiers in several episodes, "
        f"{left['linked']['times']:,} times ({done.report}, not to be shared)",
        markup=False,
    )
    if not redaction.given:
        console.print("  no --redact: only what looks like a secret was hidden", style="yellow")


def _merge(adapter: Path, model: ModelConfig, target: Path) -> None:
    """Write the whole model that an adapter and its base make."""
    from earl_core.learner.state.model_files import copy_model_files
    from earl_core.weights.adapter import write_merged

    base = Path(model.path)
    copy_model_files(base, target)
    if model.chat_template is not None:
        shutil.copyfile(model.chat_template, target / "chat_template.jinja")
    write_merged(adapter, base, target)
