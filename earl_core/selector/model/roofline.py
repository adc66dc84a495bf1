"""Seconds of a stage if the devices reached their data sheets: the analytic roofline.

Peaks are never reached, so these seconds are guesses: right in their order more than in their
size. Nothing here was fitted to a measurement. Beside data sheets stand only the latencies of a
ring all-reduce, as NCCL's own cost model has them (`src/graph/tuning.cc`, protocol LL), and the
least time of a pass through a layer, because a GPU starts no kernel in no time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.memory_model import kv_bytes_per_token, sequence_bytes
from earl_core.selector.model.shares import shares, trained_shares
from earl_core.selector.model.sizes import positions_at_a_time

LAUNCH_SECONDS = 6.6e-6
"""Fixed cost of a ring all-reduce."""

LINK_SECONDS = 0.6e-6
"""Each hop of it over NVLink."""

NETWORK_SECONDS = 2.7e-6
"""Each hop of it between hosts."""


class Load(NamedTuple):
    """The load of an iteration on its stages.

    episodes: of the iteration; context: mean tokens of one; longest: of the longest; generated:
    mean tokens that the model writes in one; turns: mean answers; tool_wait: mean seconds that the
    environment takes for an answer. in_play: episodes that engines may have at a time, those of
    later iterations included; 0: those of the iteration.
    """

    episodes: int
    context: float
    longest: float
    generated: float
    turns: float = 1.0
    tool_wait: float = 0.0
    in_play: int = 0

    def offered(self, rollout: StageDeployment) -> float:
        """Sequences that one engine is given at once."""
        share = (self.in_play or self.episodes) / rollout.replicas
        return max(1.0, min(share, rollout.max_running_requests or share))


class Roofline:
    """Seconds of the stages for one model on one kind of hardware. value: bytes of a number that an
    engine computes with."""

    def __init__(
        self, shape: ModelShape, device: DeviceFigures, hardware: Hardware, value: int = 2
    ) -> None:
        self.shape, self._value = shape, value
        self.device, self.hardware = device, hardware
        # Those that work for a token compute.
        self._active = float(self.shape.active_parameters)
        self._per_host = hardware.devices_per_host
        self._network = hardware.network_bandwidth
        # Of the input table a step reads one row a sequence.
        read = shape.parameters - (0 if shape.tied_embeddings else shape.embedding_parameters)
        self._trained = float(shape.trained_parameters)
        self._pairs = 0.0 if shape.adapter is None else self._trained
        self._weight_bytes = float(value * read) + value * self._pairs
        self._expert_bytes = float(value * shape.routed_layers * shape.expert_parameters)

    def link(self, ranks: int) -> float:
        """bytes/s of one of so many neighbouring ranks of a host to the others, one way: over PCIe
        where NVLink does not join all of them."""
        joined = self.device.nvlink_gpus
        whole = not joined or ranks <= joined
        return self.device.link_bandwidth if whole else self.device.peer_bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of one ring all-reduce of `size` bytes; over hosts when one has too few."""
        if ranks <= 1:
            return 0.0
        inside = min(ranks, self._per_host)
        hosts = math.ceil(ranks / inside)
        seconds = 2 * (inside - 1) / inside * size / self.link(inside)
        seconds += 2 * (hosts - 1) / hosts * size / self._network
        if self.device.nccl:
            hops = 2 * (inside - 1) * LINK_SECONDS + 2 * (hosts - 1) * NETWORK_SECONDS
            seconds += LAUNCH_SECONDS + hops
        return seconds

    def group_bandwidth(self, ranks: int, stride: int = 0) -> float:
        """bytes/s of each of so many neighbouring ranks to the others: the host's links, or its
        share of the network. stride: of a ring that passes through every stride-th of the ranks;
        a host has as many rings, and each enters and leaves it once. 0: all ranks send."""
        link = self.link(min(ranks, self._per_host))
        if ranks <= self._per_host:
            return link
        return min(link, self._network / min(stride or self._per_host, self._per_host))

    def decode_step(self, tensor: int, threads: int, running: float, context: float) -> float:
        """Seconds of one step in which each of `running` sequences of `context` tokens gets one."""
        shape, device = self.shape, self.device
        flops = running * (2.0 * (self._active + self._pairs) + self._mixing(context, 1)) / tensor
        cached = running * context * kv_bytes_per_token(shape, tensor, self._value)
        # States are read and written.
        cached += 2 * running * sequence_bytes(shape, self._value) / tensor
        moved = self._read(running) / tensor + cached
        computing = flops / device.flops_of(self._value)
        bound = max(computing, moved / device.memory_bandwidth) / threads
        bound = max(bound, shape.layers * device.layer_seconds)
        size = float(self._value) * running * shape.hidden_size
        reduced = 2 * shape.layers * self.all_reduce(size, tensor)
        return bound + reduced

    def _mixing(self, context: float, share: float) -> float:
        """Floating-point operations of a token beside its products with weights: attention to the
        tokens before it, which are this share of `context`; in a layer with a state its rule, in
        which each number decays, is read for the key, changed, and read for the query."""
        shape = self.shape
        widths = shape.query_size + shape.output_size
        found = 2.0 * share * shape.attention_layers * widths * context
        if shape.states is not None:
            found += 8.0 * shape.states.layers * shape.states.numbers
        return found

    def _read(self, running: float) -> float:
        """Bytes of weights that a step for so many tokens reads: of each layer's experts no more
        than its tokens are given."""
        shape = self.shape
        used = min(float(shape.experts), running * shape.experts_per_token)
        idle = shape.experts - used if shape.routed_layers else 0.0
        return self._weight_bytes - idle * self._expert_bytes

    def decode_rate(
        self, tensor: int, threads: int, offered: float, context: float, capacity: float
    ) -> float:
        """Tokens/s of one engine given `offered` sequences of `context` tokens at once.

        capacity: tokens that its KV cache holds. Sequences that do not fit wait: the sequences run
        in as many equal waves as are needed. 0 when not even one fits.
        """
        fits = capacity / max(context, 1.0)
        if fits < 1 or offered <= 0:
            return 0.0
        together = offered / self.waves(offered, fits)
        return together / self.decode_step(tensor, threads, together, context)

    def waves(self, offered: float, fits: float) -> float:
        """Count the waves in which the sequences run where so many fit: between a stream, in which
        others always fill the gaps, and whole waves. Lengths differ, so that waves blur: half a
        wave is lost when there are many."""
        waves = max(1.0, offered / fits)
        return waves + 0.5 * (1 - 1 / waves)

    def prefill_seconds(self, tensor: int, threads: int, tokens: float, context: float) -> float:
        """Seconds in which one engine reads `tokens` prompt and tool tokens; a cache keeps those of
        earlier turns."""
        shape = self.shape
        flops = tokens * (2.0 * (self._active + self._pairs) + self._mixing(context, 0.5))
        moved = 2.0 * self._value * shape.layers * tokens * shape.hidden_size
        reduced = moved * (tensor - 1) / tensor / self.link(tensor)
        return flops / (tensor * threads * self.device.flops_of(self._value)) + reduced

    def rollout_seconds(self, candidate: StageDeployment, load: Load, rate: float) -> float:
        """Seconds of a whole rollout at a decode rate (tokens/s) of each engine."""
        if rate <= 0:
            return math.inf
        share = load.episodes / candidate.replicas
        rounds = max(1.0, share / (candidate.max_running_requests or share))
        prompt = share * max(0.0, load.context - load.generated)
        waiting = rounds * load.turns * load.tool_wait
        reading = self.prefill_seconds(
            candidate.tensor_parallel, candidate.threads, prompt, load.context
        )
        return share * load.generated / rate + reading + waiting

    def training_seconds(
        self,
        candidate: StageDeployment,
        load: Load,
        epochs: int,
        steps: int,
        forward_only: bool = False,
        value: int = 2,
    ) -> float:
        """Seconds of an update (or of scoring alone) over all samples. steps: optimizer steps.
        value: bytes of a number that computes."""
        shape, device = self.shape, self.device
        samples = math.ceil(load.episodes / candidate.data_parallel)
        tokens = samples * load.context
        passes = 1.0 if forward_only else 3.0 + (candidate.activation_checkpointing == "full")
        work = 2.0 * (self._active + self._pairs) + self._mixing(load.context, 0.5)
        flops = passes * tokens * work
        if self._pairs and not forward_only:
            # Of the backward pass's two products for a matrix one is the weight's gradient.
            flops -= tokens * 2.0 * self._active
        computing = flops / (
            candidate.tensor_parallel
            * candidate.context_parallel
            * candidate.threads
            * device.flops_of(value)
        )
        size = max(float(candidate.max_tokens_per_microbatch), load.context)
        microbatches = max(1, math.ceil(tokens / size))
        # A backward pass through a layer starts twice as many kernels as a forward one.
        computing = max(computing, microbatches * passes * shape.layers * device.layer_seconds)
        if candidate.activation_checkpointing == "selective" and not forward_only:
            computing += self._elementwise_seconds(candidate, tokens)
        if self._pairs and not forward_only:
            computing += passes * self._pairs_seconds(candidate, tokens, value)
        communicating = self._tensor_seconds(candidate, tokens, microbatches, passes)
        communicating += self._context_seconds(candidate, tokens, passes)
        communicating += self._exchange_seconds(
            candidate, tokens, microbatches, forward_only, value
        )
        gathering = self._gather_seconds(candidate, microbatches, forward_only, value)
        seconds = epochs * (max(computing, gathering) + communicating)
        if forward_only:
            return seconds
        seconds += epochs * self._adding_seconds(candidate, load, tokens, microbatches)
        return seconds + steps * self._optimizer_seconds(candidate)

    def _elementwise_seconds(self, candidate: StageDeployment, tokens: float) -> float:
        """Seconds in which selective checkpointing computes again in 16 bit, bound by memory: two
        norms, a residual sum, turned queries and keys, and the feed-forward layer's activation."""
        shape = self.shape
        # Read and written: sums 3, norms 2 each; turned 2; the gate and its product 3, or 2.
        split = 2.0 * (shape.query_size + shape.key_value_size)
        split += (3 if shape.gated_mlp else 2) * shape.mean_width
        moved = 2.0 * shape.layers * (7 * shape.hidden_size + split / candidate.tensor_parallel)
        bandwidth = self.device.memory_bandwidth * candidate.threads
        return tokens * moved / (candidate.context_parallel * bandwidth)

    def _pairs_seconds(self, candidate: StageDeployment, tokens: float, value: int) -> float:
        """Seconds of the pairs in one pass, bound by memory: the input of each matrix is read, and
        its output read and written; a backward pass is two such, for the input's gradient and for
        the pair's."""
        tensor = candidate.tensor_parallel
        moved = 0.0
        for matrix in self.shape.adapted.values():
            inputs = matrix.inputs / (tensor if matrix.cut == "inputs" else 1)
            outputs = matrix.outputs / (tensor if matrix.cut == "outputs" else 1)
            moved += value * (inputs + 2 * outputs)
        bandwidth = self.device.memory_bandwidth * candidate.threads
        return tokens * self.shape.layers * moved / (candidate.context_parallel * bandwidth)

    def _adding_seconds(
        self, candidate: StageDeployment, load: Load, tokens: float, microbatches: int
    ) -> float:
        """Seconds in which float32 gradients are added up: those of all that is trained once a
        microbatch, those of the head once for each chunk of logits."""
        shape = self.shape
        answered = min(1.0, load.generated / load.context) * tokens
        usual = positions_at_a_time(shape.outputs, gpu=self.hardware.gpus > 0)
        at_a_time = candidate.logits_chunk_tokens or usual
        chunks = max(0, math.ceil(answered / at_a_time) - microbatches)
        head = shape.outputs * shape.hidden_size / candidate.tensor_parallel
        if self._pairs:
            head = 0.0
        own = sum(share.own for share in trained_shares(self.shape, candidate))
        added = microbatches * own + chunks * head
        # New and old are read, the sum is written.
        return 12.0 * added / (self.device.memory_bandwidth * candidate.threads)

    def _tensor_seconds(
        self, candidate: StageDeployment, tokens: float, microbatches: int, passes: float
    ) -> float:
        if candidate.tensor_parallel == 1:
            return 0.0
        size = 2.0 * tokens / microbatches / candidate.context_parallel * self.shape.hidden_size
        count = 2 * self.shape.layers * microbatches * (passes - (passes >= 3))
        return count * self.all_reduce(size, candidate.tensor_parallel)

    def _context_seconds(self, candidate: StageDeployment, tokens: float, passes: float) -> float:
        if candidate.context_parallel == 1:
            return 0.0
        moved = (
            4.0
            * self.shape.attention_layers
            * self.shape.key_value_size
            * tokens
            / candidate.tensor_parallel
        )
        share = (candidate.context_parallel - 1) / candidate.context_parallel
        bandwidth = self.group_bandwidth(
            candidate.tensor_parallel * candidate.context_parallel, candidate.tensor_parallel
        )
        return passes * moved * share / bandwidth

    def _gather_seconds(
        self, candidate: StageDeployment, microbatches: int, forward_only: bool, value: int
    ) -> float:
        if candidate.parts == 1:
            return 0.0
        # Weights travel for the forward and for the backward pass, gradients in float32.
        weights = value if forward_only else 2.0 * value
        moved = [(weights, share) for share in shares(self.shape, candidate)]
        if self._pairs:
            moved += [(weights, share) for share in trained_shares(self.shape, candidate)]
        if not forward_only:
            moved += [(4.0, share) for share in trained_shares(self.shape, candidate)]
        return microbatches * sum(
            size * share.others / self.group_bandwidth(share.span, share.rings)
            for size, share in moved
        )

    def _exchange_seconds(
        self,
        candidate: StageDeployment,
        tokens: float,
        microbatches: int,
        forward_only: bool,
        value: int,
    ) -> float:
        """Seconds in which tokens go to the ranks of their experts and come back, a row of the
        hidden size for each expert of a token, as many to each rank: twice forward, twice backward,
        and twice where a layer is computed again. Before the first the ranks tell each other how
        many rows they send. Nothing computes meanwhile."""
        degree = candidate.expert_parallel
        if degree == 1:
            return 0.0
        again = candidate.activation_checkpointing == "full" and not forward_only
        forward, backward = 1 + again, 0 if forward_only else 1
        rows = tokens / candidate.context_parallel * self.shape.experts_per_token
        moved = float(value) * rows * self.shape.hidden_size * (degree - 1) / degree
        bandwidth = self.group_bandwidth(degree * candidate.context_parallel)
        seconds = 2 * (forward + backward) * moved / bandwidth
        if self.device.nccl:
            seconds += microbatches * (3 * forward + 2 * backward) * LAUNCH_SECONDS
        return self.shape.routed_layers * seconds

    def _optimizer_seconds(self, candidate: StageDeployment) -> float:
        trained = trained_shares(self.shape, candidate)
        own = sum(share.own for share in trained)
        # Gradient, weight and two moments are read, all but the gradient written, in float32.
        seconds = 28.0 * own / (self.device.memory_bandwidth * candidate.threads)
        if candidate.offload_optimizer:
            seconds += 16.0 * own / self.device.host_bandwidth
        for share in trained:
            moved = 8.0 * share.own * (share.copies - 1) / share.copies
            seconds += moved / self.group_bandwidth(share.span * share.copies, share.span)
        return seconds

    def republish_seconds(self, update: StageDeployment, rollout: StageDeployment) -> float:
        """Seconds to bring the trained weights from the update's stage deployment to the rollout's.

        Ranks that hold the slices which the engines want hand them over; otherwise each engine
        gathers a whole copy.
        """
        same = update.tensor_parallel == rollout.tensor_parallel and update.parts == 1
        if same and update.expert_parallel == 1:
            return 0.0
        moved = 2.0 * self._trained / rollout.tensor_parallel
        return moved / self.group_bandwidth(
            max(update.ranks // update.replicas, rollout.tensor_parallel)
        )
