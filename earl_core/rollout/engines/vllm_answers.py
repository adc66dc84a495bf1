"""A request in vLLM's words, and its answer out of them."""

from __future__ import annotations

import math
from typing import Any

from earl_core.rollout.engines.engine import (
    NO_DRAFTS,
    Completion,
    Drafts,
    EngineFinishReason,
    GenerationRequest,
)
from earl_core.rollout.errors import EngineError
from earl_core.trajectory.samples import VersionSpan, derive_seed


def sampling_parameters(
    request: GenerationRequest, budget: int, extra: dict[str, Any] | None = None
) -> Any:
    """vLLM's `SamplingParams`. budget: most tokens that may be sampled beside those that are.
    extra: what the workers are told with the request.

    Raises `ValueError` for an answer of a form that has begun: vLLM's grammars begin with the
    request.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    kinds, seed, form = RequestOutputKind, request.seed, request.form
    if form is not None and request.sampled:
        raise ValueError("an answer of a form cannot go on in vLLM: let it end")
    if request.sampled:
        # A generator begins with its seed: the draws of the first tokens must not come again.
        seed = derive_seed(seed, len(request.sampled))
    return SamplingParams(
        max_tokens=budget,
        temperature=request.temperature,
        seed=seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,
        logprobs=request.top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.CUMULATIVE if request.on_tokens or request.ends else kinds.FINAL_ONLY,
        skip_clone=True,
        structured_outputs=form and StructuredOutputsParams(structural_tag=form.grammar),
        extra_args=extra,
    )


def completion(
    request: GenerationRequest,
    answer: Any,
    version: int,
    exhausted: EngineFinishReason,
    *,
    whole: bool,
) -> Completion:
    """A finished answer of vLLM. version: under which it entered. exhausted: why it ended if its
    budget did. whole: its weights may have been replaced meanwhile, which vLLM notes.

    Raises `EngineError` where log-probs are missing or not finite, and for an answer that vLLM
    ended by an error.
    """
    tokens, flat = list(answer.token_ids), answer.logprobs
    # Of each place first the sampled token, then the most likely ones.
    logprobs = [flat.logprobs[at] for at in flat.start_indices]
    top = [
        list(zip(flat.token_ids[at + 1 : end], flat.logprobs[at + 1 : end], strict=True))
        for at, end in zip(flat.start_indices, flat.end_indices, strict=True)
        if end > at + 1
    ]
    finite = [math.isfinite(each) for each in logprobs]
    # Where a form allows no token, vLLM draws one all the same. It allowed the first one.
    if request.form and (answer.finish_reason == "error" or (False in finite and finite[0])):
        return request.ended("dead_end", version)
    if answer.finish_reason == "error":
        raise EngineError(f"vLLM ended the answer of sequence {request.sequence_id} by an error")
    if len(tokens) != len(logprobs) or not all(finite):
        raise EngineError(
            f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} tokens, or some that are "
            f"not finite, at policy version {version}: the weights have probably diverged; "
            "lower the learning rate"
        )
    noted = answer.weight_versions or () if whole else ()
    spans = [VersionSpan(int(s.version), s.start, s.end) for s in noted]
    spans = spans or [VersionSpan(version, 0, len(tokens))]
    reason: EngineFinishReason = "stop" if answer.finish_reason == "stop" else exhausted
    if answer.finish_reason == "abort":
        reason = "cancelled"
    drafts = drafts_of(answer) if request.takes_drafts else NO_DRAFTS
    return Completion(tokens, logprobs, reason, spans, top, drafts)


def drafts_of(answer: Any) -> Drafts:
    """What drafts did for vLLM's answer, of which it tells nothing where the answer was cut off."""
    counted = answer.spec_decode_metrics
    if counted is None:
        return NO_DRAFTS
    accepted = sum(right * steps for right, steps in enumerate(counted.histogram))
    return Drafts(len(answer.token_ids) - accepted, counted.num_draft_tokens, accepted)
