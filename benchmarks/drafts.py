"""Drafts from past answers: speed of rollouts of the torch engine with them and without.

    python -m benchmarks.drafts --markdown benchmarks/results/drafts.md

Measured: SmolLM2 in float32 plays iterations of prompts, each with a group of as many episodes as
`batch` says, by the same seeds with `rollout.drafts` and without, in turns in one process. One
thread computes, and its seconds are the processor's, so that other programs count little. The first
iteration, which has no past, is not timed. `repeats`: prompts come again in every iteration, with
other seeds, at temperature 0.3, where the model is about as sure as a policy that has learnt.
`fresh`: no prompt comes twice, at temperature 1. `limit`: the last iteration is played once more by
the same seeds, so that nearly all of a draft is right.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from earl_core.config import RunConfig
from earl_core.config.rollout import DraftsConfig
from earl_core.pretrained.model_directory import model_directory
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engine_factory import load_chat_tokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from tools.harness import Report, build_model, config_here, median, parser, publish

_REPEATED: tuple[str, ...] = (
    "Count from 1 to 60. Write only the numbers, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
)
_FRESH = "Tell me a short story about {} and {}."
_THINGS = (
    "a lighthouse", "a lost key", "an old tailor", "winter", "a paper boat", "two brothers",
    "a clock without hands", "the last train", "a garden on a roof", "a stubborn goat", "the sea",
    "an empty theatre", "a violin", "the baker's daughter", "a map of nowhere", "rain",
)  # fmt: skip


class Text(NamedTuple):
    """What is played. repeats: whether prompts come again."""

    name: str
    repeats: bool
    temperature: float


TEXTS = (Text("repeats", True, 0.3), Text("fresh", False, 1.0))


class Played(NamedTuple):
    """An iteration on one engine. seconds: of the processor."""

    seconds: float
    answers: list[Completion]


def requests_of(
    text: Text, batch: int, iteration: int, chat: ChatTokenizer, tokens: int
) -> list[list[GenerationRequest]]:
    """The groups of an iteration."""
    prompts = _REPEATED
    if not text.repeats:
        places = [(2 * iteration + n, 6 * iteration + 5 * n + 3) for n in range(len(_REPEATED))]
        named = [[_THINGS[place % len(_THINGS)] for place in each] for each in places]
        prompts = tuple(_FRESH.format(*each) for each in named)
    return [
        [
            GenerationRequest(
                sequence_id=member,
                tokens=chat.first_prompt([{"role": "user", "content": prompt}]),
                max_tokens=tokens,
                temperature=text.temperature,
                seed=1000 * iteration + 100 * number + member,
                stop_token_ids=chat.stop_token_ids,
            )
            for member in range(batch)
        ]
        for number, prompt in enumerate(prompts)
    ]


async def play(engine: TorchEngine, groups: Sequence[Sequence[GenerationRequest]]) -> Played:
    """One iteration."""
    answers, started = [], time.process_time()
    for group in groups:
        answers += await engine.generate(group)
        engine.finish([each.sequence_id for each in group])
    return Played(time.process_time() - started, answers)


async def measure(
    text: Text, batch: int, config: RunConfig, iterations: int, tokens: int
) -> dict[str, Any]:
    """A row of the table."""
    chat, directory = load_chat_tokenizer(config), model_directory(config.initial_model)
    engines = [
        TorchEngine(directory, dtype="float32", threads=1, drafts=drafts)
        for drafts in (None, DraftsConfig())
    ]
    plain, ours = engines
    for engine in engines:
        await engine.start()
    rollouts = [requests_of(text, batch, each, chat, tokens) for each in range(iterations)]
    speeds: list[float] = []
    rates: list[float] = []
    drafted: list[Completion] = []
    equal: list[bool] = []
    for number, groups in enumerate(rollouts):
        # Whoever is second finds the processor as warm as the first.
        order = engines if number % 2 else engines[::-1]
        played = {engine: await play(engine, groups) for engine in order}
        both = zip(*(played[engine].answers for engine in engines), strict=True)
        equal += [one.tokens == other.tokens for one, other in both]
        if number:
            speeds.append(played[plain].seconds / played[ours].seconds)
            count = sum(len(answer.tokens) for answer in played[plain].answers)
            rates.append(count / played[plain].seconds)
            drafted += played[ours].answers
    again = [await play(engine, rollouts[-1]) for engine in engines]
    for engine in engines:
        await engine.stop()
    passes, made, accepted = (sum(n) for n in zip(*(a.drafts for a in drafted), strict=True))
    return {
        "text": text.name,
        "temperature": text.temperature,
        "batch": batch,
        "without (tokens/CPU s)": median(rates),
        "ours": median(speeds),
        "limit": again[0].seconds / again[1].seconds,
        "tokens per pass": 1 + accepted / passes,
        "accepted": accepted / max(made, 1),
        "equal answers": sum(equal) / len(equal),
    }


def main() -> None:
    options = _options()
    config = config_here("connect_four_smollm2", options.set)
    build_model(config)
    report = Report("drafts", "Speed of rollouts with drafts from past answers")
    iterations, tokens, batches = (3, 24, (1, 8)) if options.quick else (4, 48, (1, 2, 4, 8))
    for text in TEXTS:
        for batch in batches:
            row = asyncio.run(measure(text, batch, config, iterations, tokens))
            report.rows.append(row)
            print(row, flush=True)
    ours = [(row["text"], float(str(row["ours"]))) for row in report.rows]
    report.headline["drafts_best"] = max(speed for text, speed in ours if text == "repeats")
    report.headline["drafts_worst"] = min(speed for _, speed in ours)
    report.notes += [
        "ours and limit are speeds over the engine without drafts: the median of "
        f"{iterations - 1} iterations, and one, of at most {tokens} tokens an answer, "
        "drawn by the same seeds.",
        "equal answers: one differs from where rounding has moved an edge between two tokens over "
        "the draw.",
        "tokens per pass: of one sequence. accepted: the share of draft tokens that were right.",
    ]
    publish(report, options)


def _options() -> argparse.Namespace:
    return parser(__doc__ or "", overrides=True).parse_args()


if __name__ == "__main__":
    main()
