"""Drafts in vLLM's worker: made after a step, and compared in the next with what is drawn.

vLLM 0.32 takes drafts from a class of others' (`speculative_config`, method `custom_class`), gives
it no names of requests, and draws by a rejection sampler of its own. That one is not used. On a CPU
without Triton the temperatures it divides by are memory that nobody has written: `expand_kernel`
becomes `_expand_kernel_impl` of `vllm/utils/cpu_triton_utils.py`, which converts its output, of
float32, to a copy of int64 and does not copy it back. And on any device a token that it accepts is
drawn by other random numbers than without drafts. Here vLLM's plain sampler draws each token, one
place after the other, and a draft token is right if it is the one that is drawn there. So log-probs
are the plain sampler's, and a request's generator yields a seed for each token and no other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from earl_core.config.rollout import DraftsConfig
from earl_core.rollout.engines.drafting import Drafting, widest_draft
from earl_core.rollout.engines.engine import Completion, GenerationRequest

DRAFTER = f"{__name__}.Drafter"
"""What `speculative_config` names."""


def drafted_arguments(drafts: DraftsConfig) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": DRAFTER,
            "num_speculative_tokens": drafts.most_tokens,
        },
        "per_request_spec_decode_metrics": "summary",
    }


def extra_arguments(request: GenerationRequest, finished: Collection[int]) -> dict[str, Any]:
    """What a request tells the `Drafter`. finished: sequences that do not go on."""
    return {
        "sequence": request.sequence_id,
        "begun": len(request.sampled),
        "finished": list(finished),
    }


class Drafter:
    """Makes the drafts; vLLM's model runner calls it once after each step."""

    def __init__(self, vllm_config: Any) -> None:
        self._limit = vllm_config.model_config.max_model_len
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._widest = 1 + vllm_config.speculative_config.num_speculative_tokens
        self._runner: Any = None
        self._sampler: MatchingSampler | None = None
        self._drafting: Drafting | None = None
        self._known: dict[str, int | None] = {}
        self._began: float | None = None

    def load_model(self, model: Any) -> None:
        """vLLM has loaded its model, of which drafts need nothing."""

    def bind(self, runner: Any, memory: int | None) -> None:
        """Draft for this model runner, and have it draw as it draws without drafts. memory: bytes
        of the past answers; None: nobody reads what this worker drafts."""
        self._runner, self._sampler = runner, MatchingSampler(runner.sampler)
        runner.rejection_sampler = self._sampler
        # vLLM drafts zeros where a model that drafts has no context left.
        runner.effective_drafter_max_model_len = 1 << 60
        if memory is not None:
            self._drafting = Drafting(self._widest - 1, memory)

    def propose(
        self, sampled: list[list[int]], lengths: Any, tokens: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A draft for each request of the step. sampled: what each has drawn in it. lengths,
        tokens: of prompts and answers, what was drawn included."""
        if self._drafting is None:
            return [[] for _ in sampled]
        names = self._runner.input_batch.req_ids[: len(sampled)]
        self._time(names, sampled)
        sequences: list[int | None] = []
        room: list[int] = []
        for row, (name, drawn) in enumerate(zip(names, sampled, strict=True)):
            state = self._runner.requests[name]
            prompt = state.num_prompt_tokens
            if name not in self._known:
                self._known[name] = self._begin(state, tokens[row, :prompt].tolist())
            sequence = self._known[name]
            if sequence is not None and drawn:
                self._drafting.took(sequence, drawn)
            # Of a prompt that is computed in parts nothing is drawn yet.
            sequences.append(sequence if drawn else None)
            end = min(self._limit, prompt + state.sampling_params.max_tokens)
            room.append(end - int(lengths[row]) - 1)
        widest = min(self._widest, widest_draft(len(names), self._vocabulary))
        drafts = self._drafting.propose(sequences, room, widest)
        return [self._up_to_stop(*each) for each in zip(names, drafts, strict=True)]

    def _time(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Note how long the step took, vLLM's own work included; not where a prompt was in it."""
        assert self._drafting is not None
        assert self._sampler is not None
        began, self._began = self._began, time.perf_counter()
        if began is not None and all(sampled) and all(name in self._known for name in names):
            self._drafting.timed(len(names), self._sampler.width, self._began - began)

    def _begin(self, state: Any, prompt: list[int]) -> int | None:
        """The sequence of a request that is new, if it takes drafts."""
        assert self._drafting is not None
        running = self._runner.requests
        self._known = {name: each for name, each in self._known.items() if name in running}
        given: Mapping[str, Any] | None = state.sampling_params.extra_args
        if not given:
            return None
        for each in set(given["finished"]) - set(self._known.values()):
            self._drafting.finish(each)
        sequence, begun = int(given["sequence"]), len(prompt) - given["begun"]
        part = Completion(prompt[begun:], [], "length", []) if given["begun"] else None
        self._drafting.begin(GenerationRequest(sequence, prompt[:begun], None, 1.0, 0, begun=part))
        return sequence

    def _up_to_stop(self, name: str, draft: list[int]) -> list[int]:
        """The draft before a token that would end the answer, which is drawn after it all the
        same: so all that is drawn belongs to the answer."""
        stops = self._runner.requests[name].sampling_params.stop_token_ids or ()
        return draft[: next((n for n, token in enumerate(draft) if token in stops), len(draft))]


class MatchingSampler:
    """Takes the place of vLLM's `RejectionSampler`. sampler: vLLM's plain one."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.width = 1
        """Tokens of a request in the last step, at most."""

    def __call__(self, metadata: Any, draft_probs: Any, logits: Any, how: Any) -> Any:
        """vLLM's `SamplerOutput`: the tokens of each request, [requests, width], minus 1 after the
        last. how: its `SamplingMetadata`."""
        self.width = 1 + metadata.max_spec_len
        if self.width == 1:
            return self._sampler(logits=logits, sampling_metadata=how)
        drafts, counts = metadata.draft_token_ids.tolist(), metadata.num_draft_tokens
        ends = metadata.cu_num_draft_tokens.tolist()
        firsts = [end - count for end, count in zip(ends, counts, strict=True)]
        size, going = (len(counts), self.width), list(range(len(counts)))
        tokens = logits.new_full(size, -1, dtype=torch.int32)
        told: list[torch.Tensor] | None = None
        for ahead in range(self.width):
            # Before a request's draft there is a row for each request before it, too.
            rows = [firsts[each] + each + ahead for each in going]
            places = torch.tensor(going, device=logits.device)
            drawn = self._sampler(logits=logits[rows], sampling_metadata=_of(how, going, places))
            tokens[places, ahead] = drawn.sampled_token_ids[:, 0]
            if drawn.logprobs_tensors is not None:
                parts = drawn.logprobs_tensors[:3]
                told = told or [part.new_zeros(*size, *part.shape[1:]) for part in parts]
                for whole, part in zip(told, parts, strict=True):
                    whole[places, ahead] = part
            going = [
                each
                for each, token in zip(going, drawn.sampled_token_ids[:, 0].tolist(), strict=True)
                if ahead < counts[each] and drafts[firsts[each] + ahead] == token
            ]
            if not going:
                break
        return _output(tokens, told)


def _of(how: Any, going: Sequence[int], places: torch.Tensor) -> Any:
    """The `SamplingMetadata` of some of its requests. EARL asks for no penalties, so that what has
    been sampled does not matter."""
    cut = {
        name: None if (given := getattr(how, name)) is None else given[places]
        for name in ("temperature", "top_p", "top_k")
    }
    generators = {n: how.generators[each] for n, each in enumerate(going) if each in how.generators}
    return replace(how, generators=generators, **cut)


def _output(tokens: torch.Tensor, told: Sequence[torch.Tensor] | None) -> Any:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    flat = None if told is None else LogprobsTensors(*(each.flatten(0, 1) for each in told))
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=flat)
