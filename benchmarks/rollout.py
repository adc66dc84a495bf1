"""The agent loop beside raw vLLM (the limit), with an adapter, and beside plain transformers.

Each repetition: EARL plays the games on vLLM and records every request; raw vLLM then replays just
these requests, an episode's next one when its previous one is answered, in both of its process
arrangements; EARL plays the games with the same policy as an adapter's version 0, whose B is 0,
and on its torch engine. Repetitions are interleaved, so that a
machine that becomes slower slows all sides. Ratios are taken within a repetition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from tools.harness import (
    REPOSITORY,
    Report,
    build_model,
    config_here,
    interval,
    median,
    parser,
    precision_of,
    publish,
)
from tools.process_tree import CommandFailed

OURS, ADAPTER, TORCH = "earl-vllm", "earl-vllm-adapter", "earl-torch"
RAW = ("raw-separate", "raw-in-process")
SIDES = {
    OURS: "EARL's agent loop on vLLM",
    RAW[0]: "raw vLLM, same requests, engine in a process of its own",
    RAW[1]: "raw vLLM, same requests, engine in the caller's process",
    ADAPTER: "EARL's agent loop on vLLM, pairs of rank 16 beside all layers' matrices",
    TORCH: "EARL's agent loop on the torch engine",
}
# vLLM's processes wait for work in a busy loop for about a second before they sleep.
_SETTLE_SECONDS = 2.0
_STOP_SECONDS = 60.0


@dataclass
class Recording:
    """episodes: per episode, in the order of their first request, its turns as (prompt token ids,
    number of sampled tokens). A turn may start only when the one before it is answered."""

    episodes: list[list[tuple[list[int], int]]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Turns of all episodes."""
        return sum(len(turns) for turns in self.episodes)

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(count for turns in self.episodes for _, count in turns)

    @property
    def context_tokens(self) -> int:
        """Tokens of all episodes, each counted once: what an engine with a perfect cache of
        prefixes within an episode has to process."""
        total = 0
        for turns in self.episodes:
            before: list[int] = []
            standing = 0
            for prompt, count in turns:
                extends = prompt[: len(before)] == before
                total += len(prompt) + count - (standing if extends else 0)
                before, standing = prompt, len(prompt) + count
        return total

    def as_json(self) -> list[Any]:
        """Nested lists."""
        return [[[prompt, count] for prompt, count in turns] for turns in self.episodes]

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> Recording:
        """The inverse of `as_json`."""
        return cls([[(list(prompt), int(count)) for prompt, count in turns] for turns in raw])


class Recorder:
    """An `Engine` that keeps what passes through it and leaves the rest to the engine behind."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns: dict[int, list[tuple[list[int], int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def recording(self) -> Recording:
        """Turns that were recorded so far."""
        return Recording(list(self._turns.values()))

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """`Engine.generate`, recorded."""
        completions = await self._engine.generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            turns = self._turns.setdefault(request.sequence_id, [])
            turns.append((list(request.tokens), len(completion.tokens)))
        return completions


class Child:
    """One side in a process of its own. Use it as a context manager."""

    def __init__(self, name: str, config: Path, overrides: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        self._stream = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rollout_side", name, str(config), *overrides],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            text=True,
        )

    def ready(self) -> None:
        """Wait until it is started. Raises `CommandFailed`."""
        self._answer()

    def measure(self, **command: Any) -> dict[str, Any]:
        """One measurement. Raises `CommandFailed`."""
        time.sleep(_SETTLE_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *unused: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it is dead already
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            tail = "\n".join(text.splitlines()[-25:])
            raise CommandFailed(f"the side {self.name} ended unexpectedly:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(
    children: dict[str, Child], games: int, torch_games: int, repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """Every side's measurements: seconds and context tokens. The first round is thrown away."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for repetition in range(repetitions + 1):
        played = children[OURS].measure(games=games, repetition=repetition)
        recording = Recording.from_json(played["recording"])
        round_: dict[str, dict[str, Any]] = {OURS: _result(played, recording)}
        # Every other round turns the order round, so that none is always the last.
        for name in RAW if repetition % 2 else RAW[::-1]:
            answer = children[name].measure(recording=played["recording"])
            round_[name] = _result(answer, recording)
        for name, count in ((ADAPTER, games), (TORCH, torch_games)):
            if name in children:
                answer = children[name].measure(games=count, repetition=repetition)
                round_[name] = _result(answer, Recording.from_json(answer["recording"]))
        if repetition:
            for name, result in round_.items():
                found[name].append(result)
    return found


