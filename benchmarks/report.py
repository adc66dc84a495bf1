"""The page of `earl report` with 10,000 episodes: its size, and how long it takes to make and open.

    python -m benchmarks.report --markdown benchmarks/results/report.md

The runs are made of the recorded episodes of the recipe demo, which are repeated with log-probs
that differ: the games as they are; conversations of a thousand tokens, which are their turns one
after another; and as the worst case as many tokens at random, which no compression makes small.
Each page is made by a process of its own and opened in headless Chromium without a network. It is
open when the list of episodes is there; `first episode` lasts from then until a dialogue is.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Browser, sync_playwright
from tokenizers import Tokenizer

from benchmarks.update_episodes import RecordedEpisode, conversations, read_episodes
from earl_core.config import RunConfig, parse_config
from earl_core.models.smollm2 import gguf_file
from earl_core.run import RunDirectory
from earl_core.run.episodes import SCHEMA
from earl_core.trajectory.schema import SAMPLE_BITS
from tools.harness import Report, Row, median, parser, publish

_EPISODES, _QUICK_EPISODES = 10_000, 2_000
_PER_ITERATION = 250
_LONG = 1_000
_CHROMIUM = "/usr/bin/chromium"
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--chromium", default=_CHROMIUM, help="the browser")
    made.add_argument("--repetitions", type=int, default=3, help="pages made and opened")
    options = made.parse_args()
    count = _QUICK_EPISODES if options.quick else _EPISODES
    with tempfile.TemporaryDirectory(prefix="earl-report-") as directory:
        place = Path(directory)
        model = save_tokenizer(place / "model")
        rows = [
            measure(name, write_run(place, name, episodes, model), options)
            for name, episodes in workloads(count, model)
        ]
    publish(report(rows, count), options)


def workloads(count: int, model: Path) -> list[tuple[str, Callable[[], Sequence[RecordedEpisode]]]]:
    """Names, and what makes the episodes."""
    recorded = read_episodes()
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    return [
        ("games", lambda: list(islice(cycle(recorded), count))),
        ("conversations", lambda: conversations(recorded, _LONG, count)),
        ("random tokens", lambda: at_random(conversations(recorded, _LONG, count), vocabulary)),
    ]


def at_random(episodes: Sequence[RecordedEpisode], vocabulary: int) -> list[RecordedEpisode]:
    """The same lengths and turns, of tokens that have nothing to do with each other."""
    source = np.random.default_rng(0)
    return [
        replace(each, tokens=source.integers(0, vocabulary, len(each), dtype=np.int32))
        for each in episodes
    ]


def save_tokenizer(directory: Path) -> Path:
    """SmolLM2's tokenizer in a directory that passes for a model's."""
    from transformers import AutoTokenizer

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(directory)
    return directory


def write_run(
    place: Path, name: str, make: Callable[[], Sequence[RecordedEpisode]], model: Path
) -> Path:
    """A run directory with these episodes and metrics; its path."""
    config = _config(place, name.replace(" ", "_"), model)
    episodes = make()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    run = RunDirectory.open(config)
    try:
        run.store_config()
        for iteration, start in enumerate(range(0, len(episodes), _PER_ITERATION)):
            chosen = episodes[start : start + _PER_ITERATION]
            path = run.episodes_path(iteration)
            path.parent.mkdir(exist_ok=True)
            pq.write_table(table(chosen, start, tokenizer), path, compression="zstd")
            run.append_metrics(iteration, _metrics(iteration, chosen))
        run.finish()
    finally:
        run.close()
    return run.path


def _config(place: Path, name: str, model: Path) -> RunConfig:
    return parse_config(
        {
            "name": name,
            "iterations": _EPISODES // _PER_ITERATION,
            "rollout": {"prompts_per_iteration": 32, "group_size": 8, "max_turns": 8},
            "runs_directory": str(place / "runs"),
            "model": {"path": str(model)},
            "environment": {"name": "tic_tac_toe"},
            "dispatch": {"directory": str(place / "shards")},
            "tracking": {"enabled": False},
        }
    )


def _metrics(iteration: int, episodes: Sequence[RecordedEpisode]) -> dict[str, float]:
    rewards = np.array([each.reward for each in episodes])
    lengths = np.array([len(each) for each in episodes])
    return {
        "rollout/episodes": float(len(episodes)),
        "rollout/return/mean": float(rewards.mean()),
        "rollout/return/std": float(rewards.std()),
        "rollout/outcome/win": float((rewards > 0.5).mean()),
        "rollout/context/mean": float(lengths.mean()),
        "rollout/context/max": float(lengths.max()),
        "rollout/stage_seconds": 10.0 + math.sin(iteration),
    }


def table(episodes: Sequence[RecordedEpisode], first: int, tokenizer: Tokenizer) -> pa.Table:
    """Make a table of episodes as a run keeps them. first: the number of the first one."""
    source = np.random.default_rng(first)
    rows = [_row(each, first + n, tokenizer, source) for n, each in enumerate(episodes)]
    return pa.Table.from_pylist(rows, SCHEMA)


def _row(
    episode: RecordedEpisode, number: int, tokenizer: Tokenizer, source: np.random.Generator
) -> dict[str, Any]:
    trained = episode.loss_mask == 1
    noise = source.normal(0.0, 0.1, len(episode))
    logprobs = np.where(trained, np.minimum(episode.rollout_logprobs + noise, 0.0), 0.0)
    texts = []
    for turn in episode.turns():
        tokens, mask = episode.tokens[turn], trained[turn]
        texts += tokenizer.decode_batch([tokens[~mask].tolist(), tokens[mask].tolist()])
    turns = len(episode.turn_starts)
    return {
        "sample_id": number << SAMPLE_BITS,
        "episode_id": number,
        "group_id": number // 8,
        "prompt_id": number // 8,
        "turns": turns,
        "environment": "",
        "finish_reason": "done",
        "outcome": "win" if episode.reward > 0.5 else "loss",
        "scoring": "",
        "forms": "",
        "role": "",
        "shared_reward": 0.0,
        "texts": texts,
        "tokens": episode.tokens,
        "loss_mask": episode.loss_mask,
        "rollout_logprobs": logprobs.astype(np.float32),
        "turn_starts": list(episode.turn_starts),
        "policy_version_first": [0] * turns,
        "policy_version_last": [0] * turns,
        "turn_rewards": [0.0] * (turns - 1) + [episode.reward],
        "turn_numbers": list(range(turns)),
        "turn_anchors": list(range(turns)),
        "reward": episode.reward,
        "scores": "{}",
    }


def measure(name: str, run: Path, options: argparse.Namespace) -> Row:
    """Make the page of a run and open it, several times; the medians."""
    page = run / "report.html"
    command = [sys.executable, "-m", "flows.cli", "report", str(run), "--output", str(page)]
    made, used, opened, read = [], [], [], []
    index: dict[str, int] = {}
    with sync_playwright() as playwright:
        arguments = {"executable_path": options.chromium, "args": _ARGUMENTS}
        with playwright.chromium.launch(**arguments) as browser:
            for _ in range(options.repetitions):
                started, before = time.perf_counter(), _child_seconds()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                made.append(time.perf_counter() - started)
                used.append(_child_seconds() - before)
                seconds, dialogue, index = open_page(browser, page)
                opened.append(seconds)
                read.append(dialogue)
    lengths = [
        len(tokens) for file in run.glob("iterations/*/*.parquet") for tokens in _tokens(file)
    ]
    return {
        "episodes of": name,
        "episodes": index["listed"],
        "tokens an episode": sum(lengths) / len(lengths),
        "with texts": index["texts"],
        "with tokens": index["tokens"],
        "page, MB": page.stat().st_size / 1e6,
        "made in, s": median(made),
        "CPU seconds": median(used),
        "opened in, s": median(opened),
        "first episode, s": median(read),
    }


def _child_seconds() -> float:
    """CPU seconds of all processes that this one has waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _tokens(file: Path) -> list[Any]:
    return list(pq.read_table(file, columns=["tokens"])["tokens"])


