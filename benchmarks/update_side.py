"""One side of `benchmarks.update` in a process of its own.

`python -m benchmarks.update_side SETTINGS.json` warms up with one update, measures others, and
writes {"warm": ..., "updates": [...], "norm": ...} as JSON to the file that the settings name: the
seconds and the peak memory of each update, the tokens it computed, and the gradient norm of the
warm-up, which must be equal on sides that do the same work.

Plain torch loops are what an engineer would write by hand for one update, and nothing else.
`SamePacking` trains on the packs that EARL makes, shared beginnings computed once, with EARL's
attention function; the packs are made before the clock starts. `PositionIds` packs whole samples
and lets transformers keep them apart by their `position_ids`, as the common recipe does; nothing
is shared. `Single` gives transformers one sample at a time. All take logits at trained positions
only, and the same clipped loss, clipping of the gradient norm and fused AdamW as EARL. No metrics,
no checks, no progress.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM

from benchmarks.update_episodes import RecordedEpisode, kept_episodes, workload
from benchmarks.update_models import routed
from earl_core.config import load_config
from earl_core.learner import memory
from earl_core.learner.attention.varlen import register_attention
from earl_core.learner.data import packing
from earl_core.learner.data.packing import TrainingSample, pack, plan_microbatches, plan_shared
from earl_core.learner.data.prefix_tree import separate
from earl_core.learner.data.zero_advantage import Skipped, leave_out
from earl_core.learner.model import PackedTensors
from earl_core.pretrained.routers import routers_of

_CLIP = 0.2


def training_samples(episodes: Sequence[RecordedEpisode]) -> list[TrainingSample]:
    """One sample for each recorded episode."""
    return [
        TrainingSample(
            tokens=episode.tokens,
            loss_mask=episode.loss_mask,
            rollout_logprobs=episode.rollout_logprobs,
            advantages=episode.advantages,
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            sample_id=number,
        )
        for number, episode in enumerate(episodes)
    ]


@dataclass(frozen=True)
class Pack:
    """A microbatch: forward's keyword arguments, and [T'] int64, int64 and float32 of what is
    trained in it. computed: tokens that go through the model."""

    inputs: dict[str, Any]
    predictors: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    computed: int


class PlainLoop:
    """A model, its optimizer and `update`; `settings` as `benchmarks.update` writes them."""

    attention = "sdpa"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._settings = settings
        model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32, attn_implementation=self.attention
        )
        model.config.use_cache = False
        model.train()
        if settings["activation_checkpointing"]:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.model = model.to(self.device)
        if settings.get("compile"):
            for layer in self.model.model.layers:
                # Attention works on lists whose lengths change with every pack: left as it is.
                layer.mlp.compile(dynamic=True)
                layer.input_layernorm.compile(dynamic=True)
                layer.post_attention_layernorm.compile(dynamic=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings["learning_rate"],
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["epsilon"],
            weight_decay=settings["weight_decay"],
            fused=True,
        )

    def packs(self, episodes: Sequence[RecordedEpisode]) -> list[Pack]:
        """The microbatches of one update, on the device."""
        raise NotImplementedError

    def update(self, packs: Sequence[Pack]) -> float:
        """One optimizer step over all packs; returns the gradient norm before clipping."""
        bf16 = self._settings["precision"] == "bf16"
        total = sum(pack.targets.numel() for pack in packs)
        decoder, head = self.model.model, self.model.lm_head
        for microbatch in packs:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                hidden = decoder(**microbatch.inputs, use_cache=False)[0][0]
                logits = head(hidden.index_select(0, microbatch.predictors))
            logprobs = -F.cross_entropy(logits.float(), microbatch.targets, reduction="none")
            ratio = (logprobs - logprobs.detach()).exp()
            gains = ratio * microbatch.advantages
            clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP) * microbatch.advantages
            (-torch.minimum(gains, clipped).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._settings["max_grad_norm"]
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class SamePacking(PlainLoop):
    """EARL's packs and attention function."""

    attention = register_attention()

    def packs(self, episodes: Sequence[RecordedEpisode]) -> list[Pack]:
        """Pack episodes as `PolicyLearner` does, with shared prefixes, within the token budget."""
        samples = training_samples(episodes)
        made = []
        budget = self._settings["max_tokens_per_microbatch"]
        for rows in plan_shared([sample.tokens for sample in samples], budget):
            packed = pack(samples, rows)
            tensors = PackedTensors.from_microbatch(packed, self.device)
            inputs = {
                "input_ids": tensors.tokens[None],
                "position_ids": tensors.position_ids[None],
                "sample_boundaries": tensors.boundaries,
            }
            advantages = torch.from_numpy(packed.columns["advantages"]).to(self.device)
            made.append(
                Pack(inputs, tensors.predictors, tensors.targets, advantages, len(packed.tokens))
            )
        return made