def _result(answer: dict[str, Any], recording: Recording) -> dict[str, Any]:
    seconds, tokens = answer["seconds"], recording.context_tokens
    return {
        "seconds": seconds,
        "tokens": tokens,
        "generated": recording.generated_tokens,
        "requests": recording.requests,
        "rate": tokens / seconds,
    }


def fill(report: Report, found: dict[str, list[dict[str, Any]]], dtype: str) -> None:
    """A row for each side; the headline against the faster arrangement of raw vLLM."""
    limit = min(RAW, key=lambda name: median([result["seconds"] for result in found[name]]))
    for name, results in found.items():
        ratios = [
            ours["rate"] / theirs["rate"]
            for ours, theirs in zip(results, found[limit], strict=True)
        ]
        report.rows.append(
            {
                "side": SIDES[name] + (" (the limit)" if name == limit else ""),
                "dtype": dtype,
                "seconds": median([result["seconds"] for result in results]),
                "requests": median([result["requests"] for result in results]),
                "tokens/s": median([result["rate"] for result in results]),
                "sampled tokens/s": median([r["generated"] / r["seconds"] for r in results]),
                "share of the limit": median(ratios),
                "range": interval(ratios),
            }
        )
        if name == OURS:
            report.headline["rollout_share_of_vllm"] = median(ratios)
    if ADAPTER in found:
        share = [a["rate"] / b["rate"] for a, b in zip(found[ADAPTER], found[OURS], strict=True)]
        report.headline["adapter_rollout_share"] = median(share)
    if TORCH in found:
        over = [a["rate"] / b["rate"] for a, b in zip(found[OURS], found[TORCH], strict=True)]
        report.headline["rollout_speedup_vs_torch_engine"] = median(over)
    report.notes += [
        "tokens/s: tokens of all episodes, prompts, observations and answers, each counted once, "
        "per second.",
        f"{len(found[OURS])} interleaved repetitions after one to warm up; medians; shares are "
        "taken within a repetition.",
        "EARL's time includes the games, chat encoding and recording; the replay has none of "
        "them. Raw vLLM runs with its own defaults and without per-request seeds.",
    ]


def main() -> None:
    options = _options()
    report = Report("rollout", "Agent loop against raw vLLM and the torch engine")
    config = config_here(options.config, options.set)
    build_model(config)
    names = [OURS, *RAW]
    names += [] if options.no_adapter else [ADAPTER]
    names += [] if options.no_torch else [TORCH]
    with tempfile.TemporaryDirectory(prefix="earl-rollout-") as scratch, ExitStack() as stack:
        children = {}
        for name in names:  # one after another: starting is the heaviest part
            log = Path(scratch) / f"{name}.log"
            settings = [*options.set, *precision_of(config)]
            child = stack.enter_context(Child(name, options.config, settings, log))
            child.ready()
            children[name] = child
        found = measure(children, options.games, options.torch_games, options.repetitions)
    fill(report, found, config.rollout.dtype)
    report.notes.insert(
        0,
        f"{options.config} {' '.join(options.set)}: {options.games} games a repetition"
        + ("" if options.no_torch else f", {options.torch_games} on the torch engine")
        + ".",
    )
    if options.quick:
        report.notes.append("--quick: few games, so batches are small; not the demo's numbers.")
    publish(report, options)


def _options() -> argparse.Namespace:
    made = parser(
        "The agent loop's tokens/s against raw vLLM and the torch engine.", overrides=True
    )
    made.add_argument("--config", type=Path, default=Path("earl_core/recipes/demo.yaml"))
    made.add_argument("--games", type=int, help="games per repetition; default 64, quick 16")
    made.add_argument("--torch-games", type=int, help="default: as many as --games")
    made.add_argument("--repetitions", type=int, help="default 7, quick 2")
    made.add_argument("--no-adapter", action="store_true", help="leave the adapter out")
    made.add_argument("--no-torch", action="store_true", help="leave the torch engine out")
    options = made.parse_args()
    options.games = options.games or (16 if options.quick else 64)
    options.torch_games = options.torch_games or options.games
    options.repetitions = options.repetitions or (2 if options.quick else 7)
    return options


if __name__ == "__main__":
    main()
