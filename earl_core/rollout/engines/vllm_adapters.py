"""Versions of an adapter as vLLM wants them: a folder in PEFT's format and a request that names it.

vLLM keys the keys and values that it caches by an adapter's name and folder, so that no version may
ever have those of another one: a reload under the same name answers with stale blocks.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from earl_core.pretrained.adapter_directory import PAIRS_FILE, adapter_config, write_adapter_config
from earl_core.rollout.errors import WeightSyncError
from earl_core.weights.manifest import WeightsManifest

# Versions whose answers are sampled in one step: the current one and the one before, whose last
# answers are on their way. Requests of a third one wait for a place.
_IN_ONE_STEP = 2
# Versions that vLLM remembers. When it forgets one it reads the file again, which may be gone.
_REMEMBERED = 64


def adapter_arguments(rank: int, matrices: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for pairs of this rank or less beside these matrices.

    Named, because vLLM would otherwise reckon with a pair beside the head in every step.
    """
    from vllm.config.lora import MaxLoRARanks

    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}
    return {
        "enable_lora": True,
        "max_lora_rank": min(each for each in get_args(MaxLoRARanks) if each >= rank),
        "max_loras": _IN_ONE_STEP,
        "max_cpu_loras": _REMEMBERED,
        "lora_target_modules": sorted(modules),
    }


class AdapterFolders:
    """Folders of versions in a folder of one engine. base: where the model lies."""

    def __init__(self, parent: Path, base: Path) -> None:
        self._parent = parent
        self._base = base
        # A version may come again with other tensors, and is another one then.
        self._numbers = itertools.count(1)

    def make(self, manifest: WeightsManifest) -> Any:
        """vLLM's `LoRARequest` of a version, whose folder has a link to the published file."""
        from vllm.lora.request import LoRARequest

        adapter = manifest.adapter
        assert adapter is not None
        if len(manifest.files) != 1:
            raise WeightSyncError(
                f"policy version {manifest.policy_version} was not loaded: its pairs are in "
                f"{len(manifest.files)} files, vLLM takes one"
            )
        number = next(self._numbers)
        name = f"policy-{manifest.policy_version:06d}-{number}"
        folder = self._parent / name
        folder.mkdir()
        config = adapter_config(str(self._base), adapter.rank, adapter.alpha, adapter.targets)
        write_adapter_config(folder, config)
        (folder / PAIRS_FILE).symlink_to(manifest.files[0].path)
        return LoRARequest(name, number, str(folder))

    def remove(self, request: Any) -> None:
        """Remove a version's folder."""
        shutil.rmtree(request.lora_path, ignore_errors=True)
