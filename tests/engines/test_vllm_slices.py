"""Which bytes of a publication a worker of vLLM reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from earl_core.rollout.engines import vllm_environment
from earl_core.tensors import hashing
from earl_core.weights.load import open_weights
from earl_core.weights.publish import publish

pytest.importorskip("vllm")


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_tensor_parallel_rank_reads_its_slices_once_and_hashes_nothing(
    tmp_path: Path, ranks: int
) -> None:
    vllm_environment.load()
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from earl_core.rollout.engines import vllm_worker
    from tests.engines.vllm_slices import Layers, Reads, one_of, own_slices, whole_weights

    configuration = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, quantization=None),
        load_config=None,
        lora_config=None,
    )
    llama = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"))
    whole = whole_weights()
    blank = [(name, torch.zeros_like(tensor)) for name, tensor in whole.items()]
    manifest = publish(whole, tmp_path, 1, "float32")
    for rank in range(ranks):
        with one_of(ranks, rank):
            layers = Layers()
            record_metadata_for_reloading(layers)
            layers.load_weights(blank)
            layers.process()
            worker = vllm_worker.PolicyWeights()
            worker.model_runner = SimpleNamespace(
                get_model=lambda layers=layers: layers, kv_caches=[], model_config=llama
            )
            worker.reload_weights = lambda layers=layers, **given: reload_weights(
                configuration, layers, weights_path=None, **given
            )
            reads = Reads()

            def opening(*given: Any, reads: Reads = reads, **named: Any) -> Any:
                opened = open_weights(*given, **named)
                reads.watch(opened.values())
                return opened

            with (
                patch.object(vllm_worker, "open_weights", opening),
                patch.object(hashing, "tensor_hash", side_effect=AssertionError("hashed")),
                reads,
            ):
                report = worker.earl_load_weights(manifest.model_dump_json())
        expected = own_slices(whole, ranks, rank)
        assert reads.bytes == sum(tensor.nbytes for tensor in expected.values())
        assert report["digest"] == manifest.digest
        for name, found in layers.outputs().items():
            torch.testing.assert_close(found, layers.inputs[name] @ expected[name].T)
        assert torch.equal(layers.embed.weight, expected["embed.weight"])
        assert torch.equal(layers.norm.weight, expected["norm.weight"])
