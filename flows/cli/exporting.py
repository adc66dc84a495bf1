"""`earl export`."""

from __future__ import annotations

from pathlib import Path

from earl_core.config import ConfigError
from earl_core.control.policy_player import find_checkpoint
from earl_core.run.export import check_target, export_policy
from earl_core.run.model_card import model_card
from earl_core.run.record import lineage, read_record, stored_config
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from flows.cli.tables import make_console


def export(run: str, runs_directory: str, to: str, checkpoint: str, output: Path | None) -> None:
    """Write the checkpoint's directory and say where it is. Raises `ConfigError`."""
    if to != "hf":
        raise ConfigError(f"--to takes hf, a Hugging Face directory, and not {to!r}")
    path = find_run(run, runs_directory)
    config = stored_config(path)
    evaluations = evaluations_of(path)
    target = output or path / "export" / checkpoint
    check_target(target)
    found = find_checkpoint(path, config, checkpoint)
    console = make_console()
    for text in found.damaged:
        console.print(text, style="yellow", highlight=False)
    lines, ancestors = iterations_of(path), lineage(read_record(path))
    card = model_card(config, found.version, found.label, lines, evaluations, ancestors)
    files = export_policy(found.policy, found.marker, target, card)
    console.print(f"{target}: {found.label} of {config.name}", highlight=False)
    console.print(f"  {', '.join(files)}", highlight=False)
    console.print(f'  AutoModelForCausalLM.from_pretrained("{target}") loads it', highlight=False)
    console.print("  README.md names no license: put yours in", highlight=False)
