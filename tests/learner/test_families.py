"""Model families beside Llama's: log-probs equal plain transformers, or a refusal that says why."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from earl_core.config import ConfigError
from earl_core.config.model import ModelConfig
from earl_core.learner.attention import varlen_dense
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.attention.varlen_dense import attend_bucket
from earl_core.learner.data.packing import pack
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.tensors.plain_attention import ScoreChange
from tests.learner.helpers import eager_model, plain_logprobs, random_samples, save_model
from tests.learner.test_policy_learner import TEMPERATURE, make_learner
from tests.learner.test_prefix_tree import branching

_SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GEMMA = {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 32}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_GRANITE = {
    "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}  # fmt: skip
_AFMOE = {
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_LINEAR = {
    "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_KIMI = {
    **_LINEAR, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "num_experts": 4,
    "num_experts_per_token": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_QWEN4 = {
    **_LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip
_MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_chunk_size": 8, "head_dim": 16,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 1,
}  # fmt: skip


_SPARSE = {
    **_DEEPSEEK, "q_lora_rank": 32, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
}  # fmt: skip
_BLOCKS = {
    **_EXPERTS, "head_dim": 32, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 4,
    "index_topk_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"],
    "dense_intermediate_size": 96, "shared_intermediate_size": 32,
}  # fmt: skip


def build(family: str, model: str = "", **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **more})
    made: transformers.PreTrainedModel = getattr(transformers, model or f"{family}ForCausalLM")(
        config
    )
    return made


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen3", {"head_dim": 32}),
        ("Phi3", {"sliding_window": 9}),
        ("Gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
        # Logits with a soft cap, small enough to bend them, and scaled logits.
        ("Gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}),
        # Small enough to bend its attention's scores, too; windows, and samples of several blocks.
        ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
        ("GptOss", {**_EXPERTS, **_WINDOWS, "head_dim": 16}),
        ("NanoChat", {"final_logit_softcapping": 5.0}),
        ("Cohere2", {**_WINDOWS, "logit_scale": 0.3}),
        ("Granite", _GRANITE),
        ("GraniteMoe", {**_GRANITE, **_EXPERTS}),
        ("HyperCLOVAX", {"logits_scaling": 0.3}),
        # Noise in training mode: in the router, in the number of layers.
        ("Phimoe", {**_EXPERTS, "sliding_window": None, "router_jitter_noise": 0.1}),
        ("Mixtral", {**_EXPERTS, "router_jitter_noise": 0.1}),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "layerdrop": 0.5}),
        # Keys and values of different widths.
        ("DeepseekV3", _DEEPSEEK),
        # Wants contiguous memory of its attention.
        ("Afmoe", _AFMOE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_family_equals_plain_transformers(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    directory = save_model(build(family, **more), tmp_path)
    samples = random_samples(6, seed=5, longest=60)
    learner = make_learner(directory, max_tokens_per_microbatch=128)
    scored = learner.score(samples)
    plain = eager_model(directory)
    for sample, found in zip(samples, scored, strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        np.testing.assert_allclose(found[sample.loss_mask == 1], expected.detach(), atol=3e-5)
    again = learner.score(samples)
    assert all(np.array_equal(a, b) for a, b in zip(scored, again, strict=True))
    packed, wanted = packed_gradients(directory), plain_gradients(directory)
    assert packed.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        # That of a key's bias is a rounding error: it moves all scores of a query alike.
        norm = max(float(gradient.norm()), 1e-2 * largest)
        assert gradient.any(), name
        assert float((packed[name] - gradient).norm()) < 5e-6 * norm, name


def packed_gradients(directory: Path) -> dict[str, torch.Tensor]:
    """Of a sum of log-probs, of samples that share prefixes, in one pack."""
    model = load_policy(ModelConfig(path=str(directory)), create_mesh()).model
    samples = branching(5, 8)
    packed = PackedTensors.from_microbatch(pack(samples, range(len(samples))))
    assert len(packed.tokens) < sum(len(sample.tokens) for sample in samples)
    logprobs, _ = logprobs_of_trained(model, packed, temperature=TEMPERATURE)
    return _gradients(model, logprobs)


def plain_gradients(directory: Path) -> dict[str, torch.Tensor]:
    """The same, sample by sample, in plain transformers."""
    model = eager_model(directory)
    each = [plain_logprobs(model, sample, TEMPERATURE)[0] for sample in branching(5, 8)]
    return _gradients(model, torch.cat(each))


def _gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    towards = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    torch.autograd.backward((logprobs * towards).sum())
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "model", "more", "why"),
    [
        ("Falcon", "", {"new_decoder_architecture": True, "alibi": False}, "attention interface"),
        ("Phimoe", "", {**_EXPERTS, "sliding_window": 9}, "sliding window of 9 tokens"),
        (
            "Lfm2", "", {"layer_types": ["conv", "full_attention"]},
            "layers of type conv do more than attend",
        ),
        (
            "KimiLinear", "", _KIMI, "layers of type linear_attention do more than attend",
        ),
        ("Qwen4ExpText", "Qwen4ExpForCausalLM", _QWEN4, "the 8 tokens that an indexer chooses"),
        ("FalconH1", "", _MAMBA, "do more than attend"),
        ("StableLm", "", {}, "do not hand keyword arguments on to their attention"),
        ("Nemotron", "", {}, "do not hand keyword arguments on to their attention"),
        ("Bloom", "", {"n_layer": 2, "n_head": 4}, "does not call its attention through"),
        ("DeepseekV32", "", _SPARSE, "attends to the 4 tokens that an indexer chooses"),
        ("GlmMoeDsa", "", _SPARSE, "attends to the 4 tokens that an indexer chooses"),
        ("AXK2", "", _SPARSE, "attends to the 4 tokens that an indexer chooses"),
        ("HYV4", "", _SPARSE, "attends to the 4 tokens that an indexer chooses"),
        ("MiniMaxM3VLText", "MiniMaxM3VLForCausalLM", _BLOCKS, "blocks of tokens that an indexer"),
        (
            "Llama4Text", "Llama4ForCausalLM",
            {"attention_chunk_size": 9, "num_local_experts": 2, "head_dim": 16,
             "intermediate_size_mlp": 96, "layer_types": ["chunked_attention", "full_attention"]},
            "attends within chunks",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)  # fmt: skip
def test_what_packing_would_get_wrong_is_refused(
    family: str, model: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    directory = save_model(build(family, model, **more), tmp_path)
    with pytest.raises(ConfigError, match=why):
        make_learner(directory)


@pytest.mark.parametrize(
    ("family", "model", "more", "why"),
    [
        ("Bloom", "", {"n_layer": 2, "n_head": 4}, "cannot run bloom models"),
        (
            "Phimoe", "", {**_EXPERTS, "sliding_window": 9},
            r"sliding window of 9 tokens.*set rollout\.max_model_len to 9",
        ),
    ],
    ids=["Bloom", "Phimoe"],
)  # fmt: skip
def test_the_torch_engine_advises_no_engine_for_what_training_refuses(
    family: str, model: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    directory = save_model(build(family, model, **more), tmp_path)
    engine = TorchEngine(directory)
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
