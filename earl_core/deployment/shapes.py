"""The model and the hardware that a layout is for: `ModelShape`, `DeviceFigures` and `Hardware`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import Field

from earl_core.system.settings import Settings


class AdapterShape(Settings):
    """Low-rank pairs, [rank, in] and [out, rank], that are trained beside frozen matrices."""

    rank: int = Field(ge=1)
    targets: tuple[str, ...] = Field(
        default=(), description="Ends of the matrices' names; none: all of every decoder layer."
    )


class StateShape(Settings):
    """Layers that carry a state from token to token in place of attention."""

    layers: int = Field(ge=1, description="Decoder layers with a state; the others have attention.")


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


class ModelShape(Settings):
    """The numbers of a model's configuration that decide memory, work and legal degrees. Numbers
    derived from them are worked out once, because many candidates need it."""

    model_type: str
    hidden_size: int
    layers: int
    attention_heads: int
    key_value_heads: int
    vocabulary: int
    max_positions: int
    intermediate_size: int = Field(default=0, description="0: four times the hidden size.")
    head_dim: int = Field(default=0, description="0: hidden size over attention heads.")
    tied_embeddings: bool = False
    gated_mlp: bool = True
    experts: int = Field(default=0, description="Above 1: a mixture, which no formula here knows.")
    states: StateShape | None = Field(
        default=None, description="Layers that have a state in place of attention."
    )
    adapter: AdapterShape | None = Field(
        default=None, description="The pairs that are trained in place of the model."
    )

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ModelShape:
        """Make the shape of the mapping in a Hugging Face `config.json`. Raises `ValueError` when a
        number is missing or no model has it."""
        if not isinstance(raw, Mapping):
            raise ValueError("the model's config.json has no keys")
        nested = raw.get("text_config")
        text: Mapping[str, Any] = nested if isinstance(nested, dict) else raw

        def number(*names: str, default: int | None = None, least: int = 1) -> int:
            for name in names:
                value = text.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    if value < least:
                        raise ValueError(f"{name} is {value}, and must be at least {least}")
                    return value
            if default is None:
                raise ValueError(f"the model's config.json has none of {', '.join(names)}")
            return default

        heads, hidden = number("num_attention_heads", "n_head"), number("hidden_size", "n_embd")
        if hidden < heads:
            raise ValueError(f"{heads} attention heads share a hidden size of only {hidden}")
        layers = number("num_hidden_layers", "n_layer")
        kinds, every = (
            text.get("layer_types"),
            number("full_attention_interval", default=0, least=0),
        )
        if isinstance(kinds, list):
            with_state = kinds.count("linear_attention")
        else:
            # Released files of Qwen3-Next say it by the distance of layers with attention.
            with_state = layers - layers // every if every else 0
        gated = "intermediate_size" in text and raw.get("model_type") not in ("gpt_neox", "opt")
        return cls(
            model_type=str(raw.get("model_type", "unknown")),
            hidden_size=hidden,
            layers=layers,
            states=StateShape(layers=with_state) if with_state else None,
            attention_heads=heads,
            key_value_heads=number("num_key_value_heads", default=heads),
            vocabulary=number("vocab_size"),
            max_positions=number("max_position_embeddings", "n_positions", default=2**20),
            intermediate_size=number("intermediate_size", "n_inner", default=4 * hidden, least=0),
            head_dim=number("head_dim", default=hidden // heads, least=0),
            tied_embeddings=bool(text.get("tie_word_embeddings", raw.get("model_type") == "gpt2")),
            gated_mlp=gated,
            experts=number(
                "num_local_experts", "num_experts", "n_routed_experts", default=0, least=0
            ),
        )

    @cached_property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.attention_heads * (self.head_dim or self.hidden_size // self.attention_heads)

    @cached_property
    def key_value_size(self) -> int:
        """Width of all key heads together; the value heads are as wide."""
        return self.key_value_heads * (self.head_dim or self.hidden_size // self.attention_heads)

    @cached_property
    def feed_forward(self) -> int:
        """Width of the feed-forward layer."""
        return self.intermediate_size or 4 * self.hidden_size

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, feed-forward, two norms; no biases."""
        attention = self.hidden_size * 2 * (self.query_size + self.key_value_size)
        matrices = 3 if self.gated_mlp else 2
        return attention + matrices * self.hidden_size * self.feed_forward + 2 * self.hidden_size

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the table that turns tokens into vectors."""
        return self.vocabulary * self.hidden_size

    @cached_property
    def parameters(self) -> int:
        """All parameters; biases, under 0.1 % in these models, are left out."""
        tables = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return tables + self.layers * self.layer_parameters + self.hidden_size

    def with_adapter(self, adapter: AdapterShape | None) -> ModelShape:
        """The same model, of which an adapter is trained alone, or with None all of it."""
        # A copy would keep what was worked out for another one.
        return ModelShape(**{**self.model_dump(), "adapter": adapter})

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of one decoder layer, under the names that most models use."""
        hidden, wide = self.hidden_size, self.feed_forward
        found = {
            "q_proj": Matrix(hidden, self.query_size, "outputs"),
            "k_proj": Matrix(hidden, self.key_value_size, "outputs"),
            "v_proj": Matrix(hidden, self.key_value_size, "outputs"),
            "o_proj": Matrix(self.query_size, hidden, "inputs"),
            "gate_proj": Matrix(hidden, wide, "outputs"),
            "up_proj": Matrix(hidden, wide, "outputs"),
            "down_proj": Matrix(wide, hidden, "inputs"),
        }
        return found if self.gated_mlp else {n: m for n, m in found.items() if n != "gate_proj"}

    @cached_property
    def adapted(self) -> dict[str, Matrix]:
        """Those of `matrices` that have a pair: all of them where a target has a name of its own,
        such as that of a matrix which is several of these."""
        if self.adapter is None:
            return {}
        wanted = {target.rpartition(".")[2] for target in self.adapter.targets}
        if not wanted <= set(self.matrices):
            wanted = set()
        return {name: m for name, m in self.matrices.items() if not wanted or name in wanted}

    def pair_parameters(self, tensor: int = 1) -> float:
        """Numbers in the pairs of one decoder layer, on one of so many tensor ranks; 0 without an
        adapter."""
        rank = self.adapter.rank if self.adapter else 0
        return sum(matrix.pair(rank, tensor) for matrix in self.adapted.values())

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that the update moves and publishes: the pairs, or all of them."""
        if self.adapter is None:
            return self.parameters
        return round(self.layers * self.pair_parameters())

    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers and heads in bf16, bytes."""
        return 4 * self.layers * self.key_value_size

    def require_dense(self) -> None:
        """Raise `ValueError` for a mixture of experts, whose memory no formula knows."""
        if self.experts > 1:
            raise ValueError(
                f"this {self.model_type} model is a mixture of {self.experts} experts, whose "
                "memory and speed the selector cannot predict: use selector.policy `fixed`"
            )


