"""States of the rows of a slot cache, in layers that have a state in place of keys and values.

A gated delta rule (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next, Qwen3.5, OLMo hybrid) keeps one
matrix of every head, and its short convolution the inputs of a few tokens. Both know the whole
sequence and nothing of its parts: tokens are added, and none is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from earl_core.system.errors import ConfigError

STATE_LAYER = "linear_attention"
"""Of `layer_types`."""
_GATES = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj")
"""What the decay and the step are made from: Qwen3-Next has both in one, OLMo hybrid its own."""
_PARTS = ("conv1d", "A_log", "dt_bias", "layer_idx")


class LayerStates:
    """The states of all rows in one layer: what transformers' layer finds at its place in the
    cache. What it keeps grows with the rows and not with their tokens."""

    record_past = True
    """The layer's own convolution of one token would be given all rows, ended ones too."""

    def __init__(self) -> None:
        self._windows: torch.Tensor | None = None
        self._states: torch.Tensor | None = None
        self._capacity = 0
        self._rows = 0
        self._ends: torch.Tensor = torch.empty(0, dtype=torch.long)

    @property
    def conv_states(self) -> tuple[torch.Tensor | None]:
        """Windows [rows, channels, kernel size - 1] of the rows of the pass, likewise."""
        return (None if self._windows is None else self._windows[: self._rows],)

    @property
    def recurrent_states(self) -> tuple[torch.Tensor | None]:
        """States float32 [rows, heads, key size, value size] of the rows of the pass; None: nothing
        yet. The only one of the layer."""
        return (None if self._states is None else self._states[: self._rows],)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What there is, a row's part at its index."""
        return [each for each in (self._windows, self._states) if each is not None]

    def begin(self, fresh: Sequence[int], ends: torch.Tensor) -> None:
        """A pass begins. fresh: rows that begin with nothing. ends: int64 [rows], how many tokens
        each row gets."""
        self._rows, self._ends = len(ends), ends
        for tensor in self.tensors if fresh else ():
            tensor[list(fresh)] = 0

    def slide(self, inputs: torch.Tensor, kernel: int) -> torch.Tensor:
        """What the convolution of new inputs [rows, channels, width] sees, those before them first;
        keeps the last inputs of each row, of those that are not padding."""
        kept = kernel - 1
        if self._windows is None:
            self._windows = inputs.new_zeros(self._capacity, inputs.shape[1], kept)
        window = self._windows[: self._rows]
        seen = torch.cat((window, inputs), dim=-1)
        last = self._ends[:, None] + torch.arange(kept, device=inputs.device)
        window.copy_(seen.gather(2, last[:, None].expand(-1, inputs.shape[1], -1)))
        return seen

    def keep(self, states: torch.Tensor) -> None:
        """Keep the states after the pass, those of `recurrent_states`."""
        if self._states is None:
            self._states = states.new_zeros(self._capacity, *states.shape[1:])
        self._states[: self._rows].copy_(states)

    def grow(self, rows: int) -> None:
        """Make room for so many rows; those that were there keep their states."""
        old, self._capacity = min(rows, self._capacity), rows
        for name in ("_windows", "_states"):
            tensor = getattr(self, name)
            if tensor is not None:
                wider = tensor.new_zeros(rows, *tensor.shape[1:])
                wider[:old] = tensor[:old]
                setattr(self, name, wider)

    def clear(self) -> None:
        """Free the memory."""
        self._windows = self._states = None
        self._capacity = 0


class RowStates:
    """The states of all rows and layers of one model, in which padding leaves no trace.

    Raises `ConfigError` for a model whose layers of this type are others than the gated delta rule.
    """

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._layers: dict[int, LayerStates] = {}
        self._padding: torch.Tensor | None = None
        config: Any = None if model is None else model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        wanted = {index for index, kind in enumerate(kinds) if kind == STATE_LAYER}
        if model is None or not wanted:
            return
        for layer in model.modules():
            gates = [getattr(layer, name) for name in _GATES if hasattr(layer, name)]
            if gates and all(hasattr(layer, part) for part in _PARTS):
                self._layers[int(layer.layer_idx)] = LayerStates()
                for gate in gates:
                    gate.register_forward_hook(partial(_shut, self))
        if set(self._layers) != wanted:
            raise ConfigError(
                f"{config.model_type} models have layers of type {STATE_LAYER} with another state "
                "than that of a gated delta rule (Qwen3.5, Qwen3-Next, OLMo hybrid), which the "
                "torch engine does not compute: choose another model"
            )

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self._layers)

    def __getitem__(self, layer: int) -> LayerStates:
        return self._layers[layer]

    @property
    def places(self) -> list[LayerStates | None]:
        """Of each layer of the model up to the last that has states; None where there are none."""
        return [self._layers.get(index) for index in range(max(self._layers, default=-1) + 1)]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' states."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def padding(self) -> torch.Tensor | None:
        """Where the pass has padding, bool [rows, width]; None: nowhere."""
        return self._padding

    def begin(self, starts: np.ndarray, valid: np.ndarray, device: torch.device) -> None:
        """A pass begins. starts: int64 [rows], tokens that each row has. valid: bool [rows, width],
        where it gets one."""
        if not self._layers:
            return
        lengths = valid.sum(axis=1)
        fresh = np.flatnonzero((starts == 0) & (lengths > 0)).tolist()
        ends = torch.from_numpy(lengths).to(device)
        self._padding = None if valid.all() else torch.from_numpy(~valid).to(device)
        for layer in self._layers.values():
            layer.begin(fresh, ends)

    def swap(self, low: int, high: int) -> None:
        """Exchange two rows."""
        for tensor in self._tensors():
            tensor[[low, high]] = tensor[[high, low]]

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        for layer in self._layers.values():
            layer.grow(rows)

    def clear(self) -> None:
        """Free the memory."""
        for layer in self._layers.values():
            layer.clear()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self._layers.values() for tensor in layer.tensors]


def _shut(
    states: RowStates, gate: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """No decay (exp 0) and no step (sigmoid 0 of minus infinity) where there is padding: the state
    stays as it is, to the bit."""
    if states.padding is None:
        return output
    return output.masked_fill(states.padding[..., None], float("-inf"))
