"""Write policy weights in place into shared memory and seal them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from earl_core.weights.manifest import TensorEntry, WeightFile, WeightsError, WeightsManifest
from earl_core.weights.safetensors_layout import DTYPE_CODES, Layout, map_file, plan_layout, view

logger = logging.getLogger(__name__)


def publish(
    named_tensors: Mapping[str, torch.Tensor],
    directory: Path,
    policy_version: int,
    dtype: torch.dtype | str,
    *,
    config_digest: str = "",
) -> WeightsManifest:
    """Write `directory/weights-<policy_version>.safetensors` and describe it.

    `named_tensors` are the model's parameters and persistent buffers under Hugging Face
    state-dict names; floating-point ones are cast to `dtype` (`torch.bfloat16` or `"bfloat16"`)
    straight into the mapped file, so that no second full copy exists. Tensors that share memory
    are written once, under the first name. Nothing is visible before the file is whole; a full
    disk or shared memory is an `OSError` and leaves nothing behind.
    """
    target = resolve_dtype(dtype)
    kept, tied = _split_tied(named_tensors)
    if not kept:
        raise WeightsError("there are no tensors to publish")
    shapes = {
        name: (target if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
        for name, tensor in kept.items()
    }
    layout = plan_layout(shapes, {"format": "pt", "policy_version": str(policy_version)})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"weights-{policy_version:08d}.safetensors"
    partial = directory / f".{path.name}.{os.getpid()}.partial"
    try:
        digest = _write(partial, layout, kept)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return WeightsManifest(
        policy_version=policy_version,
        files=(WeightFile(path=str(path.absolute()), bytes=layout.total_bytes),),
        tensors={
            name: TensorEntry(dtype=DTYPE_CODES[kind], shape=shape, file=0)
            for name, (kind, shape) in shapes.items()
        },
        tied=tied,
        digest=digest,
        config_digest=config_digest,
    )


def remove(manifest: WeightsManifest) -> None:
    """Unlink the manifest's files. Processes that have them mapped keep reading them whole."""
    for file in manifest.files:
        Path(file.path).unlink(missing_ok=True)


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """`torch.bfloat16` for `"bfloat16"` and so on."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"{dtype!r} is not a floating-point dtype: use bfloat16 or float32")
    return resolved


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes in the order of names; 32 hex digits."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        shape = ",".join(map(str, tensor.shape))
        state.update(f"{name}|{DTYPE_CODES[tensor.dtype]}|{shape}|".encode())
        if tensor.numel():
            state.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _split_tied(
    named_tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and not tensor.is_meta and key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        kept[name] = tensor
    return kept, tied


def _write(path: Path, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> str:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Pages are claimed before they are touched: writing a sparse mapping on a full tmpfs
        # would end in SIGBUS instead of an error.
        os.posix_fallocate(descriptor, 0, layout.total_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no room for {layout.total_bytes} bytes of weights in {path.parent}: free space "
            "there or point it at a larger file system",
        ) from error
    finally:
        os.close(descriptor)
    mapping = map_file(path, writable=True)
    mapping[: len(layout.prefix)] = layout.prefix
    written: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, place in layout.places.items():
            written[name] = view(mapping, place)
            written[name].copy_(tensors[name].detach())
    return digest_of(written)
