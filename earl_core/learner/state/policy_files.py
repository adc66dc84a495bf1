"""The files of a training state that hold the policy: a whole model's, or an adapter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from earl_core.config.model import AdapterConfig
from earl_core.learner.low_rank import pairs_of, peft_name
from earl_core.learner.state.model_files import write_model_files
from earl_core.pretrained.adapter_checks import check_source
from earl_core.pretrained.adapter_directory import (
    ADAPTER_FOLDER,
    BASE_DIGEST,
    PAIRS_FILE,
    POLICY_FOLDER,
    adapter_config,
    write_adapter_config,
)
from earl_core.pretrained.huggingface import PreTrainedModel, PreTrainedTokenizerBase
from earl_core.tensors.errors import CheckpointError
from earl_core.tensors.safetensors_layout import open_file
from earl_core.weights.adapter import open_pairs
from earl_core.weights.load import model_files
from earl_core.weights.manifest import AdapterEntry


@dataclass(frozen=True)
class PolicyFiles:
    """The policy of a model in a training state. adapter: the one that is trained; None: all of the
    model is."""

    model: PreTrainedModel
    adapter: AdapterEntry | None = None

    @property
    def folder(self) -> str:
        """Name of the folder below the state's directory."""
        return ADAPTER_FOLDER if self.adapter else POLICY_FOLDER

    @property
    def stem(self) -> str:
        """Name of the files with the tensors, without its ending."""
        return PAIRS_FILE.partition(".")[0] if self.adapter else "model"

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers of these files say besides."""
        noted = self.adapter.base_digest if self.adapter else ""
        return {"format": "pt"} | ({BASE_DIGEST: noted} if noted else {})

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that a state holds, by the model's names, tied ones once."""
        return pairs_of(self.model) if self.adapter else dict(self.model.named_parameters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in the files; buffers that `save_pretrained` writes are among
        a whole model's, and every rank holds those whole."""
        if self.adapter is not None:
            return {peft_name(name): each for name, each in self.trained.items()}
        return self.trained | _persistent_buffers(self.model)

    def write_others(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the folder with all files but those of the tensors."""
        folder = directory / self.folder
        folder.mkdir(parents=True)
        if self.adapter is None:
            write_model_files(folder, self.model, tokenizer)
            return
        base, adapter = str(self.model.config._name_or_path), self.adapter
        config = adapter_config(base, adapter.rank, adapter.alpha, adapter.targets)
        write_adapter_config(folder, config)

    def open(self, directory: Path) -> dict[str, torch.Tensor]:
        """The stored tensors of `trained`, mapped, by the model's names.

        Raises `CheckpointError` where one is missing or has another shape, `ConfigError` for an
        adapter of another base or other settings.
        """
        folder, wanted = directory / self.folder, self.trained
        if self.adapter is not None:
            said = AdapterConfig(rank=self.adapter.rank, alpha=self.adapter.alpha)
            check_source(said, folder)
            shapes = {peft_name(name): tuple(each.shape) for name, each in wanted.items()}
            pairs = open_pairs(folder, shapes, self.adapter.base_digest)
            return {name: pairs[peft_name(name)] for name in wanted}
        found = {n: t for path in model_files(folder) for n, t in open_file(path).items()}
        for name, tensor in wanted.items():
            if name not in found or found[name].shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint {directory} lacks {name}, or holds it with another shape. "
                    "Resume from another checkpoint."
                )
        return found


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
