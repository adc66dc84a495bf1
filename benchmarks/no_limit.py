"""No context limit: a task whose episodes grow while it is learnt, under a hard memory cap.

Everything of a run but Prefect's server lives in a control group whose memory the kernel caps by
killing. Same seeds and cap for all arms: `fixed` keeps the layout it began with; `truncated` too,
with episodes cut after so many floors, the best setting found; `earl` lets the selector choose
(`selector.policy: live_tokens`) and cuts nothing. `by hand` is a control: a fixed layout made for
the longest episodes there will be, which takes somebody who knows them before the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.no_limit_runs import (
    CONFIG,
    LAST_ITERATIONS,
    Arm,
    Finished,
    play_held_out,
    run_capped,
)
from earl_core.config import load_config
from flows import server
from tools.harness import REPOSITORY, Report, Row, parser, publish
from tools.memory_cap import MemoryCap, NoCap

FIXED = Arm("fixed")
EARL = Arm("earl", ("selector.policy=live_tokens",))
BY_HAND = Arm(
    "by hand", ("update.max_tokens_per_microbatch=2048", "update.activation_checkpointing=full")
)

_TOKENS_PER_ANSWER = 2
_BUILD = (
    "import json, sys; from benchmarks.no_limit_model import build; "
    "build(sys.argv[1], **json.loads(sys.argv[2]))"
)


def truncated(floors: int) -> Arm:
    """The fixed layout with episodes cut after so many answers."""
    limit = f"rollout.max_tokens_per_episode={_TOKENS_PER_ANSWER * floors}"
    return Arm(f"truncated {floors}", (limit,), floors)


def main() -> None:
    options = _options()
    try:
        with MemoryCap(int(options.cap_gib * 2**30)) as cap:
            version = cap.version
    except NoCap as error:
        raise SystemExit(f"not run: {error}") from error
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="earl-no-limit-"))
    scratch = scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm") / f"earl_no_limit_{os.getpid()}"
    try:
        series = Series(options, scratch, shared)
        found = series.run()
        if options.png:
            draw(_shown(found), options.png, options.cap_gib)
        publish(_report(found, options, version), options)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        if not options.scratch:
            shutil.rmtree(scratch, ignore_errors=True)


class Series:
    """All runs, one after another; what they share lies in `scratch` and in `shared`."""

    def __init__(self, options: argparse.Namespace, scratch: Path, shared: Path) -> None:
        self._options, self._scratch = options, scratch
        self._common = [
            f"dispatch.directory={shared}",
            f"model.path={options.model or scratch / 'model'}",
            f"selector.profile_directory={scratch / 'profiles'}",
            *(_QUICK if options.quick else ()),
            *options.set,
        ]

    def run(self) -> list[Finished]:
        """Every run: the cuts are searched with the first seed, the best one has all seeds."""
        self._build_model()
        asked, seeds = self._options.arms, range(self._options.seeds)
        found: list[Finished] = []
        with _prefect(self._scratch):
            if "fixed" in asked:
                found += [self._train(FIXED, seed) for seed in seeds]
            if "truncated" in asked:
                tried = [self._train(truncated(floors), 0) for floors in self._options.cuts]
                best = best_cut(tried)
                found += tried
                found += [self._train(best, seed) for seed in seeds if seed and best]
            if "earl" in asked:
                found += [self._train(EARL, seed) for seed in seeds]
            if "by_hand" in asked:
                found.append(self._train(BY_HAND, 0))
        for run in found:
            if run.survived and self._options.held_out:
                run.held_out = play_held_out(run, self._options.held_out)
        return found

    def _build_model(self) -> None:
        """Outside of the cap, once for all runs."""
        model = load_config(CONFIG, self._common).model
        arguments = [model.path, json.dumps(model.builder_options)]
        command = [sys.executable, "-c", _BUILD, *arguments]
        subprocess.run(command, cwd=REPOSITORY, check=True)

    def _train(self, arm: Arm, seed: int) -> Finished:
        done = run_capped(
            arm,
            seed,
            int(self._options.cap_gib * 2**30),
            self._scratch,
            self._common,
            self._options.iterations,
        )
        said = f"return {done.final_return:.1f}" if done.survived else f"ended: {done.cause}"
        print(f"{arm.name}, seed {seed}: {len(done.metrics)} iterations, {said}", flush=True)
        return done


def best_cut(tried: Sequence[Finished]) -> Arm | None:
    """The setting with the highest return among the runs that survived."""
    alive = [run for run in tried if run.survived]
    return max(alive, key=lambda run: run.final_return).arm if alive else None


def _shown(found: Sequence[Finished]) -> list[Finished]:
    """Leave out the cuts that were tried and were not the best."""
    best = best_cut([run for run in found if run.arm.cut_at and run.seed == 0])
    return [run for run in found if not run.arm.cut_at or run.arm == best]


@contextmanager
def _prefect(scratch: Path) -> Iterator[None]:
    """A Prefect server outside of the cap, because the cap is about training."""
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_HOME"] = str(scratch / "prefect")
    started = server.start(server.configure(scratch / "runs"), scratch / "runs")
    try:
        started.ready()
        yield
    finally:
        started.stop()


def _row(run: Finished) -> Row:
    means, longest = run.series("rollout/context/mean"), run.series("rollout/context/max")
    end = "finished"
    if not run.survived:
        end = f"killed at {len(run.metrics)}" if run.kills else "failed"
    return {
        "arm": run.arm.name,
        "seed": run.seed,
        "end": end,
        "tokens": f"{means[0]:,.0f} → {means[-1]:,.0f}" if means else "",
        "longest": max(longest, default=0.0),
        "cut %": 100 * run.cut_share,
        "return": run.final_return if run.survived else None,
        "unlimited": run.held_out,
        "peak GiB": run.peak_bytes / 2**30,
        "minutes": run.minutes,
        "kills": run.kills,
        "repeats": run.repeats(),
        "layouts": len(set(run.layouts())),
    }


def _report(found: list[Finished], options: argparse.Namespace, version: int) -> Report:
    title = f"No limit: episodes that grow under a cap of {options.cap_gib:g} GiB"
    report = Report("no_limit", title, rows=[_row(run) for run in found])
    report.headline = _headline(found)
    report.notes = [
        f"The cap is a control group (version {version}) around the controller, its workers and "
        "their shared memory; Prefect's server is outside of it, MLflow is off. killed at: the "
        "iteration in which the kernel ended the run.",
        "tokens: of an episode, mean of the first and of the last iteration. cut: episodes of the "
        f"last {LAST_ITERATIONS} iterations that did not end by themselves. return: floors passed, "
        f"mean of the episodes of the last {LAST_ITERATIONS} iterations.",
        "repeats: stages done again, under a smaller layout or with engines built for a longer "
        "context. layouts: different ones of a run, not counting the engines' context.",
    ]
    if options.held_out:
        report.notes.append(
            f"unlimited: {options.held_out} held-out episodes of the last policy, played without "
            "any limit and outside of the cap, so that what was learnt under a limit is not judged "
            "by that limit."
        )
    if "truncated" in options.arms:
        cuts = ", ".join(map(str, options.cuts))
        report.notes.append(
            f"truncated: rollout.max_tokens_per_episode for {cuts} floors, each tried with seed 0; "
            "the best one that survived has all seeds."
        )
    if "by_hand" in options.arms:
        report.notes.append(
            f"by hand: {', '.join(BY_HAND.overrides)} from the start, the layout of somebody who "
            "knows how long the episodes will get; one seed."
        )
    report.notes += [f"earl, seed {run.seed}: {_story(run)}." for run in found if run.arm is EARL]
    ended = [run for run in found if not run.survived]
    report.notes += [
        f"{run.arm.name}, seed {run.seed}, ended with: {run.cause}" for run in ended if run.cause
    ]
    return report


def _story(run: Finished) -> str:
    """Tell which layouts the run had, from which iteration on."""
    texts = run.layouts()
    begun = [k for k in range(len(texts)) if k == 0 or texts[k] != texts[k - 1]]
    if not begun:
        return "no plan was sealed"
    layouts = "; ".join(f"from iteration {k} on {texts[k]}" for k in begun)
    return f"{layouts}; engines for contexts of {', '.join(map(str, run.lengths()))} tokens"


def _headline(found: list[Finished]) -> dict[str, float]:
    fixed = [run for run in found if run.arm is FIXED]
    earl = {run.seed: run for run in found if run.arm is EARL}
    best = {run.seed: run for run in _shown(found) if run.arm.cut_at}
    headline: dict[str, float] = {}
    if fixed:
        headline["fixed_died"] = float(sum(not run.survived for run in fixed))
    if earl:
        headline["earl_survived"] = float(sum(run.survived for run in earl.values()))
        headline["earl_episodes_cut"] = sum(run.cut_ever for run in earl.values())
        grown = [run.series("rollout/context/mean") for run in earl.values() if run.metrics]
        headline["context_growth"] = min((s[-1] / s[0] for s in grown), default=0.0)
    both = [seed for seed in earl if seed in best and best[seed].survived and earl[seed].survived]
    if both:
        headline["return_over_truncated"] = min(
            earl[seed].final_return / best[seed].final_return for seed in both
        )
    return headline


_QUICK = ("model.builder_options.care=0.95",)
"""A policy that has learnt most of it already: episodes of 300 tokens at the beginning."""


def _options() -> argparse.Namespace:
    options = parser(__doc__ or "", overrides=True)
    arms = ("fixed", "truncated", "earl", "by_hand")
    options.add_argument("--png", type=Path, help="draw the curves into this file")
    options.add_argument("--arms", nargs="+", choices=arms, default=arms)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--iterations", type=int, default=20)
    options.add_argument("--cuts", type=int, nargs="+", default=(32, 36, 40, 44), metavar="FLOORS")
    options.add_argument("--cap-gib", type=float, default=1.6, help="memory of a run")
    options.add_argument("--held-out", type=int, default=64, help="episodes; 0: none")
    options.add_argument("--model", type=Path, help="use or make the initial model here")
    options.add_argument(
        "--scratch",
        type=Path,
        help="make run directories here and keep them; another call with the same settings goes "
        "on with the runs that have not ended",
    )
    given = options.parse_args()
    if given.quick:
        given.seeds, given.iterations, given.held_out = 1, 6, 0
        given.cuts, given.arms = (24,), ("fixed", "truncated", "earl")
        # Six iterations do not grow beyond the full run's cap.
        given.cap_gib = min(given.cap_gib, 1.5)
    return given


_COLOURS = {"fixed": "#b03030", "truncated": "#b8860b", "earl": "#2a7f3f", "by hand": "#888888"}


def draw(runs: Sequence[Finished], target: Path, cap_gib: float) -> None:
    """Tokens of an episode and return by iteration; a line a run, a cross where it was killed, a
    dot where a layout changed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (contexts, returns) = pyplot.subplots(1, 2, figsize=(9.8, 3.8))
    for axis, metric, label in (
        (contexts, "rollout/context/mean", "tokens of an episode, mean"),
        (returns, "rollout/return/mean", "return: floors passed, mean"),
    ):
        for run in runs:
            _line(axis, run, metric)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    _legend(returns, runs)
    contexts.set_title(f"memory capped at {cap_gib:g} GiB", fontsize=10)
    returns.set_title("same seeds, same cap", fontsize=10)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _line(axis: Any, run: Finished, metric: str) -> None:
    values = run.series(metric)
    colour = _COLOURS[_family(run)]
    style = "--" if run.arm.name == "by hand" else "-"
    axis.plot(range(len(values)), values, style, color=colour, linewidth=1.4, alpha=0.85)
    if not run.survived and values:
        axis.plot(len(values) - 1, values[-1], "x", color=colour, markersize=9, markeredgewidth=2)
    if run.arm.name == "earl":
        places = [k for k in run.switches() if k < len(values)]
        axis.plot(places, [values[k] for k in places], "o", color=colour, markersize=4)


def _legend(axis: Any, runs: Sequence[Finished]) -> None:
    from matplotlib.lines import Line2D

    texts: dict[str, str] = {}
    for run in runs:
        family = _family(run)
        if family == "fixed":
            texts[family] = "fixed layout (x: killed)"
        elif family == "truncated":
            texts[family] = f"fixed, cut after {run.arm.cut_at} floors"
        elif family == "earl":
            texts[family] = "EARL, nothing cut (dots: new layout)"
        else:
            texts[family] = "fixed by hand for the longest"
    lines = [
        Line2D([], [], color=_COLOURS[f], linestyle="--" if f == "by hand" else "-") for f in texts
    ]
    axis.legend(lines, list(texts.values()), loc="upper left", fontsize=8, frameon=False)


def _family(run: Finished) -> str:
    return "truncated" if run.arm.cut_at else run.arm.name


if __name__ == "__main__":
    main()
