"""Keys and values, or states, of many sequences of different lengths, kept across turns.

Each sequence has a row in one tensor per layer, and its token i stands in column i: there are no
holes and no left padding, so continuing a sequence needs no copy. The rows of a batch are
neighbours, so that a batch is a view. A layer with a state has one state in each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from earl_core.pretrained.routers import Routers
from earl_core.rollout.engines.row_states import RowStates
from earl_core.tensors.plain_attention import ScoreChange, attend_plainly

ATTENTION = "earl_slot_cache"
_GROWTH_COLUMNS = 64
# cuDNN, which torch prefers on Hopper, plans anew for each length, and each token is a new one.
_WITHOUT_PLANS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# Numbers (64 MiB in float32) of the scores that exist at a time where plain products make them.
_SCORES_HELD = 2**24


@dataclass
class Row:
    """A cached sequence: the tokens whose keys and values are computed, all of them under one
    version, here its number and digest."""

    sequence_id: int
    tokens: list[int] = field(default_factory=list)
    version: tuple[int, str] | None = None
    _routing: np.ndarray | None = None
    _told: int = 0

    def keep(self, count: int) -> None:
        """Forget the tokens after the first `count`."""
        del self.tokens[count:]
        if count < self._told and self._routing is not None:
            # What was told of them is not written again.
            self._routing, self._told = self._routing[:count].copy(), count

    def note(self, routing: np.ndarray) -> None:
        """Note the experts of the last tokens, [those, width]."""
        stop = len(self.tokens)
        if self._routing is None or stop > len(self._routing):
            room = np.empty(
                (max(_GROWTH_COLUMNS, stop + stop // 2), routing.shape[1]), routing.dtype
            )
            if self._routing is not None:
                room[: len(self._routing)] = self._routing
            self._routing = room
        self._routing[stop - len(routing) : stop] = routing

    @property
    def routing(self) -> np.ndarray | None:
        """The experts of each token, a view [tokens, width]; None: nobody notes them."""
        if self._routing is None:
            return None
        self._told = len(self.tokens)
        return self._routing[: self._told]


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A transformers cache whose batch is the first `n` rows.

    Before a forward pass call `arrange` and `window`; the pass then writes its keys and values at
    each row's own columns and attends over the columns so far.
    """

    def __init__(self, states: RowStates | None = None) -> None:
        self.states = RowStates() if states is None else states
        super().__init__(layers=self.states.places)
        self.rows: list[Row] = []
        self._slot: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._capacity = (0, 0)
        self._columns: torch.Tensor = torch.empty(0, 0, dtype=torch.long)
        self._row_index: torch.Tensor = torch.empty(0, 1, dtype=torch.long)
        self._visible = 0

    def row(self, sequence_id: int) -> Row:
        """The row of a sequence; an empty one is added when there is none."""
        slot = self._slot.get(sequence_id)
        if slot is None:
            self._slot[sequence_id] = slot = len(self.rows)
            self.rows.append(Row(sequence_id))
        return self.rows[slot]

    @torch.inference_mode()
    def arrange(self, sequence_ids: Sequence[int]) -> list[Row]:
        """Bring these sequences into the first rows; returns the rows in their new order."""
        count = len(sequence_ids)
        wanted = set(sequence_ids)
        for sequence_id in sequence_ids:
            self.row(sequence_id)
        if len(self.rows) > self._capacity[0]:
            self._grow(len(self.rows), self._capacity[1])  # before a row moves to a new slot
        outside = [
            slot for slot in range(count, len(self.rows)) if self.rows[slot].sequence_id in wanted
        ]
        inside = (slot for slot in range(count) if self.rows[slot].sequence_id not in wanted)
        for high, low in zip(outside, inside, strict=True):
            self._swap(low, high)
        return self.rows[:count]

    @staticmethod
    def record(rows: Sequence[Row], pieces: Sequence[Sequence[int]], routers: Routers) -> None:
        """Note for the tokens of a pass, which are appended, what the routers chose."""
        shape = routers.shape
        # One copy from the device for all layers and rows.
        chosen = routers.live().flatten(1).to(getattr(torch, shape.dtype)).cpu().numpy()
        every = chosen.reshape(len(rows), -1, shape.width)
        for row, piece, noted in zip(rows, pieces, every, strict=True):
            if piece:
                row.note(noted[: len(piece)])

    def keep(self, row: Row, count: int) -> int:
        """Forget a row's tokens after the first `count`; how many are left. A state goes with all
        of its tokens or with none."""
        if self.states and count < len(row.tokens):
            count = 0
        row.keep(count)
        return count

    def drop(self, sequence_ids: Sequence[int]) -> None:
        """Forget sequences; the memory goes when none is left."""
        gone = {sequence_id for sequence_id in sequence_ids if sequence_id in self._slot}
        if len(gone) == len(self.rows):
            self.clear()
        elif gone:
            self.arrange([row.sequence_id for row in self.rows if row.sequence_id not in gone])
            del self.rows[len(self.rows) - len(gone) :]
            self._slot = {row.sequence_id: slot for slot, row in enumerate(self.rows)}

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self.rows.clear()
        self._slot.clear()
        self._keys.clear()
        self._values.clear()
        self.states.clear()
        self._capacity = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states."""
        return sum(tensor.nbytes for tensor in self._tensors()) + self.states.nbytes

    def window(self, columns: torch.Tensor, valid: torch.Tensor, visible: int) -> None:
        """Say where the next pass writes: `columns` int64 [rows, width] on the model's device.

        Where `valid` is false the token is padding: it goes to a scratch column that nobody sees.
        `visible` is the number of columns that the pass attends over.
        """
        if visible > self._capacity[1]:
            self._grow(len(self.rows), visible)
        scratch = self._capacity[1]
        self._columns = torch.where(valid, columns, torch.full_like(columns, scratch))
        self._row_index = torch.arange(columns.shape[0], device=columns.device)[:, None]
        self._visible = visible

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, heads, width, size] states; views [rows, heads, visible, size] come back."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._row_index, :, self._columns] = key_states.transpose(1, 2)
        values[self._row_index, :, self._columns] = value_states.transpose(1, 2)
        rows = key_states.shape[0]
        return keys[:rows, :, : self._visible], values[:rows, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns visible to the current pass; positions are given by the caller."""
        return self._visible

    def has_previous_state(self, *args: object, **kwargs: object) -> bool:
        """Always: a sequence that begins has a state of zeros."""
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: object, conv_kernel_size: int
    ) -> torch.Tensor:
        """Inputs [rows, channels, width] of a layer's convolution; with those before them, as it
        sees them, they come back."""
        return self.states[layer_idx].slide(conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int) -> None:
        """Keep a layer's states [rows, heads, key size, value size] after the pass."""
        self.states[layer_idx].keep(recurrent_states)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        rows, columns = self._capacity
        # Zeros, not empty: a masked column still takes part as 0 * value, and 0 * NaN is NaN.
        return states.new_zeros(rows, states.shape[1], columns + 1, states.shape[3])

    def _grow(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self._capacity
        if columns > old_columns:
            wide = max(columns, old_columns + old_columns // 4)
            columns = math.ceil(wide / _GROWTH_COLUMNS) * _GROWTH_COLUMNS
        self._capacity = (rows, columns)
        if rows != old_rows:
            self.states.grow(rows)
        for tensors in (self._keys, self._values):
            for layer, old in tensors.items():
                # One layer at a time, so that growing never holds two whole caches.
                tensors[layer] = self._allocate(old)
                kept = min(rows, old_rows)
                tensors[layer][:kept, :, :old_columns] = old[:kept, :, :old_columns]

    def _swap(self, low: int, high: int) -> None:
        length = max(len(self.rows[low].tokens), len(self.rows[high].tokens))
        self.states.swap(low, high)
        for tensor in self._tensors():
            kept = tensor[low, :, :length].clone()
            tensor[low, :, :length] = tensor[high, :, :length]
            tensor[high, :, :length] = kept
        self.rows[low], self.rows[high] = self.rows[high], self.rows[low]
        self._slot[self.rows[low].sequence_id] = low
        self._slot[self.rows[high].sequence_id] = high


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """sdpa that never repeats the cached heads: the stock one copies the whole cache for GQA. With
    a soft cap on the scores or sinks (`s_aux`) plain products."""
    if attention_mask is not None and sliding_window and sliding_window < key.shape[2]:
        attention_mask = _windowed(attention_mask, sliding_window)
    if change := ScoreChange.of(softcap, s_aux):
        output = _attend_changed(query, key, value, attention_mask, scaling, change)
    else:
        attend = attend_on_cpu if query.device.type == "cpu" else attend_on_gpu
        output = attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def _windowed(mask: torch.Tensor, window: int) -> torch.Tensor:
    """A causal mask [rows, 1, width, visible] that also hides all but the last `window` columns of
    what each token sees, its own among them."""
    seen = (mask == 0).sum(-1, keepdim=True)
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return mask.masked_fill(columns < seen - window, float("-inf"))


@contextmanager
def windows_seen() -> Iterator[set[int | None]]:
    """The sliding windows that layers ask for inside the context; None: of those without one."""
    seen: set[int | None] = set()

    def noting(*given: Any, **options: Any) -> Any:
        seen.add(options.get("sliding_window"))
        return _attention(*given, **options)

    AttentionInterface.register(ATTENTION, noting)
    try:
        yield seen
    finally:
        AttentionInterface.register(ATTENTION, _attention)


def _attend_changed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    change: ScoreChange,
) -> torch.Tensor:
    """As `attend_on_cpu`, some columns of the query at a time."""
    rows, heads, _, size = query.shape
    if mask is None:
        raise ValueError("the slot cache attends under a mask")
    step = max(1, _SCORES_HELD // (rows * heads * key.shape[2]))
    outputs = [
        attend_plainly(q, key, value, seen[:, :, None], scale or size**-0.5, change)
        for q, seen in zip(torch.split(query, step, 2), torch.split(mask, step, 2), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """query [rows, heads, width, size]; key, value [rows, kv_heads, visible, size]; mask [rows, 1,
    width, visible]. Like the query."""
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=gqa)


def attend_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """The same. torch's kernel that takes a mask and holds no scores takes as many key heads as
    query heads: those that share one are stacked along the width."""
    sharing = query.shape[1] // key.shape[1]
    stacked = query.reshape(*key.shape[:2], sharing * query.shape[2], query.shape[3])
    if mask is not None:
        mask = mask.repeat(1, 1, sharing, 1)
    with sdpa_kernel(_WITHOUT_PLANS):
        output = F.scaled_dot_product_attention(stacked, key, value, mask, scale=scale)
    return output.reshape(query.shape)


AttentionInterface.register(ATTENTION, _attention)


def common_prefix(cached: list[int], prompt: list[int]) -> int:
    """Count the tokens that both begin with."""
    if cached == prompt[: len(cached)]:
        return len(cached)
    pairs = zip(cached, prompt, strict=False)
    differing = (index for index, (old, new) in enumerate(pairs) if old != new)
    return next(differing, min(len(cached), len(prompt)))
