"""Drafts from past answers: speed of rollouts of both engines with them and without.

    python -m benchmarks.drafts --markdown benchmarks/results/drafts.md

Measured: SmolLM2 in float32 plays iterations of prompts, each with a group of as many episodes as
`batch` says, by the same seeds with `rollout.drafts` and without, in turns. One thread computes.
The first iteration, which has no past, is not timed. `repeats`: prompts come again in every
iteration, with other seeds, at temperature 0.3, where the model is about as sure as a policy that
has learnt. `fresh`: no prompt comes twice, at temperature 1. `limit`: the last iteration is played
once more by the same seeds, so that nearly all of a draft is right. Speeds are in tokens by the
second, and by the processor's second (of vLLM's processes, too, which also take some while they
wait), in which other programs count little. Without drafts vLLM is as it is: it schedules a step
while it computes the one before, which it cannot with them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from earl_core.config import RunConfig
from earl_core.config.rollout import DraftsConfig, VllmConfig
from earl_core.pretrained.model_directory import model_directory
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engine_factory import load_chat_tokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from tools.harness import Report, build_model, config_here, median, parser, publish

_REPEATED: tuple[str, ...] = (
    "Count from 1 to {}. Write only the numbers, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, in at most {} lines.",
)
_FRESH = "Tell me a short story about {} and {}."
_THINGS = (
    "a lighthouse", "a lost key", "an old tailor", "winter", "a paper boat", "two brothers",
    "a clock without hands", "the last train", "a garden on a roof", "a stubborn goat", "the sea",
    "an empty theatre", "a violin", "the baker's daughter", "a map of nowhere", "rain",
)  # fmt: skip


ENGINES = ("torch", "vllm")


class Text(NamedTuple):
    """What is played. repeats: whether prompts come again. iterations: the first one included."""

    name: str
    repeats: bool
    temperature: float
    iterations: int
    tokens: int


TEXTS = (Text("repeats", True, 0.3, 4, 40), Text("fresh", False, 1.0, 3, 24))
QUICK = (Text("repeats", True, 0.3, 3, 24), Text("fresh", False, 1.0, 2, 16))


class Played(NamedTuple):
    """An iteration on one engine. cpu: seconds of the processor."""

    wall: float
    cpu: float
    answers: list[Completion]

    def speed(self, seconds: str) -> float:
        """Tokens by such a second."""
        return sum(len(each.tokens) for each in self.answers) / float(getattr(self, seconds))


def requests_of(
    text: Text, batch: int, iteration: int, chat: ChatTokenizer
) -> list[list[GenerationRequest]]:
    """The groups of an iteration."""
    prompts = tuple(each.format(60 + batch) for each in _REPEATED)
    if not text.repeats:
        places = [(2 * iteration + n, 6 * iteration + 5 * n + 3) for n in range(len(_REPEATED))]
        named = [[_THINGS[place % len(_THINGS)] for place in each] for each in places]
        prompts = tuple(_FRESH.format(*each) for each in named)
    return [
        [
            GenerationRequest(
                sequence_id=member,
                tokens=chat.first_prompt([{"role": "user", "content": prompt}]),
                max_tokens=text.tokens,
                temperature=text.temperature,
                seed=1000 * iteration + 100 * number + member,
                stop_token_ids=chat.stop_token_ids,
            )
            for member in range(batch)
        ]
        for number, prompt in enumerate(prompts)
    ]


async def play(engine: Engine, groups: Sequence[Sequence[GenerationRequest]]) -> Played:
    """One iteration."""
    answers, began, started = [], _cpu_seconds(engine), time.perf_counter()
    for group in groups:
        answers += await engine.generate(group)
        engine.finish([each.sequence_id for each in group])
    return Played(time.perf_counter() - started, _cpu_seconds(engine) - began, answers)


def _cpu_seconds(engine: Engine) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in engine.pids()]
    return time.process_time() + sum(each.user + each.system for each in times)


def compare(pairs: Sequence[tuple[Completion, Completion]]) -> tuple[int, float]:
    """How many answers part, each at a place where a draw lies at the edge between two tokens, and
    how much log-probs differ before."""
    parted, most = 0, 0.0
    for one, other in pairs:
        places = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
        for mine, theirs, ours, plain in places:
            if mine != theirs:
                parted += 1
                break
            most = max(most, abs(ours - plain))
    return parted, most


async def measure(
    plain: Engine, ours: Engine, text: Text, batch: int, chat: ChatTokenizer, first: int
) -> dict[str, Any]:
    """A row of the table. first: number of the first iteration, of which the seeds depend."""
    numbers = range(first, first + text.iterations)
    rollouts = [requests_of(text, batch, each, chat) for each in numbers]
    sides: list[dict[Engine, Played]] = []
    for number, groups in enumerate(rollouts):
        # Whoever is second finds the processor as warm as the first.
        order = (plain, ours) if number % 2 else (ours, plain)
        sides.append({engine: await play(engine, groups) for engine in order})
    again = {engine: await play(engine, rollouts[-1]) for engine in (plain, ours)}
    pairs = [p for s in sides for p in zip(s[ours].answers, s[plain].answers, strict=True)]
    parted, differ = compare(pairs)
    drafted = [answer.drafts for side in sides[1:] for answer in side[ours].answers]
    passes, made, accepted = (sum(n) for n in zip(*drafted, strict=True))
    row: dict[str, Any] = {"text": text.name, "temperature": text.temperature, "batch": batch}
    for seconds, name in (("wall", "s"), ("cpu", "CPU s")):
        row[f"without (tokens/{name})"] = median([s[plain].speed(seconds) for s in sides[1:]])
    for seconds, name in (("wall", ""), ("cpu", " (CPU)")):
        gains = [side[ours].speed(seconds) / side[plain].speed(seconds) for side in sides[1:]]
        row[f"ours{name}"] = median(gains)
        row[f"limit{name}"] = again[ours].speed(seconds) / again[plain].speed(seconds)
    return row | {
        "tokens per pass": 1 + accepted / max(passes, 1),
        "accepted": accepted / max(made, 1),
        "answers": len(pairs),
        "parted": parted,
        "log-probs differ": differ,
    }


@contextmanager
def engines_of(kind: str, config: RunConfig) -> Iterator[tuple[Engine, Engine]]:
    """One that makes no drafts, and one that does, not started."""
    directory = model_directory(config.initial_model)
    with tempfile.TemporaryDirectory() as scratch:

        def engine(drafts: DraftsConfig | None) -> Engine:
            if kind == "torch":
                return TorchEngine(directory, dtype="float32", threads=1, drafts=drafts)
            from earl_core.rollout.engines.vllm_engine import VllmEngine

            options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 1024}
            options |= {"settings": VllmConfig(kv_cache_gib=1), "scratch": Path(scratch)}
            return VllmEngine(directory, drafts=drafts, **options)

        yield engine(None), engine(DraftsConfig())


async def measure_engine(
    kind: str, config: RunConfig, texts: Sequence[Text], batches: Sequence[int]
) -> list[dict[str, Any]]:
    """The rows of an engine, each of prompts and seeds of its own."""
    rows, chat = [], load_chat_tokenizer(config)
    with engines_of(kind, config) as (plain, ours):
        for engine in (plain, ours):
            await engine.start()
        try:
            for text in texts:
                for batch in batches:
                    first = 10 * len(rows)
                    row = await measure(plain, ours, text, batch, chat, first)
                    rows.append({"engine": kind} | row)
                    print(rows[-1], flush=True)
        finally:
            for engine in (plain, ours):
                await engine.stop()
    return rows


def main() -> None:
    options = _options()
    config = config_here("connect_four_smollm2", options.set)
    build_model(config)
    report = Report("drafts", "Speed of rollouts with drafts from past answers")
    texts = QUICK if options.quick else TEXTS
    for kind in options.engines:
        report.rows += asyncio.run(measure_engine(kind, config, texts, (1, 8)))
    for kind in options.engines:
        rows = [row for row in report.rows if row["engine"] == kind]
        ours = [(row["text"], float(str(row["ours"]))) for row in rows]
        prefix = "drafts" if kind == "torch" else "drafts_vllm"
        report.headline[f"{prefix}_best"] = max(speed for text, speed in ours if text == "repeats")
        report.headline[f"{prefix}_worst"] = min(speed for _, speed in ours)
    report.notes += [
        "ours and limit are speeds over the same engine without drafts, in tokens by the second "
        "and by the processor's; ours is the median of iterations, limit one of them. "
        + " ".join(
            f"{each.name}: {each.iterations - 1} iterations of at most {each.tokens} tokens an "
            "answer."
            for each in texts
        ),
        "parted: answers that go on otherwise from where rounding has moved an edge between two "
        "tokens over the draw. log-probs differ: by so much at most, before.",
        "tokens per pass: of one sequence. accepted: the share of draft tokens that were right.",
    ]
    publish(report, options)


def _options() -> argparse.Namespace:
    found = parser(__doc__ or "", overrides=True)
    found.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    return found.parse_args()


if __name__ == "__main__":
    main()
