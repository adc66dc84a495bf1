"""Variable-length attention: many samples in one flat sequence, no T x T mask.

transformers builds a dense T x T mask when `position_ids` restart inside a sequence (1.1 GB at
32K tokens). `earl_varlen` is registered with transformers' AttentionInterface instead: the model
forward gets the keyword `sample_boundaries`, every layer hands it to the attention function, and
attention runs causally inside each sample. Samples of similar length share one batched call;
right padding needs no mask there, because causal attention never looks to the right. Tokens that
several samples begin with lie in the pack once (`prefix_tree`): the runs that continue them attend
to them and to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from earl_core.learner import attention_cuda
from earl_core.learner.prefix_tree import PrefixTree, TokenRun

ATTENTION_NAME = "earl_varlen"

# Up to this padded length, scores as plain matrix products in float32 beat torch's fused CPU
# kernel by 1.2 (fp32) to 4 times (bf16); they hold T * heads * 128 numbers, linear in T.
_SHORT = 128
# Longer samples amortise a call of their own, so padding them together only costs.
_NO_PADDING_FROM = 512
# The same for runs that continue a shared prefix, by the number of keys.
_SHORT_AFTER_PREFIX = 256
# Query rows of one call when a sliding window or a shared prefix needs a mask.
_QUERY_BLOCK = 512


@dataclass(frozen=True)
class Bucket:
    """Runs attended in one batched call: each sees the same number of tokens before it.

    count, length: the call's batch size and padded length. prefix: tokens before each run that it
    attends to. start: first token of the bucket in the pack. gather: int64 [count * length], the
    pack position of each padded position, or None when the bucket's tokens lie in the pack in
    order and without padding. keys: int64 [count * (prefix + length)], the pack position of each
    key, or None when the keys are the queries' own positions (prefix 0).
    """

    count: int
    length: int
    prefix: int
    start: int
    gather: torch.Tensor | None
    keys: torch.Tensor | None


@dataclass(frozen=True)
class SampleBoundaries:
    """Which tokens of a pack see which, made once per pack on the host.

    cu_seqlens: int32 [runs + 1], on the device; without shared prefixes a run is a sample.
    cu_keys: int32 [runs + 1], keys: int64 [cu_keys[-1]], the pack positions that each run attends
    to; both None without shared prefixes. longest: tokens of the longest sample; longest_run: of
    the longest run. scatter: int64 [T], the position of each pack token among the buckets'
    concatenated padded positions, or None for the identity. padded_tokens: positions that
    attention computes.
    """

    cu_seqlens: torch.Tensor
    cu_keys: torch.Tensor | None
    keys: torch.Tensor | None
    longest: int
    longest_run: int
    buckets: tuple[Bucket, ...]
    scatter: torch.Tensor | None
    padded_tokens: int

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> SampleBoundaries:
        """Samples of these lengths (all positive) that share nothing, end to end."""
        if len(lengths) == 0 or min(lengths) < 1:
            raise ValueError(f"A pack needs at least one sample of at least one token: {lengths}.")
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        runs = tuple(
            TokenRun(start, int(length), 0, -1)
            for start, length in zip(starts, lengths, strict=False)
        )
        return cls.from_tree(PrefixTree(runs, tuple(range(len(runs)))), device)

    @classmethod
    def from_tree(cls, tree: PrefixTree, device: torch.device | str = "cpu") -> SampleBoundaries:
        """Plan the buckets for the runs of a pack."""
        runs = tree.runs
        starts = np.array([run.start for run in runs], dtype=np.int64)
        sizes = np.array([run.length for run in runs], dtype=np.int64)
        scatter = np.empty(int(sizes.sum()), dtype=np.int64)
        buckets: list[Bucket] = []
        offset = 0
        for parent, members in _alike(runs, sizes):
            length = int(sizes[members[0]])
            positions = starts[members][:, None] + np.arange(length)
            real = np.arange(length) < sizes[members][:, None]
            padded = offset + np.arange(members.size * length).reshape(positions.shape)
            scatter[positions[real]] = padded[real]
            # A padding position repeats its run's first token: any valid index will do, since
            # nothing real attends to it and its own output is dropped.
            gather = np.where(real, positions, starts[members][:, None])
            start = int(gather[0, 0])
            flat = gather.reshape(-1)
            in_order = np.array_equal(flat, np.arange(start, start + flat.size))
            before = tree.path(parent) if parent >= 0 else np.empty(0, dtype=np.int64)
            seen = np.concatenate([np.tile(before, (members.size, 1)), gather], axis=1)
            buckets.append(
                Bucket(
                    count=int(members.size),
                    length=length,
                    prefix=before.size,
                    start=start,
                    gather=None if in_order else torch.from_numpy(flat).to(device),
                    keys=torch.from_numpy(seen.reshape(-1)).to(device) if before.size else None,
                )
            )
            offset += flat.size
        identity = np.array_equal(scatter, np.arange(offset))
        cu_keys, keys = _all_keys(tree, device)
        return cls(
            cu_seqlens=_cumulative(sizes).to(device),
            cu_keys=cu_keys,
            keys=keys,
            longest=max(run.depth + run.length for run in runs),
            longest_run=int(sizes.max()),
            buckets=tuple(buckets),
            scatter=None if identity else torch.from_numpy(scatter).to(device),
            padded_tokens=offset,
        )


def _cumulative(sizes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _all_keys(
    tree: PrefixTree, device: torch.device | str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Keys of all runs in pack order, for kernels that take them in one list; CUDA only."""
    if torch.device(device).type == "cpu" or all(run.parent < 0 for run in tree.runs):
        return None, None
    paths = [tree.path(index) for index in range(len(tree.runs))]
    cumulative = _cumulative(np.array([path.size for path in paths]))
    return cumulative.to(device), torch.from_numpy(np.concatenate(paths)).to(device)


