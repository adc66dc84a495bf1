"""Four ranks that compare context parallelism with one process, for `test_context_parallel`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from earl_core.learner.attention import context_parallel
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import (
    ContextCut,
    ContextGroup,
    PackExchange,
    gather_trained,
)
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.data.prefix_tree import PrefixTree, TokenRun, build_tree
from earl_core.learner.microbatches import Feed
from earl_core.learner.model import PackedTensors, logprobs_of_trained, prepare_for_packing
from tests.learner.helpers import build_model
from tests.learner.test_prefix_tree import branching

RANKS = 4
TIMEOUT = timedelta(seconds=60)
Differences = dict[str, float]


def separate(*lengths: int) -> PrefixTree:
    starts = np.cumsum([0, *lengths]).tolist()
    runs = tuple(TokenRun(start, n, 0, -1) for start, n in zip(starts, lengths, strict=False))
    return PrefixTree(runs, tuple(range(len(runs))))


def trees() -> dict[str, PrefixTree]:
    def shared(seed: int, count: int, least: int) -> PrefixTree:
        return build_tree([sample.tokens for sample in branching(seed, count)], least)

    return {
        "plain": separate(40, 3, 200, 31, 1, 30, 129, 31, 33),
        "equal": separate(*[64] * 8),
        "long": separate(1501),
        "long_and_short": separate(900, 20, 20, 7),
        "one_token": separate(1),
        "three_tokens": separate(3),
        "two_samples_of_one": separate(1, 1),
        "shared": shared(3, 12, 8),
        "shared_deep": shared(5, 40, 1),
    }


class Mesh:
    """What the feed asks of a mesh."""

    def __init__(self, place: ContextGroup) -> None:
        self.deployment = SimpleNamespace(context_parallel=place.size)
        self.context_rank = place.rank
        self._group = place.group

    def group(self, name: str) -> dist.ProcessGroup | None:
        return self._group if name == "context_parallel" else None


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if expected.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def attention_case(
    tree: PrefixTree, place: ContextGroup, kv_heads: int, window: int | None, checkpointed: bool
) -> float:
    """Output and gradients of this rank's tokens against one process."""
    generator = torch.Generator().manual_seed(1)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, tree.size, 8, generator=generator)

    states = [random(4), random(kv_heads), random(kv_heads)]
    # So that gradients are below 1: they are sums over up to 1501 tokens.
    direction = torch.randn(1, tree.size, 4, 8, generator=generator) / 16

    def attend(
        inputs: list[torch.Tensor], boundaries: SampleBoundaries, towards: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_() for x in inputs]

        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return varlen_attention(
                torch.nn.Module(), q, k, v, None,
                sliding_window=window, sample_boundaries=boundaries,
            )[0]  # fmt: skip

        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
        else:
            output = layer(*leaves)
        (output * towards).sum().backward()
        return output.detach(), [leaf.grad for leaf in leaves]

    output, gradients = attend(states, SampleBoundaries.from_tree(tree), direction)
    exchange = PackExchange(place, ContextCut.even(tree.size, place.size))
    mine = torch.from_numpy(exchange.cut.positions(place.rank))
    ours, our_gradients = attend(
        [x[:, :, mine] for x in states],
        SampleBoundaries.from_tree(tree, exchange=exchange),
        direction[:, mine],
    )
    pairs = zip(our_gradients, gradients, strict=True)
    return max(
        relative(ours, output[:, mine]),
        *(relative(found, expected[:, :, mine]) for found, expected in pairs),
    )


def attention_cases(place: ContextGroup) -> Differences:
    found: Differences = {}
    for name, tree in trees().items():
        # The kernels' paths differ by tree; heads and checkpointing are the same in each.
        variants = [(2, None, False), (2, 9, False), (2, None, True)]
        if name in ("plain", "long_and_short", "shared", "one_token"):
            variants += [(4, None, False), (1, None, False), (1, 9, True)]
        for kv_heads, window, checkpointed in variants:
            key = f"attention {name} {kv_heads=} {window=} {checkpointed=}"
            found[key] = attention_case(tree, place, kv_heads, window, checkpointed)
    return found


def long_sample(tokens: int) -> TrainingSample:
    rng = np.random.default_rng(0)
    mask = (rng.random(tokens) < 0.5).astype(np.uint8)
    mask[0] = 0
    return TrainingSample(
        rng.integers(0, 40, tokens).astype(np.int32), mask, mask.astype(np.float32)
    )


def trained_at_one_place(tokens: int, *, trained: bool = True) -> TrainingSample:
    """Only one rank has a trained token, or none."""
    mask = np.zeros(tokens, dtype=np.uint8)
    mask[-1] = trained
    return TrainingSample(np.arange(tokens, dtype=np.int32) % 40, mask, mask.astype(np.float32))


