"""The model and the hardware that a layout is for: `ModelShape`, `DeviceFigures` and `Hardware`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import Field

from earl_core.deployment.layer_shapes import AdapterShape, LatentShape, Matrix, StateShape
from earl_core.deployment.shape_fields import shape_fields
from earl_core.system.settings import Settings
from earl_core.trajectory.routing import RoutingShape


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
    experts: int = Field(default=0, description="Of a layer with a router; above 1: a mixture.")
    experts_per_token: int = Field(default=0, description="That a router gives a token.")
    expert_size: int = Field(default=0, description="Width of one; 0: that of a dense layer.")
    shared_expert_size: int = Field(
        default=0, description="Width of the experts that all tokens meet, together."
    )
    shared_expert_gate: bool = False
    expert_biases: bool = Field(default=False, description="Experts and routers have biases.")
    float32_gates: bool = Field(
        default=False, description="Experts' outputs are weighted in float32."
    )
    dense_layers: int = Field(default=0, description="Layers of a mixture without a router.")
    gated_attention: bool = Field(
        default=False, description="Queries come with a gate of attention's output."
    )
    query_key_norms: bool = Field(
        default=False, description="Queries and keys are normalised; not said of plain models."
    )
    attention_extras: int = Field(
        default=0, description="Numbers beside the matrices of a layer's attention, if counted."
    )
    layer_input_size: int = Field(
        default=0, description="Width of what a second table has of a token for each layer."
    )
    states: StateShape | None = Field(
        default=None, description="Layers that have a state in place of attention."
    )
    other_layers: tuple[str, ...] = Field(
        default=(), description="Types of layers that nothing here computes."
    )
    lost_window: int = Field(
        default=0, description="Tokens of a sliding window that layers do not hand on; 0: none."
    )
    latent: LatentShape | None = Field(
        default=None, description="Queries, keys and values are made of latents."
    )
    of_values: bool = Field(default=False, description="A critic: its head has one output.")
    adapter: AdapterShape | None = Field(
        default=None, description="The pairs that are trained in place of the model."
    )

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ModelShape:
        """Make the shape of the mapping in a Hugging Face `config.json`. Raises `ValueError` when a
        number is missing or no model has it."""
        return cls(**shape_fields(raw))

    @cached_property
    def head_size(self) -> int:
        """Width of a query head, and of a key head."""
        if self.latent is not None:
            return self.latent.key_dim
        return self.head_dim or self.hidden_size // self.attention_heads

    @cached_property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.attention_heads * self.head_size

    @cached_property
    def output_size(self) -> int:
        """Width of attention's output, which the last of its matrices reads."""
        return self.attention_heads * (self.latent.value_dim if self.latent else self.head_size)

    @cached_property
    def key_value_size(self) -> int:
        """Width of all key heads together; the value heads are as wide, or it is the mean."""
        if self.latent is not None:
            return (self.query_size + self.output_size) // 2
        return self.key_value_heads * self.head_size

    @cached_property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - (self.states.layers if self.states else 0)

    @cached_property
    def attention_share(self) -> float:
        """Share of the layers that have attention."""
        return self.attention_layers / self.layers

    @cached_property
    def routed_layers(self) -> int:
        """Layers with a router."""
        return self.layers - self.dense_layers if self.experts > 1 else 0

    @cached_property
    def feed_forward(self) -> int:
        """Width of the feed-forward layer."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def routing(self) -> RoutingShape | None:
        """What may be recorded of a token; None for a model without routers."""
        if not self.routed_layers or not self.experts_per_token:
            return None
        return RoutingShape(self.routed_layers, self.experts_per_token, self.experts)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The widths that tensor ranks share in feed-forward parts of this model, by their name."""
        found = {}
        if self.routed_layers < self.layers:
            found["feed-forward"] = self.feed_forward
        if self.routed_layers:
            found["expert"] = self.expert_width
            if self.shared_expert_size:
                found["shared expert"] = self.shared_expert_size
        return found

    @cached_property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.expert_size or self.feed_forward

    @cached_property
    def routed_width(self) -> int:
        """Width of what a token meets in a routed layer, experts and shared ones together."""
        return self.experts_per_token * self.expert_width + self.shared_expert_size

    @cached_property
    def mean_width(self) -> float:
        """Width of what a token meets in the feed-forward part of a layer, the mean over layers."""
        dense = self.layers - self.routed_layers
        return (dense * self.feed_forward + self.routed_layers * self.routed_width) / self.layers

    @cached_property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.attention_heads)
        queries = (2 if self.gated_attention else 1) * self.query_size
        sizes = queries + 2 * self.key_value_size + self.output_size
        return self.hidden_size * sizes + self.attention_extras

    @cached_property
    def _state_parameters(self) -> int:
        return self.states.parameters(self.hidden_size) if self.states else 0

    @cached_property
    def _dense_parameters(self) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.feed_forward

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.expert_width + self.hidden_size if self.expert_biases else 0
        return 3 * self.hidden_size * self.expert_width + biases

    def _routed_parameters(self, experts: int) -> int:
        """Parameters of a layer's feed-forward part of which so many experts are counted."""
        hidden = self.hidden_size
        router = self.experts * (hidden + (1 if self.expert_biases else 0))
        shared = 3 * hidden * self.shared_expert_size + hidden * self.shared_expert_gate
        return experts * self.expert_parameters + router + shared

    def _in_layers(self, experts: int) -> int:
        """Parameters of all decoder layers, of whose experts so many are counted."""
        states = self.layers - self.attention_layers
        mixing = (
            self.attention_layers * self._attention_parameters + states * self._state_parameters
        )
        dense = (self.layers - self.routed_layers) * self._dense_parameters
        routed = self.routed_layers and self.routed_layers * self._routed_parameters(experts)
        return mixing + dense + routed + 2 * self.layers * self.hidden_size

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer that work for a token; the mean where layers differ."""
        return self._in_layers(self.experts_per_token) // self.layers

    @cached_property
    def all_experts(self) -> int:
        """Parameters of the experts of all layers, which ranks may divide among themselves."""
        return self.routed_layers * self.experts * self.expert_parameters

    def largest_layer(self, degree: int = 1) -> int:
        """Parameters of the largest decoder layer, with the experts of one of so many ranks."""
        states = self._state_parameters if self.states else 0
        mixing = max(states, self._attention_parameters if self.attention_layers else 0)
        dense = self._dense_parameters if self.routed_layers < self.layers else 0
        routed = self._routed_parameters(self.experts // degree) if self.routed_layers else 0
        return mixing + max(dense, routed) + 2 * self.hidden_size

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the table that turns tokens into vectors."""
        return self.vocabulary * self.hidden_size

    @property
    def outputs(self) -> int:
        """Numbers that the head says of a token."""
        return 1 if self.of_values else self.vocabulary

    @cached_property
    def parameters(self) -> int:
        """All parameters. Biases and the norms of queries and keys, under 0.1 %, are left out of
        plain models; mixtures and models with states are counted to the last one."""
        return self._with_tables(self._in_layers(self.experts))

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that work for one token: of a layer's experts those that it is given."""
        found = self._with_tables(self._in_layers(self.experts_per_token))
        # Only a head multiplies by a table.
        return found - self.embedding_parameters if self.of_values else found

    def _with_tables(self, layers: int) -> int:
        tables = self.embedding_parameters
        tables += 0 if self.tied_embeddings else self.outputs * self.hidden_size
        # Each layer has its columns of the table, a projection of the embeddings to as many, a gate
        # and a way back.
        tables += self.layers * self.layer_input_size * (self.vocabulary + 3 * self.hidden_size)
        return tables + layers + self.hidden_size

    def with_adapter(self, adapter: AdapterShape | None) -> ModelShape:
        """The same model, of which an adapter is trained alone, or with None all of it."""
        # A copy would keep what was worked out for another one.
        return ModelShape(**{**self.model_dump(), "adapter": adapter})

    @cached_property
    def as_critic(self) -> ModelShape:
        """The same model with a critic's head, which is tied to nothing."""
        return ModelShape(**{**self.model_dump(), "of_values": True, "tied_embeddings": False})

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
        """Keys and values of one token over all layers with attention and heads in bf16, bytes; of
        latent attention what vLLM's cache keeps in their place."""
        numbers = self.latent.cached if self.latent else 2 * self.key_value_size
        return 2 * self.attention_layers * numbers


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