def _alike(runs: Sequence[TokenRun], sizes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Runs that one call may attend together: same parent, similar length; longest first."""
    parents = np.array([run.parent for run in runs], dtype=np.int64)
    for parent in np.unique(parents):
        members = np.flatnonzero(parents == parent)
        order = members[np.argsort(-sizes[members], kind="stable")]
        for group in _group_similar(sizes, order):
            yield int(parent), group


def _group_similar(sizes: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """Cut samples, longest first, into groups that waste at most a quarter on padding."""
    groups: list[np.ndarray] = []
    first = 0
    for index in range(1, order.size + 1):
        longest = int(sizes[order[first]])
        if index < order.size:
            size = int(sizes[order[index]])
            similar = 4 * size >= 3 * longest and longest < _NO_PADDING_FROM
            if size == longest or similar:
                continue
        groups.append(order[first:index])
        first = index
    return groups


def register_attention() -> str:
    """Make `earl_varlen` known to transformers; returns the name. Idempotent.

    No mask function is registered with it: transformers then passes no mask at all and also
    skips its search for packed sequences, which would synchronise with the device.
    """
    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
    return ATTENTION_NAME


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sample_boundaries: SampleBoundaries | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample of a pack; transformers' attention signature.

    query [1, heads, T, dim]; key, value [1, kv_heads, T, dim]; returns ([1, T, heads, dim], None).
    Dropout is never applied: log-probs must be those of the policy that played. Raises ValueError
    when the boundaries are missing or the model's attention needs what is not supported here.
    """
    _check_supported(module, attention_mask, sample_boundaries, unsupported)
    assert sample_boundaries is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window >= sample_boundaries.longest:
        sliding_window = None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if attention_cuda.usable(q, k, v):
        return attention_cuda.attend(q, k, v, sample_boundaries, scale, sliding_window)[None], None
    outputs = []
    for bucket in sample_boundaries.buckets:
        attended = _attend_bucket(
            _queries(q, bucket), _keys(k, bucket), _keys(v, bucket), scale, sliding_window
        )
        outputs.append(attended.transpose(1, 2).reshape(-1, *attended.shape[1::2]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if sample_boundaries.scatter is not None:
        packed = packed.index_select(0, sample_boundaries.scatter)
    return packed[None], None


def _check_supported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    boundaries: SampleBoundaries | None,
    unsupported: dict[str, Any],
) -> None:
    if boundaries is None:
        raise ValueError(
            f"{type(module).__name__} was called without `sample_boundaries`: either the model's "
            "forward does not pass keyword arguments on to its attention, or it was called "
            "directly; call it through earl_core.learner.model."
        )
    if attention_mask is not None:
        raise ValueError("Packed samples take no attention_mask: do not pass one to the model.")
    for name in ("softcap", "s_aux", "position_bias"):
        if unsupported.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses `{name}` in its attention, which packed training "
                "does not support: choose a model without it."
            )
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal: choose a causal language model.")


def _queries(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, heads, dim] -> the bucket's [count, heads, length, dim]."""
    if bucket.gather is None:
        chosen = states.narrow(0, bucket.start, bucket.count * bucket.length)
    else:
        chosen = states.index_select(0, bucket.gather)
    return chosen.reshape(bucket.count, bucket.length, *states.shape[1:]).transpose(1, 2)


def _keys(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, kv_heads, dim] -> the bucket's [count, kv_heads, prefix + length, dim]."""
    if bucket.keys is None:
        return _queries(states, bucket)
    chosen = states.index_select(0, bucket.keys)
    return chosen.reshape(bucket.count, -1, *states.shape[1:]).transpose(1, 2)


def _attend_bucket(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of [count, heads, length, dim] to keys and values [count, kv_heads, keys,
    dim], whose last `length` belong to the queries and whose others all come before them.
    """
    rows, columns = query.shape[2], key.shape[2]
    short = _SHORT if rows == columns else _SHORT_AFTER_PREFIX
    if query.device.type == "cpu" and columns <= short:
        return _short_attention(query, key, value, scale, window)
    # Rotary embeddings leave query and key in float32 under autocast; the fused kernels want one
    # dtype, and the value's is the one that autocast chose.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if rows != columns or (window is not None and window < rows):
        return _blocked_attention(query, key, value, scale, window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    count, heads, rows, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    # The query heads that share a key head are stacked along the rows, so keys are not repeated.
    with torch.autocast(query.device.type, enabled=False):
        q = query.float().reshape(count * kv_heads, heads // kv_heads * rows, dim)
        k = key.float().reshape(count * kv_heads, columns, dim)
        v = value.float().reshape(count * kv_heads, columns, dim)
        mask = _causal_mask(rows, columns, columns - rows, window, q.device)
        mask = mask.repeat(heads // kv_heads, 1)
        scores = torch.baddbmm(mask[None], q, k.transpose(1, 2), alpha=scale)
        attended = torch.bmm(torch.softmax(scores, dim=-1), v)
    return attended.view(count, heads, rows, dim).to(value.dtype)


def _blocked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Blocks of queries, each with only the keys it can see, so that masks stay small."""
    blocks = []
    grouped = query.shape[1] != key.shape[1]
    prefix = key.shape[2] - query.shape[2]
    for start in range(0, query.shape[2], _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, query.shape[2])
        first = 0 if window is None else max(0, prefix + start - window + 1)
        last = prefix + stop
        mask = _causal_mask(
            stop - start, last - first, prefix + start - first, window, query.device
        )
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first:last],
                value[:, :, first:last],
                attn_mask=mask.to(query.dtype),
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(blocks, dim=2)


def _causal_mask(
    rows: int, columns: int, offset: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Additive float32 [rows, columns]; row r stands at column r + offset."""
    distance = (
        torch.arange(rows, device=device)[:, None]
        + offset
        - torch.arange(columns, device=device)[None, :]
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(rows, columns, device=device).masked_fill_(hidden, float("-inf"))
