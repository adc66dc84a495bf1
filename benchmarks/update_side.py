"""One side of `benchmarks.update` in a process of its own.

`python -m benchmarks.update_side SETTINGS.json` warms up with one update, measures others, and
writes {"warm": ..., "updates": [...], "norm": ...} as JSON to the file that the settings name: the
seconds and the peak memory of each update, the tokens it computed, and the gradient norm of the
warm-up, which must be equal on sides that do the same work.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.update_episodes import RecordedEpisode, kept_episodes, workload
from benchmarks.update_plain import training_samples
from earl_core.config import load_config
from earl_core.learner import memory


class Side(Protocol):
    """What is measured."""

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """Whatever is not part of the update."""

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
        self._iteration = 0

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """See `Side`."""
        self._samples = training_samples(episodes)

    def update(self) -> dict[str, float]:
        """See `Side`."""
        found = self._learner.update(self._samples, iteration=self._iteration)
        self._iteration += 1
        shared = found["shared_prefix_share"]
        return {
            "norm": found["grad_norm"],
            "computed": sum(len(sample.tokens) for sample in self._samples) * (1 - shared),
        }


class Plain:
    """One of the loops of `benchmarks.update_plain`; its packs are made in `prepare`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from benchmarks import update_plain

        self._loop = getattr(update_plain, settings["loop"])(settings)
        self._packs: list[Any] = []

    def prepare(self, episodes: list[RecordedEpisode]) -> None:
        """See `Side`."""
        self._packs = self._loop.packs(episodes)

    def update(self) -> dict[str, float]:
        """See `Side`."""
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
    side.prepare(kept_episodes(kept) if kept else workload(None, settings["count"]))
    warm = measured(side)
    if not kept:
        side.prepare(workload(settings["tokens"], settings["count"]))
    updates = [measured(side) for _ in range(settings["updates"])]
    found = {"warm": warm, "updates": updates, "norm": warm["norm"]}
    Path(settings["results"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