class DeviceFigures(Settings):
    """Figures of one device, from a data sheet or a measurement. Rates are peaks, per second."""

    name: str
    nccl: bool = Field(default=True, description="Collectives are NCCL's, with its latencies.")
    memory_bytes: int = Field(ge=1)
    flops: float = Field(gt=0, description="Floating-point operations a second, bf16, dense.")
    float32_flops: float = Field(
        default=0.0, ge=0, description="The same in float32, as measured; 0: as in bf16."
    )
    memory_bandwidth: float = Field(gt=0, description="bytes/s")
    link_bandwidth: float = Field(gt=0, description="bytes/s to the devices joined to it, one way")
    host_bandwidth: float = Field(gt=0, description="bytes/s to the host's memory, one way")
    peer_bandwidth: float = Field(
        default=0.0, ge=0, description="bytes/s to the host's other devices, one way; 0: none."
    )
    nvlink_gpus: int = Field(
        default=0, ge=0, description="Neighbours that the link joins; 0: all of a host, 1: none."
    )
    layer_seconds: float = Field(
        default=0.0, ge=0, description="Least seconds of any pass through one decoder layer."
    )
    source: str = ""

    @property
    def bf16_factor(self) -> float:
        """Time that bf16 takes as a multiple of the time of float32."""
        return (self.float32_flops or self.flops) / self.flops

    def flops_of(self, value: int) -> float:
        """Operations a second on numbers of so many bytes."""
        return (value == 4 and self.float32_flops) or self.flops


class Hardware(Settings):
    """The devices that the stages may use. `gpus` counts those of all hosts together. For what the
    driver did not say of them, 0, stands what the data sheet says."""

    cpu_cores: int = Field(ge=1, description="Cores of one host.")
    memory_bytes: int = Field(ge=1, description="Memory of one host.")
    gpus: int = Field(default=0, ge=0)
    gpu_memory_bytes: int = Field(default=0, ge=0)
    gpu_name: str = ""
    nvlink_gpus: int = Field(
        default=0, ge=0, description="Neighbours that NVLink joins; 1: none; 0: not read."
    )
    nvlink_bandwidth: float = Field(default=0.0, ge=0, description="bytes/s over NVLink, one way")
    pcie_bandwidth: float = Field(default=0.0, ge=0, description="bytes/s over PCIe, one way")
    pcie_peers: bool = Field(
        default=True, description="GPUs reach each other over PCIe, past the host's memory."
    )
    figures: DeviceFigures | None = Field(
        default=None,
        description="Measured figures: of a GPU that no data sheet is known of, or of all cores.",
    )
    hosts: int = Field(default=1, ge=1)
    fewest_hosts: int | None = Field(
        default=None, ge=1, description="Hosts for which `stages` says the replicas; None: these."
    )
    network_bandwidth: float = Field(
        default=25e9, gt=0, description="bytes/s of one host to the others, in collectives, one way"
    )
    fetch_bandwidth: float = Field(
        default=0.0, ge=0, description="bytes/s of shards from another host; 0: not measured."
    )

    @property
    def devices(self) -> int:
        """Units that ranks are counted in: GPUs, or without them cores."""
        return self.gpus or self.cpu_cores * self.hosts

    @property
    def devices_per_host(self) -> int:
        """Units that share one host's fast links."""
        return max(1, self.devices // self.hosts)
