"""Operators of a computation on fake tensors: how often, their FLOPs, and the bytes they move."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# They give a name or a place to memory, and touch none of it.
_FREE = {
    "alias", "detach", "detach_", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
    "new_empty_strided", "record_stream", "resize_", "set_", "view", "_reshape_alias",
    "_unsafe_view", "resize_storage_bytes_", "is_pinned", "wait_tensor", "_local_scalar_dense",
}  # fmt: skip
# They read of their first tensor as many numbers as they write.
_LOOKUPS = {"embedding", "gather", "index", "index_select"}
# They only write the tensor that they change.
_OVERWRITE = {"copy_", "_foreach_copy_", "fill_", "zero_", "split_with_sizes_copy", "chunk_cat"}
# Of samples of one length.
_ATTENTION = {
    "_varlen_attn", "_varlen_attn_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
}  # fmt: skip
# The forward pass has two products; the backward pass four, and computes the scores again.
_BACKWARD_OF_ATTENTION = 2.5
# The larger products run on tensor cores, in these dtypes.
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Work:
    """Work of an operator, or of all of one name; times are added up call by call."""

    calls: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(each * factor for each in astuple(self)))


Entries = dict[tuple[str, str], Work]
"""Work by part of the update and operator."""


@dataclass(frozen=True)
class Ceilings:
    """Upper limits of a GPU: FLOP/s of bf16 products, of float32 ones and of attention, bytes a
    second of its memory, and the FLOP/s of which utilisation is a share."""

    products: float = 780e12
    float32: float = 60e12
    attention_forward: float = 380e12
    attention_backward: float = 330e12
    bandwidth: float = 4.3e12
    datasheet: float = 989e12

    def seconds(self, flops: float, moved: float, rate: float) -> float:
        """The longer of computing and of moving."""
        return max(flops / rate, moved / self.bandwidth)


@dataclass
class Ledger:
    """Work by operator: (part of the update, name)."""

    ceilings: Ceilings = field(default_factory=Ceilings)
    part: str = ""
    entries: Entries = field(default_factory=dict)

    def add(self, name: str, flops: float, moved: float, rate: float | None = None) -> None:
        """One call. rate: FLOP/s; that of bf16 products if None."""
        seconds = self.ceilings.seconds(flops, moved, rate or self.ceilings.products)
        key = (self.part, name)
        self.entries[key] = self.entries.get(key, Work()) + Work(1, flops, moved, seconds)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Book what runs inside the context under this part of the update."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before


class Recorder(TorchDispatchMode):
    """Books every operator that runs inside the context; enter it inside a `FakeTensorMode`.
    number: the answer to whoever asks a fake tensor for its number, such as a gradient's norm."""

    def __init__(self, ledger: Ledger, number: float) -> None:
        super().__init__()
        self.ledger = ledger
        self._number = number
        self.quiet = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that torch.compile compiles inside the context all the same."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default:
            return self._number
        found = function(*args, **kwargs)
        if not self.quiet:
            self._book(function, args, kwargs, found)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Book nothing inside the context."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def _book(self, function: Any, args: Sequence[Any], kwargs: Any, found: Any) -> None:
        name = function._schema.name.split("::")[1]
        if name in _FREE or function.namespace in ("prim", "profiler", "c10d") or function.is_view:
            return
        if name in _ATTENTION:
            return self._attention(function, args, kwargs, found)
        moved = moved_bytes(function, args, kwargs, found)
        packet = getattr(function, "_overloadpacket", function)
        flops = 0.0
        rate = self.ledger.ceilings.products
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=found))
            factors = [each for each in args if isinstance(each, torch.Tensor)]
            if factors[-1].dtype not in _HALF:
                rate = self.ledger.ceilings.float32
            dtypes = "x".join(str(each.dtype).removeprefix("torch.") for each in factors[-1:])
            name = f"{name} {dtypes}"
        self.ledger.add(name, flops, moved, rate)

    def _attention(self, function: Any, args: Sequence[Any], kwargs: Any, found: Any) -> None:
        """Causal, in samples of the call's greatest length."""
        name = function._schema.name.split("::")[1]
        given = {
            argument.name: args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(function._schema.arguments)
        }
        query, length = given["query"], given.get("max_q")
        if length is None:
            # [count, heads, length, size]
            length, heads = query.shape[2], query.shape[1]
        else:
            # [tokens, heads, size]
            heads = query.shape[1]
        queries = query.numel() // (heads * query.shape[-1])
        flops = 4.0 * heads * query.shape[-1] * queries * (length + 1) / 2
        ceilings = self.ledger.ceilings
        rate = ceilings.attention_forward
        if "backward" in name:
            flops, rate = _BACKWARD_OF_ATTENTION * flops, ceilings.attention_backward
        self.ledger.add(name, flops, moved_bytes(function, args, kwargs, found), rate)


def moved_bytes(function: Any, args: Sequence[Any], kwargs: Any, found: Any) -> float:
    """Bytes that an operator reads of its inputs and writes of its outputs, each number once."""
    name = function._schema.name.split("::")[1]
    given = _by_argument(function, args, kwargs)
    inputs = [each for argument, each in given if not argument.is_out]
    changed = [each for argument, each in given if _is_written(argument)]
    made = [each for each in _tensors(found) if not any(each is other for other in changed)]
    written = float(sum(map(distinct_bytes, [*changed, *made])))
    if name in _LOOKUPS:
        return 2 * written + sum(map(distinct_bytes, inputs[1:]))
    if name in ("scatter_", "scatter_add_"):
        index, source = inputs[1:]
        added = name == "scatter_add_"
        return distinct_bytes(index) + (2.0 + added) * distinct_bytes(source)
    if name in _OVERWRITE:
        inputs = [each for each in inputs if not any(each is other for other in changed)]
    return written + sum(map(distinct_bytes, inputs))


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the numbers that a tensor shows; those that an expansion repeats count once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride or size == 0 else 1
    return numbers * tensor.element_size()


def _by_argument(
    function: Any, args: Sequence[Any], kwargs: Any
) -> list[tuple[torch._C.Argument, torch.Tensor]]:
    found = []
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [(argument, each) for each in _tensors(value)]
    return found


def _is_written(argument: torch._C.Argument) -> bool:
    # AdamW may scale the gradients, and is not told to.
    alias = argument.alias_info
    return alias is not None and alias.is_write and argument.name != "grads"


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (each for each in tree_iter(values) if isinstance(each, torch.Tensor))
