"""Parts of a decoder layer that not all models have: states, latent attention, low-rank pairs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from earl_core.system.settings import Settings


class AdapterShape(Settings):
    """Low-rank pairs, [rank, in] and [out, rank], that are trained beside frozen matrices."""

    rank: int = Field(ge=1)
    targets: tuple[str, ...] = Field(
        default=(), description="Ends of the matrices' names; none: all of every decoder layer."
    )


class StateShape(Settings):
    """Layers that carry a state from token to token in place of attention: a gated delta rule
    (Yang et al. 2024, arXiv 2412.06464) behind a short convolution, as Qwen3-Next has them."""

    layers: int = Field(ge=1, description="Decoder layers with a state; the others have attention.")
    key_heads: int = Field(ge=1)
    value_heads: int = Field(ge=1)
    key_dim: int = Field(ge=1, description="Width of a key head, and of a query head.")
    value_dim: int = Field(ge=1)
    window: int = Field(ge=1, description="Tokens that the convolution sees.")

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Width of what the convolution mixes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    def matrices(self, hidden: int) -> int:
        """Parameters of the products with states of a hidden size: queries, keys, values and the
        output's gate, two numbers for each value head, and the output."""
        return hidden * (self.mixed_size + 2 * self.value_size + 2 * self.value_heads)

    def parameters(self, hidden: int) -> int:
        """Parameters in place of attention's: `matrices`, the convolution, a decay and a step for
        each value head, and the norm of a value head."""
        rest = self.mixed_size * self.window + 2 * self.value_heads + self.value_dim
        return self.matrices(hidden) + rest

    @property
    def numbers(self) -> int:
        """Numbers in the state of one layer, [value heads, key dim, value dim]."""
        return self.value_heads * self.key_dim * self.value_dim

    def sequence_bytes(self, value: int) -> int:
        """Bytes that a sequence of any length has in all these layers: states in float32, and the
        convolution's window of numbers of so many bytes."""
        return self.layers * (4 * self.numbers + value * self.mixed_size * self.window)


class LatentShape(Settings):
    """Attention whose queries, keys and values are made of narrow latents (MLA, DeepSeek-V2, arXiv
    2405.04434)."""

    query_rank: int = Field(ge=0, description="Width of the queries' latent; 0: there is none.")
    key_value_rank: int = Field(ge=1, description="Width of the latent of keys and values.")
    rope_dim: int = Field(ge=1, description="Width of a head's part that positions turn.")
    plain_dim: int = Field(ge=1, description="Width of a key head's other part.")
    value_dim: int = Field(ge=1, description="Width of a value head.")

    @property
    def key_dim(self) -> int:
        """Width of a query head and of a key head."""
        return self.rope_dim + self.plain_dim

    @property
    def cached(self) -> int:
        """Numbers of a token that vLLM's cache keeps in a layer: one latent for all heads, and the
        part of the keys that positions turn."""
        return self.key_value_rank + self.rope_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Parameters of a layer's attention, norms of the latents included."""
        queries = hidden * heads * self.key_dim
        if self.query_rank:
            queries = self.query_rank * (hidden + 1 + heads * self.key_dim)
        keys = hidden * self.cached + self.key_value_rank
        keys += self.key_value_rank * heads * (self.plain_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * hidden


class Matrix(NamedTuple):
    """A matrix [outputs, inputs] of a decoder layer. cut: the side that tensor ranks share."""

    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs"]

    def pair(self, rank: int, tensor: int = 1) -> float:
        """Numbers in a pair of this rank beside one tensor rank's part of the matrix: the side that
        is not cut is whole on each."""
        inputs = self.inputs / (tensor if self.cut == "inputs" else 1)
        outputs = self.outputs / (tensor if self.cut == "outputs" else 1)
        return rank * (inputs + outputs)
