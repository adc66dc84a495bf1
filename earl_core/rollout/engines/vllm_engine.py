"""vLLM as a rollout engine: continuous batching in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from earl_core.config.engine_models import check_on_vllm
from earl_core.config.rollout import VllmConfig
from earl_core.pretrained.architecture import context_length, model_config, shape_of
from earl_core.rollout.engines import vllm_environment
from earl_core.rollout.engines.admission import Admission
from earl_core.rollout.engines.base_engine import BaseEngine, EngineSettings
from earl_core.rollout.engines.engine import Completion, GenerationRequest, answer_budget
from earl_core.rollout.engines.held_versions import HeldVersion
from earl_core.rollout.engines.processes import LeftoverProcesses, MemoryWatch
from earl_core.rollout.engines.quiet import Quiet
from earl_core.rollout.engines.vllm_adapters import AdapterFolders, adapter_arguments
from earl_core.rollout.engines.vllm_answers import completion, sampling_parameters
from earl_core.rollout.engines.vllm_drafts import extra_arguments
from earl_core.rollout.engines.vllm_experts import experts_of
from earl_core.rollout.engines.vllm_routing import RecordedLayers, routing_arguments
from earl_core.rollout.errors import EngineError, EngineLost, WeightSyncError
from earl_core.system.memory import resident_peak_bytes
from earl_core.weights.adapter_pairs import layer_matrices
from earl_core.weights.load import parameters_of
from earl_core.weights.manifest import WeightsManifest, config_digest

logger = logging.getLogger(__name__)

# vLLM's processes give each other 5 and 4 s to end before they use force.
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 20.0

_ENDED_BY_SIGNAL = re.compile(r"proc\(s\): \{[^}]*: -\d")


class VllmEngine(BaseEngine[Any]):
    """An `Engine` on vLLM's `AsyncLLM`.

    Prompts that extend earlier ones hit vLLM's prefix cache, whole blocks at a time. Cached and
    uncached prefixes differ in rounding, so in bfloat16 a repeated rollout need not be equal.
    Loading whole weights waits for running answers and holds back new ones meanwhile.
    """

    lockstep = False

    def __init__(
        self,
        model_directory: Path,
        *,
        tensor_parallel: int = 1,
        settings: VllmConfig | None = None,
        scratch: Path | None = None,
        **options: Any,
    ) -> None:
        """options: fields of `EngineSettings`. Socket files go to a new directory in `scratch`,
        which `stop` removes."""
        super().__init__(model_directory, EngineSettings(**options))
        self._ranks = tensor_parallel
        self._vllm = settings or VllmConfig()
        self._scratch = scratch
        self._sockets: Path | None = None
        self._folders: AdapterFolders | None = None
        self._engine: Any = None
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._remains = LeftoverProcesses()
        self._memory: MemoryWatch | None = None
        self._cancelled: set[str] = set()
        self._admission = Admission()
        self._quiet = Quiet()
        self._drafted: set[int] = set()
        self._finished: set[int] = set()
        self._recorded: RecordedLayers | None = None

    async def start(self) -> None:
        """Start vLLM's processes, which takes about 20 s, and load the model.

        Raises `OutOfMemory` when weights or the cache of one sequence do not fit.
        """
        trusted = self._settings.trust_remote_code
        self._parameters = parameters_of(self._directory, trusted)
        self._config_digest = config_digest(self._directory, trusted)
        self._sockets = vllm_environment.socket_directory(self._scratch)
        self._folders = AdapterFolders(self._sockets, self._directory)
        vllm_environment.prepare(self._sockets, self._ranks, self._settings.threads)
        vllm_environment.load()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            vllm_environment.preload_plainly(self._sockets)
        config = model_config(self._directory, trusted)
        check_on_vllm(shape_of(config), self._ranks, current_platform.is_cpu())
        self.max_model_len = context_length(config, self.max_model_len)
        arguments = vllm_environment.engine_arguments(
            self._directory, self._settings, self._vllm, self.max_model_len, self._ranks
        )
        if self._settings.adapter_rank is not None:
            rank = self._settings.adapter_rank
            arguments |= adapter_arguments(rank, layer_matrices(self._parameters))
        drafts = self._settings.drafts
        if recorded := self._settings.record_routing and experts_of(config) > 1:
            arguments |= routing_arguments(drafts is not None)
        self._memory = MemoryWatch()
        try:
            self._engine = vllm_environment.build(arguments)
        except Exception as error:
            self._check_memory(error, "starting vLLM")
            # The exit code of a process that a signal ended is negative.
            killed = _ENDED_BY_SIGNAL.search(str(error)) is not None
            raise (EngineLost if killed else EngineError)(
                f"{self._memory.with_cause(f'vLLM did not start ({error})')}; its own messages "
                "stand above in this log"
            ) from error
        self._remains.record(self.pids())
        self._vocabulary = vllm_environment.settle(self._engine)
        if self.policy_version is not None:
            await self._name_weights(self.policy_version)
        if drafts is not None:
            await self._rpc("earl_draft", drafts.memory_bytes)
        if recorded:
            self._recorded = RecordedLayers.of((await self._rpc("earl_record_routing"))[0])
            self.routing = self._recorded.shape

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Ask vLLM for each answer by itself. Meant to be called for single requests,
        concurrently."""
        self._check_alive()
        await self._quiet.wait()
        self._check_alive()
        try:
            async with self._entered(requests) as held:
                self._quiet.entered()
                return await self._answers(requests, held)
        finally:
            if not self._running:
                self._quiet.empty()

    async def _answers(
        self, requests: Sequence[GenerationRequest], held: HeldVersion[Any] | None
    ) -> list[Completion]:
        version = self._version() if held is None else held.number
        pairs = None if held is None else held.loaded
        answers = [asyncio.ensure_future(self._answer(each, version, pairs)) for each in requests]
        try:
            return await asyncio.gather(*answers)
        except EngineError:
            raise
        except Exception as error:
            failed = f"vLLM failed ({type(error).__name__}: {error})"
            self._lost = self._lost or self._with_cause(failed)
            self._check_memory(error, "vLLM")
            raise EngineLost(f"{self._lost}; stop the engine and start a fresh one") from error
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            self._cancelled -= {self._running[each.sequence_id] for each in requests}

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """Abort the requests in vLLM, and give up those that wait for admission."""
        names = [self._running[item] for item in sequence_ids if item in self._running]
        self._cancelled.update(names)
        for name in names:
            self._admission.give_up(name)
        await self._abort(names, internal=False)

    def limit_running(self, requests: int) -> None:
        """Let in at most so many requests at a time, as `Engine` wants.

        vLLM's scheduler takes its limit when it is built and offers no call that changes it, so
        fewer requests are let in. At the limit that it was built for it has all of them, because it
        fills a place within the step in which it becomes free.
        """
        super().limit_running(requests)
        whole = self._limit == self._settings.max_running_requests
        self._admission.limit(None if whole else self._limit)

    def finish(self, sequence_ids: Collection[int]) -> None:
        """Note it for those that draft, who are told with the next request. vLLM itself evicts the
        blocks that were used longest ago when it needs room."""
        self._finished.update(self._drafted.intersection(sequence_ids))
        self._drafted.difference_update(sequence_ids)

    async def _load_whole(self, manifest: WeightsManifest) -> None:
        """Replace the weights in vLLM's workers while no request runs."""
        await asyncio.to_thread(self._matched, manifest, self._parameters)
        async with self._quiet.no_requests():
            try:
                await self._answered(self._engine.pause_generation(mode="wait", clear_cache=True))
                reports = await self._rpc("earl_load_weights", manifest.model_dump_json())
                if any(report["digest"] != manifest.digest for report in reports):
                    raise EngineError(f"the ranks report other weights: {reports}")
                # The blocks hold keys and values of the old weights.
                if not await self._answered(self._engine.reset_prefix_cache()):
                    raise EngineError("the prefix cache could not be reset")
                await self._name_weights(manifest.policy_version)
                await self._answered(self._engine.resume_generation())
            except BaseException as error:
                self._lost = (
                    f"loading policy version {manifest.policy_version} into vLLM failed half-way "
                    f"({error})"
                )
                if not isinstance(error, Exception):
                    raise
                self._check_memory(error, "loading weights into vLLM")
                if self._engine is None or self._engine.errored:
                    raise EngineLost(self._lost) from error
                raise WeightSyncError(self._lost, engine_lost=True) from error
            self.policy_version = manifest.policy_version

    async def _load_pairs(self, manifest: WeightsManifest) -> Any:
        """vLLM's request of the version, loaded beside the others while answers run."""
        assert self._folders is not None
        await asyncio.to_thread(self._matched_pairs, manifest, layer_matrices(self._parameters))
        pairs = self._folders.make(manifest)
        given = pairs.lora_name, pairs.lora_int_id, pairs.lora_path, manifest.model_dump_json()
        found = {each for each in await self._rpc("earl_load_pairs", *given) if each}
        if found:
            await self._unload_pairs(pairs)
            refused = f"policy version {manifest.policy_version} was not loaded into vLLM: "
            error = WeightSyncError(refused + "; ".join(sorted(found)))
            self._check_memory(error, "loading an adapter into vLLM")
            raise error
        return pairs

    async def _unload_pairs(self, loaded: Any) -> None:
        assert self._folders is not None
        if self._engine is not None and not self._engine.errored:
            await self._answered(self._engine.remove_lora(loaded.lora_int_id))
        self._folders.remove(loaded)

    async def release_memory(self) -> None:
        """Give up KV cache and weights: on a GPU by sleep level 2, on a CPU by their pages.

        The model beside which pairs are played comes with no version: on a GPU it moves to host
        memory (sleep level 1), on a CPU it stays.
        """
        self._check_alive()
        whole = self._settings.adapter_rank is None
        async with self._quiet.no_requests():
            if vllm_environment.sleeps():
                await self._answered(self._engine.sleep(level=2 if whole else 1))
            elif await self._answered(self._engine.reset_prefix_cache()):
                await self._rpc("earl_give_back", whole)
            else:  # some block is in use
                return
            if whole:
                self.policy_version = None

    async def restore_memory(self) -> None:
        """Undo `release_memory`; where versions are whole weights `play_under` must follow."""
        self._check_alive()
        if vllm_environment.sleeps():
            await self._answered(self._engine.wake_up())
            await self._answered(self._engine.reset_prefix_cache())

    async def stop(self) -> None:
        """End vLLM's processes: SIGTERM, so that they remove their shared memory."""
        self._lost = self._lost or "it was stopped"
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                # It would report the end of the process as a failure.
                engine.output_handler.cancel()
                await asyncio.gather(engine.output_handler, return_exceptions=True)
            await asyncio.to_thread(engine.shutdown, _STOP_SECONDS)
            await asyncio.to_thread(self._remains.clear_away)
        self._parameters = {}
        if self._sockets is not None:
            await asyncio.to_thread(shutil.rmtree, self._sockets, ignore_errors=True)

    def statistics(self) -> dict[str, float]:
        """Return the totals that `Engine` wants; `peak_memory_bytes` is that of vLLM's
        processes."""
        totals = {**self._totals, "held_versions": float(len(self._versions))}
        peak = resident_peak_bytes(self.pids())
        if peak:
            totals["peak_memory_bytes"] = float(peak)
        return totals

    def pids(self) -> list[int]:
        """vLLM's engine process first, then its workers. SIGTERM to the first ends all cleanly."""
        return [] if self._engine is None else vllm_environment.process_ids(self._engine)

    async def _answered(self, call: Awaitable[Any]) -> Any:
        """The answer of vLLM's engine process; vLLM waits for ever when that dies meanwhile."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                if self._engine is None or self._engine.errored:
                    raise EngineLost(self._with_cause("vLLM's engine process died"))
            return await task
        finally:
            task.cancel()

    async def _rpc(self, method: str, *arguments: Any) -> Any:
        """What each of vLLM's workers returns."""
        return await self._answered(self._engine.collective_rpc(method, None, arguments))

    async def _name_weights(self, version: int) -> None:
        """Tell vLLM the version that the spans of its answers name."""
        await self._answered(self._engine.update_weight_version(str(version)))

    def _check_alive(self) -> None:
        if self._lost is None and self._engine is not None and self._engine.errored:
            self._lost = self._with_cause("vLLM's engine process died")
            self._check_memory(RuntimeError(self._lost), "vLLM")
        self._check_usable(self._engine)

    def _check_memory(self, error: Exception, doing: str) -> None:
        """Raise `OutOfMemory` if that is what the error comes from; called once for each cause, as
        it reads the log."""
        starved = None if self._memory is None else self._memory.problem(error, doing)
        if starved is not None:
            raise starved from error

    def _with_cause(self, what: str) -> str:
        return what if self._memory is None else self._memory.with_cause(what)

    async def _answer(self, request: GenerationRequest, version: int, pairs: Any) -> Completion:
        name = self._running[request.sequence_id]
        async with self._admission.entered(name, request.priority):
            if name in self._cancelled:
                return request.ended("cancelled", version)
            drafted, told = self._settings.drafts and request.takes_drafts, {*self._finished}
            queue = await self._submit(request, pairs)
            try:
                answer = await self._collect(request, queue, version, whole=pairs is None)
                if queue is not None and answer.finish_reason != "cancelled" and drafted:
                    self._finished -= told
                return answer
            except asyncio.CancelledError:
                if queue is not None:
                    await self._abort([queue.request_id], internal=True)
                raise

    async def _submit(self, request: GenerationRequest, pairs: Any) -> Any:
        """The queue that receives the answer; none when there is no room for one."""
        budget = answer_budget(request, self.max_model_len)[0] - len(request.sampled)
        if budget < 1:
            return None
        prompt = {"type": "token", "prompt_token_ids": [*request.tokens, *request.sampled]}
        name, extra = self._running[request.sequence_id], None
        if self._settings.drafts and request.takes_drafts:
            extra = extra_arguments(request, self._finished)
            self._drafted.add(request.sequence_id)
        parameters = sampling_parameters(request, budget, extra)
        how = {"lora_request": pairs, "priority": request.priority}
        queue = await self._engine.add_request(name, prompt, parameters, **how)
        if name in self._cancelled:  # while it was on its way
            await self._abort([name], internal=False)
        return queue

    async def _collect(
        self, request: GenerationRequest, queue: Any, version: int, *, whole: bool
    ) -> Completion:
        _, exhausted = answer_budget(request, self.max_model_len)
        begun, known = request.begun, len(request.sampled)
        self._totals["requests"] += begun is None
        if queue is None:
            return request.ended(exhausted, version)
        so_far, output = [*request.sampled], await queue.get()
        while True:
            # Of an answer of many pieces each token is copied once.
            so_far += output.outputs[0].token_ids[len(so_far) - len(request.sampled) :]
            ended = request.ends(so_far, known) if request.ends else None
            if output.finished or ended is not None:
                break
            if request.on_tokens:
                request.on_tokens(so_far[known:])
            known, output = len(so_far), await queue.get()
        answer = completion(request, output.outputs[0], version, exhausted, whole=whole)
        if self._recorded is not None:
            answer = self._recorded.noted(answer, output, self._engine, queue.request_id)
        answer = answer if begun is None else begun.followed_by(answer)
        if ended is not None and answer.finish_reason != "dead_end":
            # vLLM may have sampled more; the answer has no token after the one that ended it.
            answer = answer.ended_at(ended)
            await self._abort([] if output.finished else [queue.request_id], internal=True)
        self._totals["generated_tokens"] += len(answer.tokens) - len(request.sampled)
        if begun is None:
            self._totals["prompt_tokens"] += len(request.tokens)
            self._totals["prefix_hit_tokens"] += output.num_cached_tokens or 0
        return answer

    async def _abort(self, names: list[str], *, internal: bool) -> None:
        if names and self._engine is not None and not self._engine.errored:
            await self._engine.abort(names, internal=internal)
