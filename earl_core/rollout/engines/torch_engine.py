"""Plain transformers as a rollout engine: deterministic, batched, cached across turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from earl_core.config.rollout import MOST_DRAFT_TOKENS
from earl_core.pretrained.float32_head import Float32Head
from earl_core.pretrained.grammars import Matcher, grammars_of
from earl_core.pretrained.logit_transform import NO_TRANSFORM, LogitTransform
from earl_core.pretrained.routers import Routers, routers_of, unread_routers
from earl_core.rollout.engines.base_engine import BaseEngine, EngineSettings
from earl_core.rollout.engines.causal_model import NO_PAIRS, PairedLayers, Pairs, load_causal_model
from earl_core.rollout.engines.drafting import Drafting, widest_draft
from earl_core.rollout.engines.drawing import Drawing
from earl_core.rollout.engines.engine import (
    OUT_OF_MEMORY_ADVICE,
    Completion,
    GenerationRequest,
    answer_budget,
)
from earl_core.rollout.engines.forward_pass import append, check_states
from earl_core.rollout.engines.held_versions import HeldVersion
from earl_core.rollout.engines.row_states import RowStates
from earl_core.rollout.engines.sampling import Sampling
from earl_core.rollout.engines.slot_cache import Row, SlotCache, common_prefix
from earl_core.rollout.errors import EngineError, WeightSyncError
from earl_core.system.errors import ConfigError
from earl_core.system.memory import OutOfMemory, guarded, is_out_of_memory
from earl_core.tensors.device_copies import upload
from earl_core.trajectory.routing import untold
from earl_core.weights.manifest import WeightsManifest, config_digest
from earl_core.weights.publish import resolve_dtype

_T = TypeVar("_T")

# Padded prompt tokens of one forward pass: bounds activations, large enough to fill the cores.
_PREFILL_TOKENS = 8192
# Elements of one attention mask: bounds it (256 MB in float32) for long contexts.
_MASK_ELEMENTS = 1 << 26


class TorchEngine(BaseEngine[Pairs]):
    """An `Engine` on transformers' own forward pass.

    Any causal language model whose attention is causal over the whole context (Llama, Qwen, GPT-2
    and their like), also with layers that have a state by the gated delta rule (Qwen3.5,
    Qwen3-Next). In float32 an answer depends bit for bit on the batches it was sampled in and on
    nothing else. Keys, values and states are kept until `finish`, or until the sequence goes on
    under other pairs. options: fields of `EngineSettings`.
    """

    lockstep = True

    def __init__(self, model_directory: Path, *, device: str | None = None, **options: Any) -> None:
        super().__init__(model_directory, EngineSettings(**options))
        self._dtype = resolve_dtype(self._settings.dtype)
        self._head: torch.nn.Module | Float32Head | None = None
        self._transform = NO_TRANSFORM
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # One thread computes: calls run one after another while the event loop stays free.
        threads = self._settings.threads or torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "torch-engine", torch.set_num_threads, (threads,))
        self._model: PreTrainedModel | None = None
        self._layers: PairedLayers | None = None
        self._routers: Routers | None = None
        self._cache = SlotCache()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._finished: set[int] = set()
        self._released = False
        self._under: tuple[int, str] | None = None
        self._peak_cache_bytes = 0
        drafts = self._settings.drafts
        self._drafting: Drafting | None = None
        if drafts is not None:
            self._drafting = Drafting(drafts.most_tokens, drafts.memory_bytes)

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` for a model this engine would answer wrongly, and
        for routers whose choice is to be recorded and could not be repeated."""
        await self._run("loading the model into the torch engine", self._start)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate the answers in the engine's thread. Concurrent calls are answered one after
        another."""
        self._check_alive()
        async with self._entered(requests) as held:
            try:
                doing = f"generating {len(requests)} answers in the torch engine"
                return await self._run(doing, lambda: self._generate(requests, held))
            except asyncio.CancelledError:
                self._cancelled.update(request.sequence_id for request in requests)
                raise

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """Cancel the running requests, as `Engine` wants; takes effect after the forward pass that
        is running."""
        self._cancelled |= self._running.keys() & set(sequence_ids)

    def finish(self, sequence_ids: Collection[int]) -> None:
        """Forget the sequences, as `Engine` wants; during a `generate` it takes effect at that
        call's end."""
        self._finished.update(sequence_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_finished()
            finally:
                self._lock.release()

    async def _load_whole(self, manifest: WeightsManifest) -> None:
        await self._run("loading weights", lambda: self._load_weights(manifest))

    async def _load_pairs(self, manifest: WeightsManifest) -> Pairs:
        """Not in the computing thread, whose answers would be waited for."""
        return await asyncio.to_thread(self._pairs_of, manifest)

    async def _unload_pairs(self, loaded: Pairs) -> None:
        """The tensors go with the last reference."""

    def _check_alive(self) -> None:
        self._check_usable(self._model)

    async def release_memory(self) -> None:
        """Free all cached keys and values; on an accelerator move the weights to host memory."""
        self._check_alive()
        await self._run("releasing memory", self._release)

    async def restore_memory(self) -> None:
        """Undo `release_memory`; the weights are still there."""
        self._check_alive()
        await self._run("restoring memory", self._restore)

    async def stop(self) -> None:
        """Drop the model and end the computing thread."""
        self._lost = self._lost or "it was stopped"
        await asyncio.to_thread(self._executor.shutdown)
        self._cache.clear()
        self._model = self._layers = None

    def statistics(self) -> dict[str, float]:
        """Return the totals that `Engine` wants; also `cache_bytes` now and `peak_cache_bytes`."""
        totals = dict(self._totals)
        totals["cache_bytes"] = float(self._cache.nbytes)
        totals["peak_cache_bytes"] = float(self._peak_cache_bytes)
        totals["held_versions"] = float(len(self._versions))
        if self._device.type == "cuda":
            totals["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return totals

    def pids(self) -> list[int]:
        """No process but the caller's."""
        return []

    async def _run(self, doing: str, work: Callable[[], _T]) -> _T:
        def guarded_work() -> _T:
            try:
                with guarded("rollout", doing, OUT_OF_MEMORY_ADVICE):
                    return work()
            except OutOfMemory:
                # What was being written when memory ran out is not whole.
                self._lost = "it ran out of memory"
                self._cache.clear()
                raise

        return await asyncio.get_running_loop().run_in_executor(self._executor, guarded_work)

    def _start(self) -> None:
        self._model, self.max_model_len = load_causal_model(
            self._directory,
            dtype=self._dtype,
            device=self._device,
            max_model_len=self.max_model_len,
            trust_remote_code=self._settings.trust_remote_code,
        )
        if self._settings.record_routing:
            if unread_routers(self._model):
                raise untold(f"{self._directory} has")
            self._routers = routers_of(self._model)
            self.routing = None if self._routers is None else self._routers.shape
        self._take_head(self._model)
        self._transform = LogitTransform.of(self._model.config)
        self._cache = SlotCache(RowStates(self._model))
        if self._cache.states:
            if self._drafting is not None:
                raise ConfigError(
                    f"the torch engine makes no drafts for {self._model.config.model_type} models: "
                    "from a layer's state wrong draft tokens cannot be taken back"
                )
            check_states(self._model, self._cache)
        if self._settings.adapter_rank is not None:
            self._layers = PairedLayers(self._model)
        self._config_digest = config_digest(self._model.config.to_dict())
        self._vocabulary = self._model.get_input_embeddings().weight.shape[0]

    def _take_head(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        self._head = Float32Head(head) if self._settings.float32_head else head

    @torch.inference_mode()
    def _generate(
        self, requests: Sequence[GenerationRequest], held: HeldVersion[Pairs] | None
    ) -> list[Completion]:
        if self._released:
            raise EngineError("the engine's memory is released: call restore_memory() first")
        # Whole weights may have been loaded since these requests entered.
        version = self._version() if held is None else held.number
        with self._lock:
            if self._layers is not None:
                self._layers.pairs = NO_PAIRS if held is None else held.loaded
            self._under = version, "" if held is None else held.digest
            samplings = [
                Sampling(
                    request, *answer_budget(request, self.max_model_len), self._matcher(request)
                )
                for request in requests
            ]
            live = [sampling for sampling in samplings if sampling.finish_reason is None]
            size = self._limit
            for first in range(0, len(live), size):
                self._answer(live[first : first + size])
            self._cancelled.difference_update(request.sequence_id for request in requests)
            self._peak_cache_bytes = max(self._peak_cache_bytes, self._cache.nbytes)
            self._forget_finished()
        self._totals["requests"] += len(requests)
        return [sampling.completion(version) for sampling in samplings]

    def _matcher(self, request: GenerationRequest) -> Matcher | None:
        if request.form is None:
            return None
        grammars = grammars_of(self._directory, self._settings.trust_remote_code)
        return grammars.matcher(request.form, request.sampled)

    def _answer(self, wave: list[Sampling]) -> None:
        """Sample the answers of one batch to their ends."""
        assert self._under is not None
        by_id = {sampling.request.sequence_id: sampling for sampling in wave}
        drawing = Drawing(wave, self._drafting, self._cancelled, self._under[0], self._totals)
        rows, logits = self._prefill(by_id)
        while True:
            running = [by_id[row.sequence_id] for row in rows]
            drawing.draw(rows, running, logits)
            active = sum(sampling.finish_reason is None for sampling in running)
            if not active:
                break
            if active <= len(running) * 7 // 8:
                rows = self._cache.arrange(
                    [s.request.sequence_id for s in running if s.finish_reason is None]
                )
                running = [by_id[row.sequence_id] for row in rows]
            pieces = drawing.pieces(rows, running, self._widest_draft(rows, logits.shape[1]))
            logits = self._forward(rows, pieces, [max(1, len(piece)) for piece in pieces])
        for sequence_id, sampling in by_id.items():
            sampling.routing = self._cache.row(sequence_id).routing

    def _prefill(self, by_id: dict[int, Sampling]) -> tuple[list[Row], torch.Tensor]:
        """Compute what is not cached of the prompts: their rows and last logits [rows, vocab]."""
        todo: dict[int, list[int]] = {}
        for sequence_id, sampling in by_id.items():
            row, prompt = self._cache.row(sequence_id), [*sampling.request.tokens, *sampling.tokens]
            if row.version != self._under:
                row.keep(0)
                row.version = self._under
            # At least one token is computed anew, for its logits.
            shared = min(common_prefix(row.tokens, prompt), len(prompt) - 1)
            kept = self._cache.keep(row, shared)
            todo[sequence_id] = prompt[kept:]
            if sampling.request.begun is None:
                self._totals["prompt_tokens"] += len(prompt)
                self._totals["prefix_hit_tokens"] += kept
        final: dict[int, torch.Tensor] = {}
        while todo:
            rows = self._cache.arrange(list(todo))
            width = self._chunk_width(rows, [len(todo[row.sequence_id]) for row in rows])
            pieces = [todo[row.sequence_id][:width] for row in rows]
            logits = self._forward(rows, pieces, [1] * len(rows))
            for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
                todo[row.sequence_id] = todo[row.sequence_id][len(piece) :]
                if not todo[row.sequence_id]:
                    del todo[row.sequence_id]
                    final[row.sequence_id] = logits[index]
        rows = self._cache.arrange(list(by_id))
        return rows, torch.stack([final[row.sequence_id] for row in rows])

    def _chunk_width(self, rows: list[Row], remaining: list[int]) -> int:
        count, longest = len(rows), max(remaining)
        width = longest
        if count * longest > 1.5 * sum(remaining):
            # One long prompt among short ones: finish the short ones first, without its padding.
            width = sorted(remaining)[count // 2]
        return max(1, min(width, self._widest(rows, width)))

    def _widest(self, rows: list[Row], width: int) -> int:
        """Most tokens of each row that a pass may compute. width: how many it would like to."""
        count, visible = len(rows), max(len(row.tokens) for row in rows) + width
        return min(_PREFILL_TOKENS // count, _MASK_ELEMENTS // (count * visible))

    def _widest_draft(self, rows: list[Row], vocabulary: int) -> int:
        """The same where each token has logits, which are as many as a vocabulary is large."""
        most = widest_draft(len(rows), vocabulary)
        return min(most, self._widest(rows, MOST_DRAFT_TOKENS))

    def _forward(
        self, rows: list[Row], pieces: list[list[int]], drawn: Sequence[int]
    ) -> torch.Tensor:
        """Append a piece of tokens to each row; logits [their sum, vocabulary] after so many of its
        last ones."""
        assert self._model is not None
        assert self._head is not None
        hidden = append(self._model, self._cache, rows, pieces, drawn)
        if self._routers is not None:
            self._cache.record(rows, pieces, self._routers)
        return self._transform(self._head(hidden))

    def _forget_finished(self) -> None:
        if self._finished:
            self._cache.drop(list(self._finished))
            self._cancelled -= self._finished
            if self._drafting is not None:
                for sequence_id in self._finished:
                    self._drafting.finish(sequence_id)
            self._finished.clear()

    @torch.no_grad()
    def _load_weights(self, manifest: WeightsManifest) -> None:
        assert self._model is not None
        state = dict(self._model.named_parameters(remove_duplicate=False))
        pairs = self._matched(manifest, state)
        with self._lock:
            try:
                upload(pairs)
            except Exception as error:
                self._lost = f"loading policy version {manifest.policy_version} failed half-way"
                if is_out_of_memory(error):
                    raise
                raise WeightSyncError(f"{self._lost}: {error}", engine_lost=True) from error
            self._cache.clear()
            self._take_head(self._model)
            self.policy_version = manifest.policy_version

    @torch.no_grad()
    def _pairs_of(self, manifest: WeightsManifest) -> Pairs:
        assert self._layers is not None
        assert manifest.adapter is not None
        matched = self._matched_pairs(manifest, self._layers.matrices)
        place, dtype = self._device, self._dtype
        with guarded("rollout", "loading an adapter into the torch engine", OUT_OF_MEMORY_ADVICE):
            pairs = {n: (a.to(place, dtype), b.to(place, dtype)) for n, (a, b) in matched.items()}
        return Pairs(pairs, manifest.adapter.scale)

    def _release(self) -> None:
        with self._lock:
            self._cache.clear()
            self._head = None
            self._released = True
            if self._device.type == "cuda" and self._model is not None:
                self._model.to("cpu")
                torch.cuda.empty_cache()

    def _restore(self) -> None:
        if self._model is not None:
            self._model.to(self._device)
            self._take_head(self._model)
        self._released = False
