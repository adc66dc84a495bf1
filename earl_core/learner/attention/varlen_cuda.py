"""Variable-length attention on a GPU, by kernels that the device and the installation choose once.

Packs go to torch's varlen kernel: flash attention 2, or 3 on Hopper where the package
`flash_attn_3` is installed. Without that, packs that are long samples of one length, and no more,
go to cuDNN on Hopper and Blackwell, which takes no packs of any other kind. (The flash kernel of
`scaled_dot_product_attention` is the varlen kernel's, so that it is no third choice.)
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from earl_core.learner.shared_rows import deal

if TYPE_CHECKING:
    from earl_core.learner.attention.attention_plan import KernelCall, SampleBoundaries

logger = logging.getLogger(__name__)

_FLASH_3 = "FA3"
"""Its name in torch, which replaces flash attention 2 by it in all of this process."""
_CUDNN = 91501
"""The first version whose results are right for all lengths, from which torch prefers it, too."""


@dataclass(frozen=True)
class Found:
    """The facts that the choice depends on.

    capability: of the device, (major, minor). cudnn: its version as one number, such as 91501; 0:
    none. flash_3: whether flash attention 3 is installed. varlen: whether torch has a varlen kernel
    that takes sliding windows.
    """

    capability: tuple[int, int]
    cudnn: int
    flash_3: bool
    varlen: bool


@dataclass(frozen=True)
class Kernels:
    """flash: version of the varlen kernel; None: there is none. cudnn: whether it takes the packs
    that it can take.
    """

    flash: Literal[2, 3] | None
    cudnn: bool = False

    def __str__(self) -> str:
        if self.flash is None:
            return "scaled_dot_product_attention, samples of similar length in one call"
        packs = f"flash attention {self.flash}"
        return f"cuDNN for long samples of one length, else {packs}" if self.cudnn else packs


def choose(found: Found, *, deterministic: bool) -> Kernels:
    """The fastest of those that there are; deterministic: of those that add up in a fixed order.
    cuDNN's backward pass does not. Flash attention 3 is not asked: not all builds do."""
    if not found.varlen or found.capability < (8, 0):
        return Kernels(None)
    if deterministic:
        return Kernels(2)
    if found.flash_3 and found.capability[0] == 9:
        return Kernels(3)
    return Kernels(2, cudnn=found.capability[0] in (9, 10) and found.cudnn >= _CUDNN)


def kernels_of(device: torch.device) -> Kernels:
    """The choice for this device, under the process's choice of deterministic algorithms."""
    if device.type != "cuda":
        return Kernels(None)
    return _kernels_of(device, deterministic=torch.are_deterministic_algorithms_enabled())


def _use_flash(kernels: Kernels) -> None:
    """Have torch's flash kernels be of the chosen version, in all of this process."""
    active = attention.current_flash_attention_impl() == _FLASH_3
    if kernels.flash == 3 and not active:
        attention.activate_flash_attention_impl(_FLASH_3)
    elif kernels.flash == 2 and active:
        attention.restore_flash_attention_impl()


@cache
def _varlen_options() -> frozenset[str]:
    """The parameters of torch's varlen kernel; none where torch has no such kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _kernels_of(device: torch.device, *, deterministic: bool) -> Kernels:
    found = Found(
        capability=torch.cuda.get_device_capability(device),
        cudnn=torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
        flash_3=find_spec("flash_attn_interface") is not None,
        varlen="window_size" in _varlen_options(),
    )
    chosen = choose(found, deterministic=deterministic)
    try:
        _use_flash(chosen)
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        # Such as one that was built for another torch.
        logger.warning("flash attention 3 is installed and cannot be used: %s", error)
        chosen = choose(replace(found, flash_3=False), deterministic=deterministic)
    logger.info("attention on %s: %s", torch.cuda.get_device_name(device), chosen)
    return chosen


# Tokens of a sample from which cuDNN's lead outweighs its planning.
_LONG = 4096
_CUDNN_HEAD_SIZE = 128
# torch itself falls back on the second where it finds that the first will not do.
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether a varlen kernel takes these tensors: CUDA, half precision, a head size up to 256
    that is a multiple of 8."""
    return (
        query.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and kernels_of(query.device).flash is not None
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: SampleBoundaries,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of [T, heads, dim] to [keys, kv_heads, dim] without a host synchronisation.

    A run that continues a shared prefix has more keys than queries; the kernel aligns the causal
    mask to the last ones (flash attention, since version 2.1).
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    kernels, alike = kernels_of(query.device), boundaries.alike
    if (
        kernels.cudnn
        and window is None
        and alike
        and boundaries.longest >= _LONG
        and query.shape[-1] <= _CUDNN_HEAD_SIZE
    ):
        return attend_alike(query, key, value, alike, scale)
    _use_flash(kernels)
    taken = [call.keys for call in boundaries.calls]
    queries = deal(query, [call.queries for call in boundaries.calls])
    keys, values = deal(key, taken), deal(value, taken)
    parts = [
        _call(*states, scale, window)
        for states in zip(boundaries.calls, queries, keys, values, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """Causal attention inside each of `count` samples of one length, [count * length, heads, dim].

    cuDNN plans each new shape, for about half a second each way: lengths are rounded up to eight
    between a power of two and the next, at most 41 up to 128 K tokens. The padding is on the
    right, where nothing that is kept attends to it.
    """
    length = query.shape[0] // count
    step = max(1, 2 ** (length.bit_length() - 4))
    more = -length % step

    def batched(states: torch.Tensor) -> torch.Tensor:
        """View the states as they lie, as cuDNN wants them: [count, heads, length, dim]."""
        batch = states.reshape(count, length, *states.shape[1:])
        return (F.pad(batch, (0, 0, 0, 0, 0, more)) if more else batch).transpose(1, 2)

    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        attended = F.scaled_dot_product_attention(
            batched(query),
            batched(key),
            batched(value),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return attended.transpose(1, 2)[:, :length].reshape(query.shape)


def _call(
    call: KernelCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if "enable_gqa" in _varlen_options():
        # Before torch 2.12 the kernel takes fewer key heads without being told.
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    attended = varlen_attn(
        query,
        key,
        value,
        call.cu_seqlens,
        call.cu_keys,
        call.longest,
        call.longest_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(attended, torch.Tensor)
    return attended
