"""Choice of the kernels that attend on a GPU, made once by the device and the installation.

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
from typing import Literal

import torch
from torch.nn import attention

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

    cuDNN's backward pass does not. Flash attention 3 is not asked for it, because not all of its
    builds do.
    """
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


def use_flash(kernels: Kernels) -> None:
    """Have torch's flash kernels be of the chosen version, in all of this process."""
    active = attention.current_flash_attention_impl() == _FLASH_3
    if kernels.flash == 3 and not active:
        attention.activate_flash_attention_impl(_FLASH_3)
    elif kernels.flash == 2 and active:
        attention.restore_flash_attention_impl()


@cache
def varlen_options() -> frozenset[str]:
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
        varlen="window_size" in varlen_options(),
    )
    chosen = choose(found, deterministic=deterministic)
    try:
        use_flash(chosen)
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        # Such as one that was built for another torch.
        logger.warning("flash attention 3 is installed and cannot be used: %s", error)
        chosen = choose(replace(found, flash_3=False), deterministic=deterministic)
    logger.info("attention on %s: %s", torch.cuda.get_device_name(device), chosen)
    return chosen
