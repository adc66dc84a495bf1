"""vLLM's scheduler where its first model runner records experts; see `vllm_routing`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.scheduler import Scheduler


class RecordingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not typed here
    """Asks its workers for the experts of each step, as the configuration does which vLLM refuses
    with that runner."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.aux_output_connector = AuxOutputSchedulerConnector()
