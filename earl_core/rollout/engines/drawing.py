"""The next tokens of a batch's answers: drawn one by one, or several where a draft foretold them.

The draw of a token depends on its seed, its place and the logits there. A draft token is right if
it is the one that is drawn at its place, so the tokens are those that are drawn without drafts, as
far as the logits are: passes of another width round otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Collection, MutableMapping, Sequence
from itertools import islice

import numpy as np
import torch

from earl_core.pretrained.grammars import GrammarError
from earl_core.rollout.engines.drafting import Drafting
from earl_core.rollout.engines.engine import Drafts
from earl_core.rollout.engines.sampling import Sampling, sample, uniform
from earl_core.rollout.engines.slot_cache import Row
from earl_core.rollout.errors import EngineError
from earl_core.tensors.token_masks import forbid


class Drawing:
    """Draws for the answers of one batch.

    drafting: None: there are no drafts. cancelled: the sequences to end, while the batch runs.
    version: the policy's. totals: of the engine.
    """

    def __init__(
        self,
        batch: Sequence[Sampling],
        drafting: Drafting | None,
        cancelled: Collection[int],
        version: int,
        totals: MutableMapping[str, float],
    ) -> None:
        self._drafting, self._cancelled = drafting, cancelled
        self._version, self._totals = version, totals
        self._drafts: dict[int, list[int]] = {}
        self._began: float | None = None
        if drafting is not None:
            for sampling in batch:
                if sampling.request.takes_drafts:
                    drafting.begin(sampling.request)

    def pieces(
        self, rows: Sequence[Row], running: Sequence[Sampling], widest: int
    ) -> list[list[int]]:
        """What the next pass appends to each row: its answer's last token, and a draft. Answers
        that ended but still have a row ride along as padding. widest: most tokens of a row."""
        self._began = time.perf_counter()
        self._drafts = {}
        if self._drafting is not None:
            drafted = [
                s.request.sequence_id
                if s.finish_reason is None and s.request.takes_drafts
                else None
                for s in running
            ]
            room = [s.budget - len(s.tokens) - 1 for s in running]
            drafts = self._drafting.propose(drafted, room, widest)
            named = zip(rows, drafts, strict=True)
            self._drafts = {row.sequence_id: draft for row, draft in named if draft}
        return [[s.tokens[-1], *self._draft(s)] if s.finish_reason is None else [] for s in running]

    def draw(self, rows: Sequence[Row], running: Sequence[Sampling], logits: torch.Tensor) -> None:
        """Draw the tokens after those that were last appended. logits: [their sum, vocabulary]
        after the last token of each row, or after each token of its piece."""
        places = [
            (s, len(s.tokens) + ahead) for s in running for ahead in range(len(self._draft(s)) + 1)
        ]
        seeds = np.array([s.request.seed for s, _ in places], dtype=np.uint64)
        counters = np.array([counter for _, counter in places], dtype=np.uint64)
        temperatures = np.array([s.request.temperature for s, _ in places], dtype=np.float64)
        logits = _masked(logits, [s for s, _ in places])  # which may end some
        tokens, logprobs, every = sample(logits, temperatures, uniform(seeds, counters))
        drawn = zip(tokens.tolist(), logprobs.tolist(), every, strict=True)
        for row, sampling in zip(rows, running, strict=True):
            draft, count = self._draft(sampling), len(sampling.tokens)
            self._take(sampling, draft, list(islice(drawn, len(draft) + 1)))
            if draft:
                # Keys and values of what was not drawn.
                row.keep(len(sampling.request.tokens) + len(sampling.tokens) - 1)
            self._count(sampling, draft, sampling.tokens[count:])
        if self._drafting is not None and self._began is not None:
            width = 1 + max(map(len, self._drafts.values()), default=0)
            self._drafting.timed(len(rows), width, time.perf_counter() - self._began)

    def _draft(self, sampling: Sampling) -> list[int]:
        return self._drafts.get(sampling.request.sequence_id, [])

    def _take(
        self, sampling: Sampling, draft: list[int], drawn: list[tuple[int, float, torch.Tensor]]
    ) -> None:
        """Take the tokens that were drawn, up to the first one that is not the draft's."""
        if sampling.finish_reason is not None:
            return
        if sampling.request.sequence_id in self._cancelled:
            sampling.finish_reason = "cancelled"
            return
        for ahead, (token, logprob, every) in enumerate(drawn):
            if not np.isfinite(logprob):
                raise EngineError(
                    f"the model gave a log-prob of {logprob} at policy version {self._version}: "
                    "its weights have diverged; lower the learning rate"
                )
            if sampling.request.top:
                sampling.note_top(every)
            sampling.take(token, logprob)
            if sampling.finish_reason is not None or draft[ahead : ahead + 1] != [token]:
                return

    def _count(self, sampling: Sampling, draft: list[int], taken: list[int]) -> None:
        self._totals["generated_tokens"] += len(taken)
        if self._drafting is None or not taken or not sampling.request.takes_drafts:
            return
        passes, made, accepted = sampling.drafts
        if draft:
            accepted += sum(one == other for one, other in zip(draft, taken, strict=False))
        sampling.drafts = Drafts(passes + 1, made + len(draft), accepted)
        self._drafting.took(sampling.request.sequence_id, taken)


def _masked(logits: torch.Tensor, answers: Sequence[Sampling]) -> torch.Tensor:
    """The logits [answers, vocabulary], minus infinity where a form does not allow a token. An
    answer with which none goes on ends."""
    held = []
    for row, each in enumerate(answers):
        if each.matcher is not None and each.finish_reason is None:
            try:
                held.append((row, each.matcher.allowed()))
            except GrammarError:
                each.finish_reason = "dead_end"
    if not held:
        return logits
    masks = torch.from_numpy(np.stack([mask for _, mask in held]))
    rows = torch.tensor([row for row, _ in held], device=logits.device)
    some = logits[rows].float()
    forbid(some, masks.to(logits.device), float("-inf"))
    return logits.float().index_copy(0, rows, some)
