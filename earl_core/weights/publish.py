"""Write policy weights in place into shared memory and seal them, by one rank or by many."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.segment import Segment, writable_mappings
from earl_core.tensors.collectives import Mesh, Ranks
from earl_core.tensors.device_copies import Wait
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import TensorHashes
from earl_core.tensors.joint_file import digest_together, own_shares, write_shares
from earl_core.tensors.safetensors_layout import DTYPE_CODES, DTYPES, FileLayout, plan_layout, view
from earl_core.tensors.slices import local_part, slices_of
from earl_core.weights.manifest import (
    AdapterEntry,
    TensorEntry,
    WeightFile,
    WeightsManifest,
    mark_hashed,
)


def publish(
    named_tensors: Mapping[str, torch.Tensor],
    directory: Path,
    policy_version: int,
    dtype: torch.dtype | str,
    *,
    config_digest: str = "",
    adapter: AdapterEntry | None = None,
    mesh: Mesh | None = None,
) -> WeightsManifest:
    """Write `directory/weights-<policy_version>.safetensors` and describe it.

    `named_tensors` are the model's parameters and persistent buffers under Hugging Face state-dict
    names, or the pairs of `adapter` under PEFT's; DTensors where a mesh has cut them.
    Floating-point ones are cast to `dtype` (`torch.bfloat16` or `"bfloat16"`) straight into the
    mapped file, so that no second full copy exists on any rank. Those that share memory are
    written once, under the first name. With a mesh all its ranks call it and get the manifest; file
    and digest are those of one process. Where ranks are on several hosts, each gets the whole file.

    The file is a segment: the memory of a version that was released is used again. A GPU casts and
    writes into it by itself. Each byte is hashed once a host, tensor by tensor while others are
    written where one rank writes all of it; equal digests of all hosts are a condition. Nothing is
    visible before the file is whole; a version that is published again takes the old one's place. A
    full disk or shared memory is an `OSError` on all ranks, as is a directory that is no store.
    """
    ranks = Ranks(mesh)
    target = resolve_dtype(dtype)
    plan = ranks.from_first(lambda: _plan(named_tensors, target))
    shapes = {name: (DTYPES[code], tuple(shape)) for name, code, shape in plan["tensors"]}
    layout = plan_layout(shapes, {"format": "pt", "policy_version": str(policy_version)})
    path = directory / f"weights-{policy_version:08d}.safetensors"
    digest = _write_together(named_tensors, layout, path, ranks)
    return WeightsManifest(
        policy_version=policy_version,
        files=(WeightFile(path=str(path.absolute()), bytes=layout.total_bytes),),
        tensors={
            name: TensorEntry(dtype=DTYPE_CODES[kind], shape=shape, file=0)
            for name, (kind, shape) in shapes.items()
        },
        tied=plan["tied"],
        digest=digest,
        config_digest=config_digest,
        adapter=adapter,
    )


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """`torch.bfloat16` for `"bfloat16"` and so on."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"{dtype!r} is not a floating-point dtype: use bfloat16 or float32")
    return resolved


def _plan(named_tensors: Mapping[str, torch.Tensor], target: torch.dtype) -> dict[str, Any]:
    """Names, dtype codes and whole shapes of what is written, and which names share memory."""
    kept, tied = _split_tied(named_tensors)
    if not kept:
        raise WeightsError("there are no tensors to publish")
    tensors = []
    for name, tensor in kept.items():
        dtype = target if tensor.is_floating_point() else tensor.dtype
        if dtype not in DTYPE_CODES:
            raise WeightsError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
        tensors.append((name, DTYPE_CODES[dtype], list(tensor.shape)))
    return {"tensors": tensors, "tied": tied}


def _split_tied(
    named_tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors.items():
        part = local_part(tensor)
        key = (part.device, part.data_ptr(), tensor.shape, part.stride(), part.dtype)
        if part.numel() and not part.is_meta and key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        kept[name] = tensor
    return kept, tied


def _write_together(
    named_tensors: Mapping[str, torch.Tensor], layout: FileLayout, path: Path, ranks: Ranks
) -> str:
    """Every rank writes its share of its host's file, which the first one there seals; the tensors'
    digest."""
    slices = ranks.do(lambda: slices_of(named_tensors))
    parts = own_shares(slices, layout.places, ranks)
    leader = ranks.hosts.index(ranks.hosts[ranks.rank])
    # Whoever starts a run has seen to it that the weights fit into its share of the memory.
    pool = SegmentPool(path.parent, max_bytes=sys.maxsize)
    with ExitStack() as held:
        segment = ranks.do(
            lambda: held.enter_context(_begin(pool, layout)) if leader == ranks.rank else None
        )
        unsealed = Path(ranks.gather_json(str(segment.path) if segment else "")[leader])
        memory = ranks.do(lambda: held.enter_context(_memory(segment, unsealed)))
        # Before the memory goes, its readers do.
        hashes = held.enter_context(TensorHashes())

        def written(name: str, wait: Wait) -> None:
            hashes.start(name, view(memory, layout.places[name]), wait)

        ranks.do(lambda: write_shares(memory, layout.places, slices, parts, ranks, written))
        digest = digest_together(memory, layout.places, parts, hashes, ranks)
        ranks.do(lambda: _seal(pool, segment, path, digest) if segment else None)
    return digest


def _begin(pool: SegmentPool, layout: FileLayout) -> Segment:
    pool.sweep_unsealed()
    segment = pool.acquire(layout.total_bytes, exact=True)
    segment.memory[: len(layout.prefix)] = layout.prefix
    return segment


@contextmanager
def _memory(segment: Segment | None, path: Path) -> Iterator[memoryview]:
    """The segment's memory, which the ranks that do not own it map by its path."""
    if segment is not None:
        segment.page_lock()
        yield segment.memory
        return
    mapping = writable_mappings.take(path, path.lstat())
    try:
        mapping.populate()
        mapping.page_lock.take()
        yield memoryview(mapping.memory)
    finally:
        writable_mappings.put_back(mapping)


def _seal(pool: SegmentPool, segment: Segment, path: Path, digest: str) -> None:
    mark_hashed(segment.path, digest)
    if not pool.release(path):
        path.unlink()  # a version that is published again; who reads the old one keeps it
    segment.seal(path.name)