class PositionIds(PlainLoop):
    """Whole samples end to end, kept apart by their position ids; transformers' sdpa attention."""

    def packs(self, episodes: Sequence[RecordedEpisode]) -> list[Pack]:
        """Pack whole episodes one after the other within the token budget."""
        budget = self._settings["max_tokens_per_microbatch"]
        plan = plan_microbatches([len(episode) for episode in episodes], budget)
        return [self._pack([episodes[row] for row in rows]) for rows in plan]

    def _pack(self, rows: Sequence[RecordedEpisode]) -> Pack:
        tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        positions = np.concatenate([np.arange(len(row)) for row in rows])
        at = np.flatnonzero(np.concatenate([row.loss_mask for row in rows]))
        advantages = np.concatenate([row.advantages for row in rows])[at]
        tensors = [torch.from_numpy(x) for x in (tokens, positions, at - 1, tokens[at], advantages)]
        ids, places, predictors, targets, weights = (tensor.to(self.device) for tensor in tensors)
        inputs = {"input_ids": ids[None], "position_ids": places[None]}
        return Pack(inputs, predictors, targets, weights, len(tokens))


class Single(PositionIds):
    """Each sample by itself, which keeps samples apart in every model."""

    def packs(self, episodes: Sequence[RecordedEpisode]) -> list[Pack]:
        """Make a microbatch of each episode."""
        return [self._pack([episode]) for episode in episodes]


LOOPS: dict[str, type[PlainLoop]] = {
    each.__name__: each for each in (SamePacking, PositionIds, Single)
}


class Side(Protocol):
    """A program whose update is measured."""

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """Do whatever is not part of the update."""

    def update(self) -> dict[str, float]:
        """One update of what was prepared: `norm` of its gradient, `computed` tokens."""


class Earl:
    """`PolicyLearner.update` as the worker calls it: planning, packing, training, metrics."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from earl_core.learner.policy_learner import PolicyLearner

        config = load_config(settings["config"], settings["overrides"])
        self._learner = PolicyLearner(
            config.model,
            config.update,
            config.algorithm,
            temperature=config.rollout.temperature,
            iterations=config.iterations,
            seed=config.seed,
        )
        self._samples = training_samples([])
        self._skips, self._seed = settings.get("skips", False), config.seed
        self._is_mixture = routers_of(self._learner.model) is not None
        if settings.get("apart"):
            # Nothing in a configuration says so: it would only be slower.
            packing.LEAST_SHARED = sys.maxsize
            packing.build_tree = lambda samples: separate([len(each) for each in samples])
        self._iteration = 0

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """Make the training samples of the episodes."""
        self._samples = training_samples(episodes)
        if self._is_mixture:
            self._samples = routed(self._samples, self._learner)

    def update(self) -> dict[str, float]:
        """Update the learner, and measure as `Side` wants."""
        samples, skipped = self._samples, Skipped()
        if self._skips:
            whole, seed = self._learner.whole_episodes, self._seed
            samples, skipped = leave_out(
                samples, whole_episodes=whole, seed=seed, iteration=self._iteration
            )
        found = self._learner.update(samples, iteration=self._iteration, skipped=skipped)
        self._iteration += 1
        shared = found["shared_prefix_share"]
        return {
            "norm": found["grad_norm"],
            "computed": sum(len(sample.tokens) for sample in samples) * (1 - shared),
        }


class Plain:
    """One of the plain torch loops; its packs are made in `prepare`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._loop = LOOPS[settings["loop"]](settings)
        self._packs: list[Any] = []

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """Pack the episodes with the loop's own packing."""
        self._packs = self._loop.packs(episodes)

    def update(self) -> dict[str, float]:
        """Update by the plain loop, and measure as `Side` wants."""
        norm = self._loop.update(self._packs)
        return {"norm": norm, "computed": float(sum(pack.computed for pack in self._packs))}


def limit_memory(settings: dict[str, Any]) -> None:
    """More than this is refused: the side fails, and not the machine."""
    if settings["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_bytes"],) * 2)


def measured(side: Side) -> dict[str, float]:
    """One update with its seconds, those of all its threads together, and its peak memory."""
    memory.reset_peak()
    started, worked = time.perf_counter(), time.process_time()
    found = side.update()
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    return {"seconds": seconds, "cpu_seconds": worked, **memory.peak_bytes(), **found}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    limit_memory(settings)
    torch.set_num_threads(settings["threads"])
    side: Side = Earl(settings) if settings["loop"] is None else Plain(settings)
    kept = settings.get("episodes")
    estimator = settings.get("estimator")
    side.prepare(kept_episodes(kept) if kept else workload(None, settings["count"], estimator))
    warm = measured(side)
    if not kept:
        side.prepare(workload(settings["tokens"], settings["count"], estimator))
    updates = [measured(side) for _ in range(settings["updates"])]
    found = {"warm": warm, "updates": updates, "norm": warm["norm"]}
    Path(settings["results"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
