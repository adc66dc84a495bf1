"""The interface of every rollout engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np

from earl_core.trajectory.forms import Form
from earl_core.trajectory.routing import RoutingShape
from earl_core.trajectory.samples import VersionSpan
from earl_core.weights.manifest import WeightsManifest

# vLLM's own limit, kept by all engines so that a configuration runs on each of them.
MAX_TEMPERATURE = 2.0

OUT_OF_MEMORY_ADVICE = (
    "lower rollout.max_running_requests or the number of engines, or give the machine more memory"
)

OnTokens = Callable[[Sequence[int]], None]
OnPart = Callable[["Completion"], None]
Ends = Callable[[Sequence[int], int], int | None]
"""Of the sampled tokens, and how many of them it was called with before: how many there are up to
the one that ends the answer; None when none does."""
EngineFinishReason = Literal["stop", "length", "model_context", "cancelled", "dead_end"]


TopTokens = list[tuple[int, float]]
"""The most likely tokens at one place with their log-probs, the first first."""


class Drafts(NamedTuple):
    """What drafts did for an answer of an engine that makes some. passes: the forward passes that
    its tokens were drawn after. tokens: of its drafts. accepted: those that were drawn, too."""

    passes: int = 0
    tokens: int = 0
    accepted: int = 0

    def and_(self, other: Drafts) -> Drafts:
        """Both together."""
        return Drafts(*map(sum, zip(self, other, strict=True)))


NO_DRAFTS = Drafts()


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to sample.

    `sequence_id` is an episode's identity in the engine: a later request of the same id usually
    extends the tokens of the earlier one, whose keys and values are then reused. `tokens` is the
    whole prompt. `max_tokens` counts sampled tokens; none means up to the model's context.
    `temperature` lies between 0 (greedy) and 2. The draw of the n-th token depends on `seed` (0 to
    2**63 - 1), n and the logits only. A sampled token among `stop_token_ids` ends the answer, and
    so does one that `ends` finds, which may be called in any thread; no other does. `on_tokens`
    gets the sampled tokens piece by piece, in the event loop, where the engine can tell; whatever
    it did not get is in the completion only. `top` is how many of the most likely tokens are told
    beside each sampled one. `begun` is what an earlier request of this answer has sampled, which
    `tokens` does not have; the answer goes on after it and has it in front, and `max_tokens` counts
    it. `on_part` gets the answer as far as it is sampled whenever an engine that answers in parts
    has a part of it. Where `drafted` is false the answer neither gets drafts nor becomes one. Where
    there is a `form`, tokens that would leave it are not sampled, and log-probs are those of the
    distribution without them; such an answer neither gets drafts nor becomes one. Of requests that
    wait for room those of a lower `priority` go first.
    """

    sequence_id: int
    tokens: Sequence[int]
    max_tokens: int | None
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    on_tokens: OnTokens | None = None
    ends: Ends | None = None
    top: int = 0
    begun: Completion | None = None
    on_part: OnPart | None = None
    drafted: bool = True
    form: Form | None = None
    priority: int = 0

    @property
    def takes_drafts(self) -> bool:
        """Whether the answer may get drafts and become one."""
        return self.drafted and self.form is None

    @property
    def sampled(self) -> list[int]:
        """The tokens of the answer that are sampled already."""
        return [] if self.begun is None else self.begun.tokens

    def after(self, part: Completion) -> GenerationRequest:
        """The request that goes on with the answer after this part of it."""
        if self.on_part is not None:
            self.on_part(part)
        return replace(self, begun=part)

    def ended(self, reason: EngineFinishReason, version: int) -> Completion:
        """The answer as it stands. version: that would have gone on with it."""
        begun = self.begun or Completion([], [], reason, [VersionSpan(version, 0, 0)])
        return replace(begun, finish_reason=reason)


