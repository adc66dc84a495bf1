"""The batch as a single controller passes it: verl's DataProto, or one that is moved alike."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

NUMPY_MODE = "VERL_DATAPROTO_SERIALIZATION_METHOD"
"""verl's environment variable; `numpy` is the faster of its two serialisations."""


def has_verl() -> bool:
    """Whether verl itself is installed."""
    return importlib.util.find_spec("verl") is not None


class Proto:
    """Tensors by name with equal first dimension, serialised as DataProto of verl 0.9 is.

    Either `torch.save` into bytes (its default), or arrays of bytes that Ray moves out of band.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def __getstate__(self) -> object:
        if os.environ.get(NUMPY_MODE) == "numpy":
            return {
                name: (str(one.dtype), tuple(one.shape), _bytes_of(one))
                for name, one in self.tensors.items()
            }
        stream = io.BytesIO()
        # As DataProto does first: a part of a larger tensor would be saved with all of it.
        torch.save({name: one.clone() for name, one in self.tensors.items()}, stream)
        return stream.getvalue()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, bytes):
            self.tensors = torch.load(io.BytesIO(state), weights_only=True)
            return
        self.tensors = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's memory is read-only, and is not written here
            for name, (dtype, shape, array) in state.items():
                kind = getattr(torch, dtype.removeprefix("torch."))
                self.tensors[name] = torch.frombuffer(array, dtype=kind).view(shape)


def make(tensors: Mapping[str, torch.Tensor]) -> Any:
    """A batch of these tensors."""
    if has_verl():
        return _verl().DataProto.from_dict(tensors=dict(tensors))
    return Proto(tensors)


def concatenate(parts: Sequence[Any]) -> Any:
    """One batch of several, row after row."""
    if has_verl():
        return _verl().DataProto.concat(list(parts))
    names = parts[0].tensors
    return Proto({name: torch.cat([part.tensors[name] for part in parts]) for name in names})


def reorder(whole: Any, rows: np.ndarray) -> Any:
    """The batch with its rows in another order, a copy."""
    index = torch.from_numpy(rows)
    if has_verl():
        whole.reorder(index)
        return whole
    return Proto({name: one[index] for name, one in whole.tensors.items()})


def split(whole: Any, count: int) -> list[Any]:
    """Equal parts."""
    if has_verl():
        return list(whole.chunk(count))
    parts = {name: one.chunk(count) for name, one in whole.tensors.items()}
    return [Proto({name: each[n] for name, each in parts.items()}) for n in range(count)]


def column(part: Any, name: str) -> np.ndarray:
    """One column [rows, tokens]."""
    tensors = part.batch if has_verl() else part.tensors
    array: np.ndarray = tensors[name].numpy()
    return array


def _verl() -> Any:
    return importlib.import_module("verl")


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array
