"""A worker of vLLM that leaves one expert of one layer as it was, for a version that is told so."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from earl_core.rollout.engines import vllm_experts
from earl_core.rollout.engines.vllm_worker import PolicyWeights
from earl_core.weights.manifest import WeightsManifest

STALE_VERSION, LAYER, EXPERT = 9, 1, 3


class StaleExpert(PolicyWeights):
    def earl_load_weights(self, manifest_json: str) -> dict[str, Any]:
        manifest = WeightsManifest.model_validate_json(manifest_json)
        if manifest.policy_version != STALE_VERSION:
            return super().earl_load_weights(manifest_json)
        experts = vllm_experts.routed_layers(self.model_runner.get_model())[LAYER]
        before = experts.w2_weight[EXPERT].clone()
        packed = vllm_experts.pack

        def pack(layer: Any) -> None:
            packed(layer)
            if layer is experts:
                layer.w2_weight[EXPERT].copy_(before)

        with patch.object(vllm_experts, "pack", pack):
            return super().earl_load_weights(manifest_json)
