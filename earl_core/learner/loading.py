"""Loading a policy on a mesh: each rank reads its own parts of the files.

transformers opens the files, with the names and layouts that a family has, and gives views of the
mapped bytes; only what it has to convert, such as experts that it joins, is memory of the rank.
The model that trains is made on the meta device and laid out, and each of its parts is copied out
of such a view, so that otherwise a rank's own memory never holds more than its parts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from earl_core.config.model import AdapterConfig, ModelConfig
from earl_core.learner.attention.varlen import ATTENTION_NAME, register_attention
from earl_core.learner.lm_head import give_value_head
from earl_core.learner.low_rank import base_alone, entry_of, first_pairs, pairs_of, peft_name
from earl_core.learner.model import prepare_for_packing, settle
from earl_core.learner.packing_check import without_interface
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel_model import ParallelModel, parallelize
from earl_core.learner.state.reshard import fill, places_of
from earl_core.pretrained.adapter_checks import check_adapter
from earl_core.pretrained.adapter_directory import PAIRS_FILE
from earl_core.pretrained.architecture import model_config
from earl_core.pretrained.huggingface import (
    AutoModelForCausalLM,
    PreTrainedModel,
    init_empty_weights,
)
from earl_core.pretrained.model_directory import model_directory, parts_left_out
from earl_core.pretrained.weight_digest import stored_digest
from earl_core.system.errors import ConfigError
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.device_copies import upload
from earl_core.tensors.safetensors_layout import open_file
from earl_core.tensors.slices import local_box, local_part
from earl_core.weights.load import tensor_files
from earl_core.weights.tied import check_tied

logger = logging.getLogger(__name__)


def load_policy(
    config: ModelConfig,
    mesh: UpdateMesh,
    *,
    mixed: bool = False,
    chunk_tokens: int | None = None,
    seed: int = 0,
    values: bool = False,
) -> ParallelModel:
    """Load a causal language model for packed training on a mesh, in float32, dropout off. Rank 0
    tries whether packing is exact. mixed, chunk_tokens: as in `parallelize`. seed: of the pairs of
    a fresh adapter. values: with a critic's head, all zeros. Collective.

    Raises ConfigError when the model is missing, or its files contradict its configuration, when
    its architecture cannot be trained packed or on this mesh, or have the adapter, or when it has
    no routers to freeze.
    """
    path = model_directory(config)
    check_adapter(config)
    stored = _open(config)
    settle(stored)
    Ranks(mesh).on_first(lambda: _try(stored, path))
    # Buffers that no file has, such as rotary frequencies, are computed as the model is made.
    with init_empty_weights(include_buffers=False):
        empty = type(stored)(copy.deepcopy(stored.config))
    empty.tie_weights()
    if values:
        give_value_head(stored)
        give_value_head(empty)
    empty.generation_config = stored.generation_config
    settle(empty)
    entry = None
    if config.adapter is not None:
        digest = Ranks(mesh).from_first(lambda: stored_digest(path))
        entry = entry_of(config.adapter, empty, digest)
    parallel = parallelize(
        empty,
        mesh,
        mixed=mixed,
        chunk_tokens=chunk_tokens,
        float32_head=config.float32_head,
        adapter=entry,
        frozen_routers=config.freeze_routers,
    )
    weights = {name: each.detach() for name, each in stored.named_parameters()}
    if config.adapter is not None and entry is not None:
        weights |= first_pairs(parallel.model, config.adapter, entry, seed)
    _take(weights, dict(stored.named_buffers()), parallel.model, mesh.device)
    return parallel


@contextmanager
def first_policy(model: PreTrainedModel, adapter: AdapterConfig | None) -> Iterator[None]:
    """Compute for a while with the weights that training began with: the base, with the pairs of
    the adapter's directory where there is one, else alone.

    model: with pairs, as a mesh has it; they are as before afterwards, bit for bit.
    """
    if adapter is None or adapter.source is None:
        with base_alone(model):
            yield
        return
    pairs, stored = pairs_of(model), open_file(Path(adapter.source) / PAIRS_FILE)
    trained = {name: local_part(pair).clone() for name, pair in pairs.items()}
    try:
        for name, pair in pairs.items():
            box = local_box(pair)
            if box.numel:
                local_part(pair).copy_(stored[peft_name(name)][box.index])
        yield
    finally:
        for name, pair in pairs.items():
            local_part(pair).copy_(trained[name])


@torch.no_grad()
def _take(
    weights: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
    model: PreTrainedModel,
    device: torch.device,
) -> None:
    places = places_of(model)
    for name, parameter in dict(model.named_parameters()).items():
        box = local_box(parameter)
        part = torch.empty(box.sizes, dtype=parameter.dtype, device=device)
        if box.numel:
            upload([(part, weights[name][box.index])])
        fill(places[name], parameter, part)
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                buffer = kept[f"{prefix}.{leaf}".lstrip(".")].to(buffer.dtype)
            module._buffers[leaf] = buffer.to(device)


def _try(stored: PreTrainedModel, path: Path) -> None:
    prepare_for_packing(stored)
    if parts := parts_left_out(path, dict(stored.named_parameters())):
        logger.warning(
            "text only: %s of %s are neither trained nor published", " and ".join(parts), path
        )


def _open(config: ModelConfig) -> PreTrainedModel:
    """The model with views of its files' bytes, in their widest dtype."""
    path = model_directory(config)
    check_tied(path, config.trust_remote_code)
    found = {t.dtype for file in tensor_files(path, "model") for t in open_file(file).values()}
    widths = [each for each in found if each.is_floating_point]
    try:
        loaded, said = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config(path, config.trust_remote_code),
            dtype=max(widths, key=lambda each: each.itemsize, default=torch.float32),
            attn_implementation=register_attention(),
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise without_interface(f"The model at {path}") from error
    if missing := sorted(said["missing_keys"]):
        # transformers has made up what they would be.
        raise ConfigError(
            f"the files of {path} lack {missing[0]} ({len(missing)} in all) of "
            f"{type(loaded).__name__}: take the whole model, and see whether tie_word_embeddings "
            "in its config.json is true for a model without an output layer of its own"
        )
    return cast(PreTrainedModel, loaded)
