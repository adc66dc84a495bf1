"""Model families beside Llama's: log-probs equal plain transformers, or a refusal that says why."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from earl_core.config import ConfigError
from earl_core.learner.attention import varlen_dense
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.attention.varlen_dense import attend_bucket
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.tensors.plain_attention import ScoreChange
from tests.families.cells import YES, packing, save
from tests.learner.test_policy_learner import make_learner


@pytest.mark.parametrize(
    "family",
    [
        *("Qwen3", "Phi3", "Gemma2Plain", "Gemma2Logits", "Gemma2", "GptOss", "NanoChat"),
        *("Cohere2", "Granite", "GraniteMoe", "HyperCLOVAX", "Phimoe", "Mixtral", "OPT"),
        # Keys and values of different widths; one that wants contiguous memory of its attention.
        *("DeepseekV3", "Afmoe"),
    ],
)
def test_a_family_equals_plain_transformers(family: str, tmp_path: Path) -> None:
    """The others are in the campaign (`tests/families`)."""
    assert packing(save(family, tmp_path)) == YES


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("Falcon", "attention interface"),
        ("PhimoeWindow", "sliding window of 9 tokens"),
        ("Lfm2", "layers of type conv do more than attend"),
        ("KimiLinear", "layers of type linear_attention do more than attend"),
        ("Qwen4Exp", "the 8 tokens that an indexer chooses"),
        ("FalconH1", "do more than attend"),
        ("Mistral4", "no causal language model of type mistral4"),
        ("StableLm", "do not hand keyword arguments on to their attention"),
        ("Nemotron", "do not hand keyword arguments on to their attention"),
        ("Bloom", "does not call its attention through"),
        ("DeepseekV32", "attends to the 4 tokens that an indexer chooses"),
        ("GlmMoeDsa", "attends to the 4 tokens that an indexer chooses"),
        ("AXK2", "attends to the 4 tokens that an indexer chooses"),
        ("HYV4", "attends to the 4 tokens that an indexer chooses"),
        ("MiniMaxM3VL", "blocks of tokens that an indexer"),
        ("Llama4", "attends within chunks"),
    ],
)
def test_what_packing_would_get_wrong_is_refused(family: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        make_learner(save(family, tmp_path))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("Bloom", "cannot run bloom models"),
        ("PhimoeWindow", r"sliding window of 9 tokens.*set rollout\.max_model_len to 9"),
    ],
)
def test_the_torch_engine_advises_no_engine_for_what_training_refuses(
    family: str, why: str, tmp_path: Path
) -> None:
    engine = TorchEngine(save(family, tmp_path))
    with pytest.raises(ConfigError, match=why):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"indices": 1}, "tokens that an indexer chooses"),
        ({"block_indices": 1}, "blocks of tokens that an indexer"),
        ({"alibi_slopes": 1}, "not known here.*alibi_slopes"),
        ({"cu_seq_lens_q": 1}, "not known here.*cu_seq_lens_q"),
        ({"past_key_values": 1}, "not known here.*past_key_values"),
        ({"is_causal": False}, "is not causal"),
        ({"indices": None, "use_cache": False, "position_ids": 1, "is_causal": True}, ""),
    ],
)
def test_an_attention_takes_no_setting_that_it_does_not_know(asked: Any, why: str) -> None:
    states = torch.randn(1, 1, 3, 8)
    boundaries = SampleBoundaries.from_lengths((3,), torch.device("cpu"))
    call = partial(
        varlen_attention, torch.nn.Module(), states, states, states, None,
        sample_boundaries=boundaries,
    )  # fmt: skip
    if not why:
        torch.testing.assert_close(call(**asked)[0], call()[0])
        return
    with pytest.raises(ConfigError, match=why):
        call(**asked)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("prefix", [0, 120])
def test_changed_scores_in_blocks_equal_all_of_them_at_once(
    prefix: int, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, by the fused kernel and, with soft caps, in products; gradients, in float64."""
    monkeypatch.setattr(varlen_dense, "_QUERY_BLOCK", 64)
    random = torch.Generator().manual_seed(0)
    count, heads, rows, columns = 2, 4, 150, 150 + prefix
    shapes = [(count, heads, rows, 16), *2 * [(count, 2, columns, 16)], (heads,)]
    tensors = [torch.randn(*shape, generator=random) * 2 for shape in shapes]
    towards = torch.randn(count, heads, rows, 16, generator=random).double()
    distance = torch.arange(rows)[:, None] + prefix - torch.arange(columns)
    hidden = (distance < 0) | (distance >= (window or columns))
    results = []
    for exactly in (True, False):
        q, k, v, sinks = (each.to(torch.float64 if exactly else torch.float32) for each in tensors)
        for each in (q, k, v, sinks):
            each.requires_grad_()
        if exactly:
            scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25
            scores = scores if cap is None else torch.tanh(scores / cap) * cap
            scores = scores.masked_fill(hidden, float("-inf"))
            extra = sinks.view(1, heads, 1, 1).expand(count, heads, rows, 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
            found = weights @ v.repeat_interleave(2, 1)
        else:
            # Blocks of 25 queries at most.
            monkeypatch.setattr(varlen_dense, "_SCORES_HELD", count * heads * columns * 25)
            found = attend_bucket(q, k, v, 0.25, window, ScoreChange(cap, sinks))
        torch.autograd.backward((found * towards).sum())
        results.append([found.detach(), q.grad, k.grad, v.grad, sinks.grad])
    for expected, result in zip(*results, strict=True):
        assert expected is not None
        assert result is not None
        assert float((result - expected).norm() / expected.norm()) < 2e-6


class _Largest(TorchDispatchMode):
    """The most numbers that any result of any operation has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in results if isinstance(each, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


@pytest.mark.parametrize("value_width", [24, 48])
def test_heads_of_two_widths_make_no_square_of_the_length(value_width: int) -> None:
    """Latent attention (MLA) has them; the fused CPU kernel wants one."""
    torch.manual_seed(0)
    tokens, heads = 1500, 2
    query, key = (torch.randn(1, heads, tokens, 32, requires_grad=True) for _ in range(2))
    value = torch.randn(1, heads, tokens, value_width, requires_grad=True)
    with _Largest() as largest:
        found = attend_bucket(query, key, value, 32**-0.5, None)
        found.square().sum().backward()  # type: ignore[no-untyped-call]
    assert largest.numbers < tokens * tokens / 2
    scores = (query @ key.transpose(2, 3) * 32**-0.5).detach()
    scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(found, scores.softmax(-1) @ value, atol=2e-5, rtol=1e-4)