def open_page(browser: Browser, page: Path) -> tuple[float, float, dict[str, int]]:
    """Seconds until the list is there and until the first dialogue is, and what is listed."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    shown = context.new_page()
    started = time.perf_counter()
    shown.goto(page.as_uri())
    shown.wait_for_selector("body[data-ready] #rows tbody tr")
    listed = time.perf_counter()
    shown.click("#rows tbody button >> nth=0")
    shown.wait_for_selector("#dialogue .turn")
    read = time.perf_counter()
    shares = shown.evaluate(
        "(({shown}) => ({listed: shown.length, texts: shown.filter((s) => s > 0).length, "
        "tokens: shown.filter((s) => s > 1).length}))(view.index)"
    )
    context.close()
    return listed - started, read - listed, shares


def report(rows: list[Row], count: int) -> Report:
    """The table with its headlines: the worst of all workloads."""
    worst = {
        f"page_{what}": max(float(row[column] or 0.0) for row in rows)
        for what, column in (
            ("megabytes", "page, MB"), ("seconds_to_make", "made in, s"),
            ("seconds_to_open", "opened in, s"),
        )
    }  # fmt: skip
    notes = [
        "The aim for 10,000 episodes: under 20 MB, made in 10 s, opened in 2 s. 4.9 MB are plotly.",
        "CPU seconds are those of making the page: where it takes longer, it waited for a machine "
        "that was busy with other work.",
        "What does not fit is left out of a page, the last episodes of each iteration first and "
        "tokens before texts, and the page says so.",
    ]
    return Report("report", f"The page of a run with {count:,} episodes", rows, worst, notes)


if __name__ == "__main__":
    main()
