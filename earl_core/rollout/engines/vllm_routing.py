"""The experts that vLLM gave each token of a mixture, recorded by vLLM's own connector.

vLLM 0.32 hands it what its second model runner computes (`enable_return_routed_experts`). That
runner wants Triton, which a CPU has not: there `RoutedSteps` hands it what the first one does, and
`vllm_scheduler` asks for it. Cached prefixes have rows, too: those of the pass that computed their
keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from earl_core.rollout.engines.engine import Completion
from earl_core.system.errors import ConfigError
from earl_core.trajectory.routing import RoutingShape


def routing_arguments(drafts: bool) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` with which answers say what experts their tokens were given.
    Raises `ConfigError` for drafts on a GPU, which want the first model runner."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"scheduler_cls": "earl_core.rollout.engines.vllm_scheduler.RecordingScheduler"}
    if drafts:
        raise ConfigError(
            "vLLM on a GPU cannot draft from past answers and record a mixture's experts: set "
            "rollout.drafts to null, or rollout.record_routing to off"
        )
    return {"enable_return_routed_experts": True}


@dataclass(frozen=True)
class RecordedLayers:
    """The rows of vLLM's answers, of which each has all layers of the model. layers: the numbers of
    the routed ones."""

    layers: tuple[int, ...]
    shape: RoutingShape

    @classmethod
    def of(cls, report: dict[str, Any]) -> RecordedLayers:
        """As a worker reports them (`bind`)."""
        layers = tuple(report["layers"])
        return cls(layers, RoutingShape(len(layers), report["chosen"], report["experts"]))

    def noted(self, completion: Completion, output: Any, engine: Any, request: str) -> Completion:
        """The completion with its experts. output: vLLM's, which has rows [tokens, all layers,
        chosen] when it has ended. request: by which vLLM knows an answer that it still works on."""
        rows = output.outputs[0].routed_experts
        if rows is None:
            state = engine.output_processor.request_states.get(request)
            if state is None or not state.routed_experts_chunks:
                return completion
            rows = np.concatenate(state.routed_experts_chunks)
        routed = rows[:, self.layers].reshape(len(rows), self.shape.width)
        return replace(completion, routing=routed.astype(self.shape.dtype))


def bind(runner: Any) -> dict[str, Any]:
    """Have a worker's model runner record; its routed layers, the experts that a token is given,
    and those that there are. Before its first step."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    if getattr(runner, "aux_output_connector", None) is None:
        RoutedSteps(runner)
    routed = [each for each in runner.get_model().modules() if isinstance(each, MoERunner)]
    return {
        "layers": sorted(each.layer_id for each in routed),
        "chosen": routed[0].router.top_k,
        "experts": routed[0].router.global_num_experts,
    }


class RoutedSteps:
    """Stands before the two calls of a step of vLLM's first model runner."""

    def __init__(self, runner: Any) -> None:
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        self._connector = get_aux_output_connector(
            runner.get_model(), runner.vllm_config, runner.kv_cache_config
        )
        self._batch = runner.input_batch
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        self._scheduled: Any = None
        self._pending: Any = None

    def execute_model(self, scheduled: Any, *rest: Any) -> Any:
        """Compute the scheduled tokens, and keep the experts that they were given."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        result = self._execute(scheduled, *rest)
        if scheduled.total_num_scheduled_tokens:
            names = list(self._batch.req_ids)
            counts = [scheduled.num_scheduled_tokens[name] for name in names]
            computed = SimpleNamespace(
                req_ids=names,
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=self._batch.num_computed_tokens_cpu[: len(names)].copy(),
            )
            self._scheduled, self._pending = scheduled, self._connector.prepare_output(computed)
        return result

    def sample_tokens(self, grammar: Any) -> Any:
        """Sample, and give vLLM the experts of all tokens but of refused drafts."""
        output = self._sample(grammar)
        pending, self._pending = self._pending, None
        # Of tensor-parallel ranks the first one gives them.
        if pending is not None:
            places = [output.req_id_to_index[name] for name in pending.request_ids]
            sampled = np.array([len(output.sampled_token_ids[place]) for place in places])
            drafts = self._scheduled.scheduled_spec_decode_tokens
            drafted = np.array([len(drafts.get(name, ())) for name in pending.request_ids])
            refused = np.where(drafted > 0, drafted + 1 - sampled, 0)
            pending.enqueue_cpu_copy(sampled, refused)
            output.aux_output_connector_output = pending.process_output()
        return output
