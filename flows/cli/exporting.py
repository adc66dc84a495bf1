"""`earl export`."""

from __future__ import annotations

import shutil
from pathlib import Path

from earl_core.config import ConfigError
from earl_core.config.model import ModelConfig
from earl_core.control.policy_player import find_checkpoint
from earl_core.pretrained.adapter_directory import is_adapter
from earl_core.run.export import check_target, export_policy
from earl_core.run.model_card import model_card
from earl_core.run.record import lineage, read_record, stored_config
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from flows.cli.tables import make_console


def export(run: str, runs_directory: str, to: str, checkpoint: str, output: Path | None) -> None:
    """Write the checkpoint's directory and say where it is. Raises `ConfigError`."""
    if to not in ("hf", "adapter"):
        raise ConfigError(
            f"--to takes hf, a Hugging Face directory, or adapter, one of PEFT's, and not {to!r}"
        )
    path = find_run(run, runs_directory)
    config = stored_config(path)
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


def _merge(adapter: Path, model: ModelConfig, target: Path) -> None:
    """Write the whole model that an adapter and its base make."""
    from earl_core.learner.state.model_files import copy_model_files
    from earl_core.weights.adapter import write_merged

    base = Path(model.path)
    copy_model_files(base, target)
    if model.chat_template is not None:
        shutil.copyfile(model.chat_template, target / "chat_template.jinja")
    write_merged(adapter, base, target)
