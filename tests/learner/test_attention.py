"""Variable-length attention: equal to unpacked samples, without a T x T tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.lm_head import decoder_of
from earl_core.learner.model import prepare_for_packing
from earl_core.system.errors import ConfigError
from tests.learner.helpers import build_model, eager_model, save_model


def _packed_hidden(model: torch.nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return decoder_of(model)(
        input_ids=torch.cat(rows)[None],
        position_ids=positions[None],
        use_cache=False,
        sample_boundaries=SampleBoundaries.from_lengths(lengths),
    )[0][0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [40, 3, 200, 31, 1, 30, 129], [300, 290, 2]])
def test_packed_equals_unpacked_with_gradients(
    kind: str, lengths: list[int], tmp_path: Path
) -> None:
    plain = eager_model(save_model(kind, tmp_path))
    packed = type(plain).from_pretrained(tmp_path)
    prepare_for_packing(packed)
    torch.manual_seed(1)
    rows = [torch.randint(0, 40, (length,)) for length in lengths]
    direction = torch.randn(sum(lengths), 32)
    hidden = _packed_hidden(packed, rows)
    expected = torch.cat([decoder_of(plain)(input_ids=row[None])[0][0] for row in rows])
    assert torch.allclose(hidden, expected, atol=1e-5, rtol=1e-5)
    (hidden * direction).sum().backward()
    (expected * direction).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max()) + 1e-6
            assert torch.allclose(ours.grad, theirs.grad, atol=2e-5 * scale, rtol=1e-4), name


@given(st.lists(st.integers(1, 700) | st.integers(1, 9), min_size=1, max_size=30))
@example([5, 5, 4])
@settings(max_examples=100)
def test_buckets_cover_every_token_once(lengths: list[int]) -> None:
    boundaries = SampleBoundaries.from_lengths(lengths)
    total = sum(lengths)
    places = []
    for bucket in boundaries.buckets:
        rows = bucket.queries
        assert rows.count % bucket.count == 0
        places.append(rows.of(torch.arange(total)))
    flat = torch.cat(places)
    assert flat.numel() == boundaries.padded_tokens <= total * 4 / 3 + 1
    chosen = flat if boundaries.scatter is None else flat[boundaries.scatter]
    assert torch.equal(chosen, torch.arange(total))
    assert boundaries.cu_seqlens[-1] == total
    assert boundaries.longest == max(lengths)


def test_bf16_stays_close_to_float32(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model = type(build_model("llama")).from_pretrained(tmp_path)
    prepare_for_packing(model)
    rows = [torch.randint(0, 40, (length,)) for length in (20, 19, 160)]
    exact = _packed_hidden(model, rows)
    rough = _packed_hidden(model.bfloat16(), rows)
    assert (exact - rough).abs().mean().item() < 0.02


def test_a_direct_call_is_refused() -> None:
    model = build_model("llama")
    prepare_for_packing(model)
    with pytest.raises(ConfigError, match="sample_boundaries"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_recurrent_model_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ConfigError, match=r"packed samples|keyword"):
        prepare_for_packing(model)


class _Capped(LlamaForCausalLM):
    """Logits with a cap that its configuration does not name, far above what they are."""

    def forward(self, *given: Any, **named: Any) -> Any:
        found = super().forward(*given, **named)
        found.logits = torch.tanh(found.logits / 50.0) * 50.0
        return found


def test_logits_changed_in_an_unknown_way_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    prepare_for_packing(LlamaForCausalLM(config))
    capped = _Capped(config)
    assert capped.lm_head.weight.abs().max() < 0.2
    with pytest.raises(ConfigError, match="after the output layer in a way that is not known"):
        prepare_for_packing(capped)


_MEMORY = """
import resource, sys, torch
from earl_core.learner.model import prepare_for_packing
from tests.learner.helpers import build_model
from tests.learner.test_attention import _packed_hidden
model = build_model("llama")
prepare_for_packing(model)
def run(lengths):
    hidden = _packed_hidden(model, [torch.randint(0, 40, (n,)) for n in lengths])
    hidden.square().sum().backward()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
run([64])
before = peak()
run(eval(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.parametrize(
    "lengths",
    [
        "[3000, 2000, 700] + [512] * 4 + [70] * 20 + [100 + n % 29 for n in range(63)]",
        pytest.param("[16384]", marks=pytest.mark.campaign),
    ],
)
def test_a_16k_pack_needs_no_square_mask(lengths: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, lengths],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    # One float32 16K x 16K tensor is 1024 MiB, as bools 256 MiB.
    assert int(result.stdout) < 240