@dataclass(frozen=True)
class Completion:
    """A sampled answer.

    `tokens` includes the token that ended it, and none after it. `logprobs` has the same length:
    natural log-probabilities under the distribution that was sampled from, temperature included (at
    temperature 0 those of temperature 1); always finite. `model_context` means that the context
    ended the answer before its own budget did; `tokens` is then empty if the prompt filled it.
    `dead_end` means that the form of the request allows no token after these: the answer is none.
    `spans` cover the tokens in order, at least one of them; its end is 0 where there are no tokens.
    `top` has an entry for each token where the request asks for it. `drafts` counts those that
    parts of the answer had in this engine. `routing` has a row of `Engine.routing.width` numbers
    for each of the first tokens of prompt and answer, as far as their keys and values are computed:
    the experts that this pass has chosen. It is never written again. None: nothing is recorded.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: EngineFinishReason
    spans: list[VersionSpan]
    top: list[TopTokens] = field(default_factory=list)
    drafts: Drafts = NO_DRAFTS
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)

    def followed_by(self, more: Completion) -> Completion:
        """The answer of which this is the beginning and the other one the rest."""
        count = len(self.tokens)
        if not count:
            return more
        spans = list(self.spans)
        for version, first, end in more.spans:
            if spans[-1].policy_version == version:
                spans[-1] = spans[-1]._replace(end=count + end)
            elif end:
                spans.append(VersionSpan(version, count + first, count + end))
        tokens, logprobs = self.tokens + more.tokens, self.logprobs + more.logprobs
        top, drafts = self.top + more.top, self.drafts.and_(more.drafts)
        return Completion(tokens, logprobs, more.finish_reason, spans, top, drafts, more.routing)

    def ended_at(self, count: int) -> Completion:
        """The answer that its first tokens are, so many that one of them ended it."""
        spans = [VersionSpan(s[0], s[1], min(s[2], count)) for s in self.spans if s[1] < count]
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            finish_reason="stop",
            spans=spans,
            top=self.top[:count],
            drafts=NO_DRAFTS,
        )


class Engine(Protocol):
    """A language model that answers many requests at once.

    `lockstep` engines want all live sequences in one `generate` call and give results that depend
    on the batches alone, never on timing. Others batch concurrent `generate` calls themselves, so
    that each episode may call on its own. All methods run on one event loop; `generate` may be
    awaited concurrently, also while `play_under` runs: each token is sampled under the policy
    version that its span reports.

    A version is whole weights, of which an engine has one set, or the pairs of an adapter beside
    the model that it started with. Those live side by side: a request is answered under the version
    that was current when it entered. An engine is built for one of the two.
    """

    @property
    def lockstep(self) -> bool:
        """True when callers should feed whole batches."""

    @property
    def policy_version(self) -> int | None:
        """The version that requests which enter now are answered under; none before there is
        one."""

    @property
    def max_model_len(self) -> int:
        """Most tokens a sequence can have, prompt and answer together."""

    @property
    def routing(self) -> RoutingShape | None:
        """What completions say of the experts that each token was given, once it has started; None:
        nothing."""

    async def start(self) -> None:
        """Load the model. Raises `ConfigError`, `OutOfMemory` or `EngineError`."""

    def limit_running(self, requests: int) -> None:
        """Answer at most so many requests at a time from now on, and never more than the engine was
        built for; the others wait. Changes nothing else and takes no time."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample all answers; results are in the order of the requests.

        Raises `ValueError` for a request that no engine could serve (no tokens, a sequence id
        twice, a negative temperature), `GrammarError` for a form without a grammar, `EngineLost`,
        and `OutOfMemory`, after which the engine is to be stopped.
        """

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        """End running requests of these sequences; their completions say `cancelled`."""

    def finish(self, sequence_ids: Collection[int]) -> None:
        """Forget these sequences and free what is cached for them; unknown ids are ignored."""

    async def play_under(self, manifest: WeightsManifest) -> None:
        """Answer the requests that enter from now on under this version, which then is
        `policy_version`.

        Whole weights are loaded in place of the former ones; running requests are waited for or go
        on, as the engine has it. Pairs are loaded if this version is not held, and nobody waits;
        the former one is unloaded when its last request is answered, unless it is kept. Raises
        `WeightSyncError` unless exactly the model's tensors, or the pairs of exactly the matrices
        that the manifest names, arrived with the right bytes; the former version then goes on.
        """

    async def keep(self, versions: Collection[int]) -> None:
        """Hold these versions though no request uses them, so that `play_under` finds them; those
        of the call before no longer. Means nothing where versions are whole weights."""

    async def release_memory(self) -> None:
        """Give memory back between rollouts; cached sequences are lost."""

    async def restore_memory(self) -> None:
        """Undo `release_memory`. Where the weights were given up, `policy_version` becomes none
        and `play_under` must follow."""

    async def stop(self) -> None:
        """End the engine and every process it started. May be called twice."""

    def statistics(self) -> dict[str, float]:
        """Totals since the start.

        `generated_tokens`, `prompt_tokens`, `prefix_hit_tokens` (prompt tokens whose keys and
        values were reused), `requests`, and `peak_memory_bytes` where it is known. Not a total:
        `held_versions`, the pairs that are loaded now.
        """

    def pids(self) -> list[int]:
        """Processes this engine started, to be ended by SIGTERM if their parent dies."""


def check_requests(requests: Sequence[GenerationRequest], vocabulary: int) -> None:
    """Raise `ValueError` for requests that cannot be served, naming the first one.

    `vocabulary` is the number of token ids the model has.
    """
    seen: set[int] = set()
    for request in requests:
        where = f"the request of sequence {request.sequence_id}"
        if request.sequence_id in seen:
            raise ValueError(f"{where} comes twice in one batch: send its turns one after another")
        seen.add(request.sequence_id)
        if not request.tokens:
            raise ValueError(f"{where} has no tokens: a prompt needs at least one")
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
            raise ValueError(
                f"{where} has token ids from {min(request.tokens)} to {max(request.tokens)}, the "
                f"model's are 0 to {vocabulary - 1}: use the model's own tokenizer"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ValueError(f"{where} has max_tokens={request.max_tokens}: it must be at least 1")
        if not 0 <= request.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"{where} has temperature {request.temperature}: it must lie between 0 (greedy) "
                f"and {MAX_TEMPERATURE}"
            )
        if request.form is not None and set(request.form.stops) != set(request.stop_token_ids):
            raise ValueError(f"{where} has a form with other stop tokens than its own")
        if not 0 <= request.seed < 2**63:
            raise ValueError(f"{where} has seed {request.seed}: it must have 63 bits")


def answer_budget(
    request: GenerationRequest, max_model_len: int
) -> tuple[int, Literal["length", "model_context"]]:
    """Most tokens that may be sampled, and the finish reason when they run out."""
    room = max(0, max_model_len - len(request.tokens))
    if request.max_tokens is None or request.max_tokens > room:
        return room, "model_context"
    return request.max_tokens, "length"
