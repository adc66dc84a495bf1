"""Runs EARL and TRL for `benchmarks.iteration`, each as a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earl_core.config import RunConfig
from earl_core.control.hardware import read_hardware
from earl_core.run.record import read_lines
from tools.harness import REPOSITORY, precision_of
from tools.iterations import read_iterations
from tools.process_tree import TIMEOUT_SECONDS, CommandFailed, MeasuredCommand, train


@dataclass(frozen=True)
class Iteration:
    """One iteration. stages: seconds in `rollout`, `update`, `rest`. tokens: of its games.

    update_over_alone: seconds of EARL's update over those of the same samples' in a fresh process.
    """

    number: int
    seconds: float
    stages: dict[str, float]
    tokens: float
    games: float
    mean_return: float
    update_over_alone: float = 0.0


@dataclass(frozen=True)
class Round:
    """One start of one side."""

    iterations: list[Iteration]
    peak_bytes: int


def settings_of(games: int, group_size: int) -> list[str]:
    """Overrides that give both sides the same work: GRPO, no evaluations, no checkpoints."""
    return [
        f"rollout.prompts_per_iteration={games // group_size}",
        f"rollout.group_size={group_size}",
        "algorithm.advantage=grpo",
        "algorithm.policy_loss=ppo_clip",
        "algorithm.aggregation=token_mean",
        "evaluation.every=0",
    ]


def run_earl(file: Path, config: RunConfig, iterations: int, scratch: Path) -> Round:
    """`earl train`; its times are those of the run's own records."""
    scratch.mkdir(parents=True)
    rollout = config.rollout
    overrides = settings_of(rollout.episodes_per_iteration, rollout.group_size)
    # TRL saves nothing: one checkpoint at the end, where it belongs to no measured iteration.
    overrides += [f"checkpoint.every={iterations + 1}", "name=measured", *precision_of(config)]
    # An iteration ends where the next one begins, so the last one is not measured.
    overrides += [f"runs_directory={scratch / 'runs'}", f"iterations={iterations + 1}"]
    peak_bytes = train(file, overrides, scratch)
    run = scratch / "runs" / "measured"
    lines = {line["iteration"]: line for line in read_lines(run / "metrics.jsonl")}
    found = [
        Iteration(
            number=item.number,
            seconds=item.wall,
            stages={
                "rollout": item.stages["rollout"],
                "update": item.stages["update"],
                "rest": item.wall - item.stages["rollout"] - item.stages["update"],
            },
            tokens=item.tokens,
            games=item.games,
            mean_return=lines[item.number]["rollout/return/mean"],
            update_over_alone=lines[item.number]["update/seconds"]
            / _update_alone(file, config, run / f"iterations/{item.number:06d}", scratch),
        )
        for item in read_iterations(run, range(1, iterations))
    ]
    return Round(found, peak_bytes)


def _update_alone(file: Path, config: RunConfig, iteration: Path, scratch: Path) -> float:
    """Seconds of one warm update with an iteration's samples, by a process of nothing else."""
    arguments, results = scratch / "alone.json", scratch / "alone.results"
    threads = config.update.threads or read_hardware().cpu_cores
    settings = {
        "config": str(file),
        "overrides": [f"update.threads={threads}", *precision_of(config)],
        "loop": None,
        "episodes": str(iteration / "episodes.parquet"),
        "updates": 1,
        "threads": threads,
        "memory_bytes": 0,
        "results": str(results),
    }
    arguments.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.update_side", str(arguments)]
    with MeasuredCommand(command, scratch / "alone.log", directory=REPOSITORY) as updated:
        updated.wait(TIMEOUT_SECONDS)
    found = json.loads(results.read_text(encoding="utf-8"))
    return float(found["updates"][0]["seconds"])


def run_trl(
    config: RunConfig,
    candidate: dict[str, int | bool],
    iterations: int,
    scratch: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Round:
    """TRL in its own environment, which is made when it is not there yet."""
    scratch.mkdir(parents=True)
    python = trl_python(bool(candidate["use_vllm"]))
    results, arguments = scratch / "results.jsonl", scratch / "arguments.json"
    settings = {**trl_settings(config, iterations), **candidate, "results": str(results)}
    arguments.write_text(json.dumps(settings), encoding="utf-8")
    with MeasuredCommand(
        [str(python), "-m", "benchmarks.trl_iteration", str(arguments)],
        scratch / "trl.log",
        directory=REPOSITORY,
        environment={
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(settings["threads"]),
            # Only read with vLLM on a CPU: as much cache and as many cores as EARL's engine has.
            "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.vllm.kv_cache_gib or 1),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        },
    ) as trained:
        trained.wait(timeout_seconds)
    found = [
        Iteration(
            number=line["iteration"],
            seconds=line["seconds"],
            stages={
                "rollout": line["rollout_seconds"],
                "update": line["seconds"] - line["rollout_seconds"],
                "rest": 0.0,
            },
            tokens=line["tokens"],
            games=line["games"],
            mean_return=line["return"],
        )
        for line in map(json.loads, results.read_text().splitlines())
    ]
    return Round(found, trained.peak_bytes)


def trl_settings(config: RunConfig, iterations: int) -> dict[str, Any]:
    """Return the settings with which TRL does the same as this configuration."""
    rollout, update, environment = config.rollout, config.update, config.environment
    return {
        **shared_settings(config),
        "environment": environment.name,
        "options": environment.options,
        "prompts": rollout.prompts_per_iteration,
        "group_size": rollout.group_size,
        "max_turns": rollout.max_turns,
        "max_tokens_per_turn": rollout.max_tokens_per_turn,
        "answer_prefix": rollout.answer_prefix,
        "iterations": iterations,
        "precision": update.precision,
        "threads": update.threads or read_hardware().cpu_cores,
    }


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that every side of a comparison has: model, optimizer, sampling, seed."""
    names = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm")
    return {
        "model": config.model.path,
        "temperature": config.rollout.temperature,
        "seed": config.seed,
        **{name: getattr(config.update, name) for name in names},
    }


def trl_python(with_vllm: bool) -> Path:
    """The interpreter with TRL; makes its environment if need be, which takes minutes."""
    script = REPOSITORY / "benchmarks" / "trl_environment.sh"
    try:
        subprocess.run(
            [str(script), *(["vllm"] if with_vllm else [])],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"},
        )
    except subprocess.CalledProcessError as error:
        raise CommandFailed(
            f"the environment for TRL could not be made: {error.stderr[-1000:]}"
        ) from error
    return REPOSITORY / (".venv-trl-vllm" if with_vllm else ".venv-trl") / "bin" / "python"
