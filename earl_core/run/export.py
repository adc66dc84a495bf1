"""A checkpoint as a Hugging Face directory of its own, with a model card.

The weights are those of the checkpoint's own files: it holds whole tensors whatever the learner's
layout was. The export carries a mark; a directory without it is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from earl_core.config import ConfigError
from earl_core.run.checkpoints import file_checksum, holding_checkpoint
from earl_core.system.files import read_file, remove, sync, write_atomic

MARK = "earl-export.json"
_CARD = "README.md"
_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_target(target: Path) -> None:
    """Raise `ConfigError` where something lies at `target` that no export has left, and where
    somebody put files into one or edited its model card."""
    if not os.path.lexists(target):
        return
    sums = _sums(target)
    if sums is None:
        raise ConfigError(
            f"{target} is no export of ours, and is not replaced: choose another --output"
        )
    found = {
        path.relative_to(target).as_posix()
        for path in target.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    others = sorted(found - sums.keys() - {MARK})
    if _CARD in found & sums.keys() and file_checksum(target / _CARD) != sums[_CARD]:
        others.insert(0, _CARD)
    if others:
        raise ConfigError(
            f"{target} is not replaced, because it holds what no export wrote ({others[0]}"
            f"{' and more' if others[1:] else ''}): move that away, or choose another --output"
        )


def _sums(target: Path) -> dict[str, str] | None:
    """The checksums of an export's files by their paths; None where no export lies."""
    try:
        return dict(json.loads(read_file(target / MARK))["xxh3"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_policy(
    fill: Callable[[Path], object], marker: Path | None, target: Path, card: str
) -> list[str]:
    """Write a policy to `target`, which appears whole or not at all; the names of its files.

    fill: writes the files into the empty directory that it gets. marker: the STABLE file of the
    checkpoint that they belong to, which is held meanwhile. An earlier export is replaced. Raises
    `ConfigError` as `check_target` does, `OSError`, and what `fill` raises.
    """
    check_target(target)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".exporting", dir=parent))
    try:
        with holding_checkpoint(marker) if marker is not None else nullcontext():
            fill(building)
        if (building / _CONFIG).exists() and not (building / _GENERATION).exists():
            write_atomic(building / _GENERATION, _generation(building), 0o644)
        write_atomic(building / _CARD, card.encode(), 0o644)
        found = [path for path in building.rglob("*") if path.is_file()]
        files = sorted(path.relative_to(building).as_posix() for path in found)
        sums = {name: file_checksum(building / name) for name in files}
        write_atomic(building / MARK, json.dumps({"xxh3": sums}, indent=1).encode(), 0o644)
        for name in files:
            sync(building / name)
        sync(building)
        _into_place(building, target, parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return files


def _generation(directory: Path) -> bytes:
    """Make a generation configuration, with the settings that `generate` needs, for a model whose
    directory has none."""
    config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    ids = {name: config[name] for name in _IDS if config.get(name) is not None}
    return json.dumps({"_from_model_config": True, **ids}, indent=2).encode()


def _into_place(building: Path, target: Path, parent: Path) -> None:
    # mkdtemp makes what only its owner enters.
    building.chmod(0o777 & ~_umask())
    check_target(target)
    old = building.with_suffix(".replaced")
    if os.path.lexists(target):
        os.rename(target, old)
    os.rename(building, target)
    sync(parent)
    if os.path.lexists(old):
        remove(old)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
