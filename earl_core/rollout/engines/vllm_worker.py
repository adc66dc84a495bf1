"""Extension of vLLM's worker processes that replaces the weights of a live engine.

vLLM mixes `PolicyWeights` into its worker (`worker_extension_cls`). Four things that
`reload_weights` of vLLM 0.32 leaves open are closed here: it only logs parameters that did not
arrive; on CPU a tied output layer keeps multiplying with a packed copy of the old embeddings, and
experts are not packed again; and nothing compares what is used with what was sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from earl_core.rollout.engines.vllm_experts import names_of_vllm, renew_experts, untrained
from earl_core.rollout.engines.vllm_pairs import PolicyPairs, install_cpu_products
from earl_core.rollout.engines.vllm_routing import bind
from earl_core.system.memory import give_back_free_memory, give_back_pages
from earl_core.tensors.library_paths import plain_libraries
from earl_core.weights.load import names_problem, open_weights
from earl_core.weights.manifest import WeightsManifest

# Largest error of the output layer, relative to its largest output. Rounding alone gives about
# 0.004 in bfloat16; a layer that still holds other weights gives about 1.
_HEAD_TOLERANCE = 0.02


_SPIN_SECONDS = 0.02
"""A worker that waits for its next step takes a core for this long, vLLM's own for a second."""


def _spin_briefly() -> None:
    """Let a worker on a CPU that has nothing to do sleep soon.

    Otherwise it takes a core from the first second of the update, whose threads wait for each
    other: 12 % of the core-seconds of an update of four seconds on two cores. Not before the first
    message was read, because an earlier notification may be lost while the worker subscribes.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic()
        self.busy_loop_s = _SPIN_SECONDS

    SpinCondition.record_read = record_read


_spin_briefly()
install_cpu_products()
plain_libraries()


class PolicyWeights(PolicyPairs):
    """Methods for vLLM's worker; `self` is the worker, so names must not clash with its own."""

    reload_weights: Any
    rank: int
    _earl_untrained: dict[str, torch.Tensor] | None = None

    def earl_load_weights(self, manifest_json: str) -> dict[str, Any]:
        """Load the manifest's tensors; any exception leaves the engine's weights undefined.

        vLLM's loaders cut a tensor before they copy it, so a rank reads its own slices; on a GPU
        they lie in page-locked memory. The bytes are hashed only where their publisher has not.
        """
        from vllm.platforms import current_platform

        manifest = WeightsManifest.model_validate_json(manifest_json)
        weights = open_weights(manifest, verify_digest=True)
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        # Tied names stay out, as in files of save_pretrained: loaders would read them twice.
        kind = self.model_runner.model_config.hf_config.model_type
        given = names_of_vllm({name: weights[name] for name in manifest.tensors}, kind)
        if self._earl_untrained is None:
            # Before the first sleep, which throws them away.
            self._earl_untrained = untrained(model)
        loaded = self._earl_reload(model, {**self._earl_untrained, **given})
        problem = names_problem(loaded & expected, expected)
        if problem is not None:
            raise RuntimeError(f"the engine's model did not take all weights: {problem}")
        error = max((_repair_head(layer) for layer in _heads(model)), default=0.0)
        if error > _HEAD_TOLERANCE:
            raise RuntimeError(
                f"after the update the output layer still computes with other weights (relative "
                f"error {error:.3f})"
            )
        renew_experts(model, given)
        if current_platform.is_cpu():
            # The cache holds keys and values of the old weights, at first a GiB of zeros.
            _give_back(self.model_runner.kv_caches)
        return {"digest": manifest.digest, "parameters": len(loaded), "head_error": error}

    def earl_draft(self, memory: int) -> None:
        """Draft from past answers of so many bytes, in the worker whose answers vLLM reads."""
        runner = self.model_runner
        runner.drafter.bind(runner, None if self.rank else memory)

    def earl_record_routing(self) -> dict[str, Any]:
        """Record the experts of each token; what `vllm_routing.bind` says of them."""
        return bind(self.model_runner)

    def earl_give_back(self, weights: bool) -> None:
        """Give the pages of the KV cache back on a CPU, and those of the weights if
        `earl_load_weights` follows; no request may run."""
        given: list[torch.Tensor] = [*self.model_runner.kv_caches]
        if weights:
            model = self.model_runner.get_model()
            for layer in model.modules():
                if hasattr(layer, "cpu_linear"):
                    # It holds the packed copy; loading makes another.
                    layer.cpu_linear = _given_back
            given.extend(model.parameters())
        _give_back(given)

    def _earl_reload(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> set[str]:
        """Reload and report which parameters the model's own loader says it filled."""
        loaded: set[str] = set()
        load: Any = model.load_weights

        def recording(items: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            names = load(items)
            loaded.update(names)
            return loaded

        # reload_weights calls it and drops the answer.
        model.load_weights = recording  # type: ignore[assignment]
        try:
            # The worker's, not its model runner's: what layers do after loading on a GPU asks for
            # vLLM's configuration, which the worker's sets.
            self.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        finally:
            del model.load_weights
        return loaded


def _given_back(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("the engine's weights were given back: load weights first")


def _give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Give the host their pages, which read zeros until they are written again, and what the
    allocator holds free, such as weights that were packed since."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    for start, size in {(storage.data_ptr(), storage.nbytes()) for storage in storages}:
        give_back_pages(start, size)
    give_back_free_memory()


def _heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that multiply with a packed copy of a weight that others read directly."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return [
        layer
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear")
    ]


def _repair_head(layer: torch.nn.Module) -> float:
    """Pack the layer's weight again; the largest relative error of the result on a test input."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    weight: Any = layer.weight
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, weight.shape[1], generator=generator).to(weight.dtype)
    cpu_linear: Any = layer.cpu_linear
    found = cpu_linear(states, weight, None).float()
    expected = states.float() @ weight.float().T
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
