"""Variable-length attention: many samples in one flat sequence, no T x T mask.

transformers builds a dense T x T mask when `position_ids` restart inside a sequence (1.1 GB at
32K tokens). `earl_varlen` is registered with transformers' AttentionInterface instead: the model
forward gets the keyword `sample_boundaries`, every layer hands it to the attention function, and
attention runs causally inside each sample, as `boundaries` planned it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from earl_core.learner.attention import varlen_cuda, varlen_dense
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import attend_to_all_ranks
from earl_core.learner.shared_rows import deal
from earl_core.pretrained.huggingface import AttentionInterface
from earl_core.system.errors import ConfigError
from earl_core.tensors.plain_attention import ScoreChange

ATTENTION_NAME = "earl_varlen"

# What some models ask of their attention and is not supported here: its name there, and in words.
_REFUSED = {
    "position_bias": "a position bias in its attention",
    "indices": "attention to tokens that an indexer chooses",
    "block_indices": "attention to blocks of tokens that an indexer chooses",
}

# What models hand to every attention function, and what changes nothing here: positions are in the
# queries and keys already, the rest says what a forward pass returns. Anything else may ask for
# another attention.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def register_attention() -> str:
    """Make `earl_varlen` known to transformers; returns the name. Idempotent.

    No mask function is registered with it: transformers then passes no mask at all and also
    skips its search for packed sequences, which would synchronise with the device.
    """
    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
    return ATTENTION_NAME


@contextmanager
def windows_seen() -> Iterator[set[int | None]]:
    """The sliding windows that layers ask for inside the context; None: of those without one."""
    seen: set[int | None] = set()

    def noting(*given: Any, **options: Any) -> Any:
        seen.add(options.get("sliding_window"))
        return varlen_attention(*given, **options)

    AttentionInterface.register(ATTENTION_NAME, noting)
    try:
        yield seen
    finally:
        register_attention()


# How a pack is attended differs from pack to pack: a compiled layer calls it as it is.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample of a pack; transformers' attention signature.

    query [1, heads, T, dim]; key, value [1, kv_heads, T, dim]; returns ([1, T, heads, dim], None).
    Tokens after the pack's own (tensor ranks have equally many) attend to nothing and get zeros.
    softcap, s_aux: soft cap on the scores and the sinks [heads], which are computed in plain
    products. Dropout is never applied: log-probs must be those of the policy that played. Raises
    ConfigError when the boundaries are missing or it needs what is not supported here.
    """
    _check_supported(module, attention_mask, sample_boundaries, unsupported)
    assert sample_boundaries is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window >= sample_boundaries.longest:
        sliding_window = None
    # The gradient of an index would be a copy.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    more = max(0, len(q) - sample_boundaries.tokens)
    if more:
        q, k, v = (x[:-more] for x in (q, k, v))
    change = ScoreChange.of(softcap, s_aux)
    attend = partial(_attend, sample_boundaries, scale, sliding_window, change)
    if sample_boundaries.exchange is None:
        attended = attend(q, k, v)
    else:
        attended = attend_to_all_ranks(q, k, v, sample_boundaries.exchange, attend)
    if more:
        attended = F.pad(attended, (0, 0, 0, 0, 0, more))
    # Some models look at it as [T, heads * dim], which takes contiguous memory.
    return attended.contiguous()[None], None


def _attend(
    boundaries: SampleBoundaries,
    scale: float,
    window: int | None,
    change: ScoreChange | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """query [T, heads, dim]; key, value [keys, kv_heads, dim] -> [T, heads, dim]."""
    if change is None and varlen_cuda.usable(query, key, value):
        return varlen_cuda.attend(query, key, value, boundaries, scale, window)
    buckets = boundaries.buckets
    keys = [bucket.keys for bucket in buckets]
    dealt = deal(query, [bucket.queries for bucket in buckets]), deal(key, keys), deal(value, keys)
    outputs = []
    for bucket, *parts in zip(buckets, *dealt, strict=True):
        q, k, v = (varlen_dense.batched(part, bucket.count) for part in parts)
        attended = varlen_dense.attend_bucket(q, k, v, scale, window, change)
        outputs.append(attended.transpose(1, 2).reshape(-1, *attended.shape[1::2]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if boundaries.scatter is not None:
        packed = packed.index_select(0, boundaries.scatter)
    return packed


def _check_supported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    boundaries: SampleBoundaries | None,
    unsupported: dict[str, Any],
) -> None:
    if boundaries is None:
        raise ConfigError(
            f"{type(module).__name__} was called without `sample_boundaries`, because the layers "
            "around it do not hand keyword arguments on to their attention. Choose a model whose "
            "layers do."
        )
    if attention_mask is not None:
        raise ConfigError("Packed samples take no attention_mask: do not pass one to the model.")
    asked = sorted(k for k, v in unsupported.items() if v is not None and k not in _HARMLESS)
    if asked:
        what = _REFUSED.get(asked[0], "a setting of its attention that is not known here")
        raise ConfigError(
            f"{type(module).__name__} has {what} (`{asked[0]}`), which packed training does not "
            "compute. Choose a model without."
        )
    causal = unsupported.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ConfigError(f"{type(module).__name__} is not causal: choose a causal language model.")