def packs() -> dict[str, list[TrainingSample]]:
    return {
        "tree": branching(2, 9),
        "long": [long_sample(400)],
        "two_tokens": [trained_at_one_place(2)],
        "one_trained": [trained_at_one_place(70)],
        "none_trained": [trained_at_one_place(70, trained=False)],
    }


def model_case(
    model: PreTrainedModel, samples: list[TrainingSample], place: ContextGroup
) -> Differences:
    """Log-probs, entropies and summed gradients of a whole model against one process."""
    rows = range(len(samples))

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    def loss_of(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1.0, 1.5, logprobs.numel())
        # Not a sum of independent terms: as a loss over whole episodes.
        count = max(1, logprobs.numel())
        return (
            (logprobs * weights).sum() + 0.1 * entropies.sum()
        ) / count + logprobs.sum().square() / count**2

    whole = PackedTensors.from_microbatch(pack(samples, rows))
    logprobs, entropies = logprobs_of_trained(
        model, whole, temperature=0.8, entropy="differentiable"
    )
    assert entropies is not None
    expected = [x.clone() for x in gradients(loss_of(logprobs, entropies))]

    (fed,) = Feed(torch.device("cpu"), Mesh(place)).microbatches(samples, [list(rows)])  # type: ignore[arg-type]
    ours, our_entropies = logprobs_of_trained(
        model, fed.tensors, temperature=0.8, entropy="differentiable"
    )
    assert our_entropies is not None
    ours, our_entropies = (
        gather_trained(ours, fed.context),
        gather_trained(our_entropies, fed.context),
    )
    found = gradients(loss_of(ours, our_entropies))
    for gradient in found:
        dist.all_reduce(gradient, group=place.group)
    with torch.no_grad():
        scored = gather_trained(
            logprobs_of_trained(model, fed.tensors, temperature=0.8)[0], fed.context
        )
    return {
        "logprobs": relative(ours.detach(), logprobs.detach()),
        "entropies": relative(our_entropies.detach(), entropies.detach()),
        "scored": relative(scored, logprobs.detach()),
        "gradients": max(map(relative, found, expected)),
    }


def model_cases(place: ContextGroup) -> Differences:
    found: Differences = {}
    for kind in ("llama", "qwen2", "gpt2", "mistral"):
        model = build_model(kind)
        prepare_for_packing(model)
        for checkpointed in (False, True) if kind == "llama" else (False,):
            if checkpointed:
                model = copy.deepcopy(model)
                model.gradient_checkpointing_enable({"use_reentrant": False})
            for name, samples in packs().items():
                for part, difference in model_case(model, samples, place).items():
                    found[f"{kind} {name} {checkpointed=} {part}"] = difference
    return found


def kept_cases(place: ContextGroup) -> Differences:
    """Layers' gathered keys that are alive between forward and backward pass: none may be."""
    gathered: list[StorageWeakRef] = []
    original = PackExchange.gather

    def recording(exchange: PackExchange, local: torch.Tensor) -> torch.Tensor:
        whole = original(exchange, local)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    context_parallel.PackExchange.gather = recording  # type: ignore[method-assign]
    found: Differences = {}
    samples = [long_sample(1400)]
    model = build_model("llama")
    prepare_for_packing(model)
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        gathered.clear()
        (fed,) = Feed(torch.device("cpu"), Mesh(place)).microbatches(samples, [[0]])  # type: ignore[arg-type]
        logprobs, _ = logprobs_of_trained(model, fed.tensors, temperature=1.0)
        layers = model.config.num_hidden_layers
        assert len(gathered) == layers
        alive = sum(not storage.expired() for storage in gathered)
        found[f"kept gathered keys {checkpointed=}"] = float(alive)
        gather_trained(logprobs, fed.context).sum().backward()
        assert len(gathered) == 2 * layers
        del logprobs
        alive = sum(not storage.expired() for storage in gathered)
        found[f"kept after backward {checkpointed=}"] = float(alive)
    context_parallel.PackExchange.gather = original  # type: ignore[method-assign]
    return found


CASES: tuple[Callable[[ContextGroup], Differences], ...] = (
    attention_cases,
    model_cases,
    kept_cases,
)


def contexts(rank: int) -> Iterator[ContextGroup]:
    pairs = [dist.new_group([first, first + 1], TIMEOUT) for first in range(0, RANKS, 2)]
    yield ContextGroup(rank % 2, 2, pairs[rank // 2])
    yield ContextGroup(rank, RANKS, dist.group.WORLD)


def compare(scratch: Path) -> Differences:
    """Every case with two and with four ranks; {"c=size case": largest difference}."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    found: Differences = {}
    for place in contexts(rank):
        for case in CASES:
            for name, difference in case(place).items():
                found[f"c={place.size} {name}"] = difference
    dist.destroy_process_group()
    return found
