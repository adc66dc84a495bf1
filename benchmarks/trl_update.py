"""TRL's side of `benchmarks.update`: GRPOTrainer trains on the recorded episodes.

Run by `.venv-trl/bin/python` with the settings of `benchmarks.update`. The `rollout_func` hands
over the recorded tokens and masks; padding, forward, loss, backward and optimizer are TRL's. The
clock runs from the beginning of a step to its end, less the time in which TRL builds and scores
its batch (which has the recorded episodes' padding in it, but none of its cost).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.trl_iteration import tokenizer_of, trainer_of
from benchmarks.update_episodes import RecordedEpisode, workload
from benchmarks.update_side import limit_memory
from earl_core.learner import memory


class Meter(TrainerCallback):
    """Seconds and peak memory of each step, without the making of its batch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.outside = self.outside_cpu = 0.0
        self.computed = 0.0
        self._started = self._worked = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory.reset_peak()
        self.outside = self.outside_cpu = 0.0
        self._started, self._worked = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started - self.outside
        worked = time.process_time() - self._worked - self.outside_cpu
        found = {"seconds": seconds, "cpu_seconds": worked, "computed": self.computed}
        self.steps.append({**found, **memory.peak_bytes()})


class Recorded:
    """The `rollout_func`: the warm-up's episodes in the first step, then always the measured."""

    def __init__(self, settings: dict[str, Any]) -> None:
        count = settings["count"]
        self._steps = [workload(None, count), workload(settings["tokens"], count)]
        self._step = 0

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        episodes: list[RecordedEpisode] = self._steps[min(self._step, 1)]
        if len(prompts) != len(episodes):
            raise RuntimeError(f"TRL asked for {len(prompts)} episodes, not {len(episodes)}")
        self._step += 1
        cuts = [episode.prompt_length for episode in episodes]
        pairs = list(zip(episodes, cuts, strict=True))
        return {
            "prompt_ids": [episode.tokens[:cut].tolist() for episode, cut in pairs],
            "completion_ids": [episode.tokens[cut:].tolist() for episode, cut in pairs],
            "env_mask": [episode.loss_mask[cut:].tolist() for episode, cut in pairs],
            "logprobs": None,
            "game_reward": [episode.reward for episode in episodes],
        }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    limit_memory(settings)
    torch.set_num_threads(settings["threads"])
    steps, groups = 1 + settings["updates"], settings["count"] // settings["group_size"]
    arguments = {
        **settings,
        "prompts": groups,
        "iterations": steps,
        "gradient_checkpointing": settings["activation_checkpointing"],
        "use_vllm": False,
    }
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="trl-update-") as output:
        tokenizer, recorded = tokenizer_of(settings), Recorded(settings)
        trainer = trainer_of(arguments, Path(output), tokenizer, recorded, meter)
        make_batch = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            started, worked = time.perf_counter(), time.process_time()
            made = make_batch(inputs)
            ids = [made[name] for name in ("prompt_ids", "completion_ids")]
            meter.computed = float(sum(tensor.numel() for tensor in ids))
            meter.outside += time.perf_counter() - started
            meter.outside_cpu += time.process_time() - worked
            return made

        trainer._generate_and_score_completions = timed
        trainer.train()
    warm, *updates = meter.steps
    found = {"warm": warm, "updates": updates, "norm": None}
    Path(settings["results"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
