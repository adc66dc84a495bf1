"""Decoder layers that are compiled, each by itself, around attention.

torch.compile makes one kernel of what goes over the same memory: norms, rotary embeddings, the
activation of a feed-forward layer. All layers of a kind share what it makes, and token counts are
symbols in it, so that packs of any length do.

The compiled part is a layer's `forward`: what wraps the layer (FSDP2's gathering, activation
checkpointing) stays outside of it, in any order. Between its own forward and backward pass a
compiled layer keeps little more than under selective checkpointing: what its parts, before and
after attention, hand to each other.

The exchanges of tensor ranks in a layer are compiled with it.
"""

from __future__ import annotations

import logging

import torch

from earl_core.config.update import UpdateConfig
from earl_core.learner.layer_probe import decoder_layers
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.system.errors import ConfigError
from earl_core.tensors.library_paths import plain_libraries

logger = logging.getLogger(__name__)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers in place, each when it first computes; those that are stay so."""
    for layer in decoder_layers(model):
        if not _is_compiled(layer):
            layer.forward = torch.compile(layer.forward, dynamic=True)


def layers_compiled(model: PreTrainedModel) -> bool:
    """Tell whether the layers are compiled."""
    return any(map(_is_compiled, decoder_layers(model)))


def _is_compiled(layer: torch.nn.Module) -> bool:
    # A module's own `forward` hides that of its class.
    return "_torchdynamo_orig_callable" in vars(vars(layer).get("forward", compile_layers))


def compiling(update: UpdateConfig, device: torch.device) -> bool:
    """Tell whether the compiler that `update` asks for works on the device: it compiles a trifle.

    Raises ConfigError where it does not and `update.compile` is true, and warns where that is None.
    """
    if not update.compiles(device.type != "cpu"):
        return False
    plain_libraries()
    try:
        torch.compile(_tried, dynamic=True)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if update.compile:
            raise ConfigError(
                f"update.compile is true, but torch.compile does not work here: {reason}",
                remedy="install a C++ compiler (g++), and for a GPU triton and the Python headers, "
                "or set update.compile=false",
            ) from error
        logger.warning("layers are not compiled, which costs time: %s", reason)
        return False
    return True


def _tried(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + 1
