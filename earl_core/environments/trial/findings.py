"""Findings of a trial: faults that break training, points that deserve a look, and good results."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Iterator

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.trial.plays import Difference, Played
from earl_core.environments.trial.trial import EPISODES, TURNS, Trial, Usage, try_out
from earl_core.system.errors import ConfigError
from earl_core.system.finding import Finding, Level, judged, refused

_MIB = 2**20
_SHOWN = 160
_SLOW_SECONDS = 1.0
_NOTICEABLE_SECONDS = 0.01
# Half way between what runs side by side and what does not, where other programs disturb both.
_SIDE_BY_SIDE_SHARE = 0.5
_FEWEST_SIDE_BY_SIDE = 4
_ONE_CORE = 1.2
_LONG_OBSERVATION = 20_000


def examine(
    environment: EnvironmentConfig, episodes: int = EPISODES, turns: int = TURNS
) -> list[Finding]:
    """Try an environment out in processes of its own and judge it.

    episodes: of random texts; each is played four times. turns: after so many an episode is given
    up. A finding of the level "blocks" says what breaks training.
    """
    try:
        trial = asyncio.run(try_out(environment, episodes, turns))
    except ConfigError as error:
        return [refused(error)]
    if trial is None:
        return [
            Finding("good", "the agent can be imported and called with (task, base_url, api_key)"),
            Finding(
                "note",
                "no more was tried, because an agent needs a policy",
                "play it: `earl train`, and `earl serve` for one episode by hand",
            ),
        ]
    return [*_failures(trial), *_whole(trial)]


def _whole(trial: Trial) -> Iterator[Finding]:
    if not trial.whole:
        return
    yield from _replays(trial)
    yield from _starts(trial)
    yield _speed(trial)
    yield _blocking(trial)
    yield from _leaks(trial)
    yield _ends(trial)
    yield _rewards(trial)
    yield from _outcomes(trial)
    yield from _observations(trial)


_REMEDIES = {
    "exception": "a model may say anything: answer it with a message, or with a reward and done",
    "timeout": "make it quicker, await what it waits for, or raise "
    "environment.step_timeout_seconds",
    "invalid_result": "return what earl_core.environments.base.StepResult says",
    "host_died": "find what ends the process; the text is its last answer",
}


def _failures(trial: Trial) -> Iterator[Finding]:
    failed = [each for each in trial.played if each.failure is not None]
    number = f"{len(trial.played)} episodes of random texts"
    if not failed:
        yield Finding("good", f"{number} were played without a failure")
    seen = set()
    for each in failed:
        error = each.failure
        assert error is not None
        if error.reason in seen:
            continue
        seen.add(error.reason)
        count = sum(other.failure.reason == error.reason for other in failed if other.failure)
        last = next((x for x in reversed(error.detail.splitlines()) if x.strip()), "")
        text = f"after the answer {_short(each.texts[-1])}" if each.texts else "in reset()"
        yield Finding(
            "blocks",
            f"{count} of {number} failed ({error.reason}), first {text} in the episode "
            f"({each.prompt}, {each.seed}): {_cut(last.strip())}",
            _remedy(trial, each),
        )


def _remedy(trial: Trial, failed: Played) -> str:
    assert failed.failure is not None
    reason = failed.failure.reason
    if reason == "exception" and trial.wants_policy:
        return "the attribute `policy` is None here: do without an answer then"
    if reason == "exception" and not failed.texts:
        return "every prompt and seed has to begin"
    return _REMEDIES.get(reason, "")


def _replays(trial: Trial) -> Iterator[Finding]:
    if not trial.deterministic:
        why = "it asks the policy" if trial.wants_policy else "deterministic = False"
        yield Finding("note", f"{why}: a lost host's episodes are played anew")
        return
    advice = ""
    where: tuple[Difference | None, str] = (None, "")
    if trial.again is not None:
        where = trial.again, "again in the same process"
        advice = (
            "let all randomness come from reset's prompt and seed, and keep nothing in the class "
            "or module; what cannot be replayed says `deterministic = False`"
        )
    elif trial.beside is not None:
        where = trial.beside, "beside others in the same process"
        advice = (
            "keep all state in the object: episodes share the module's, and the `random` module's. "
            "`concurrent = False` only keeps calls from running at the same moment"
        )
    elif trial.elsewhere is not None:
        where = trial.elsewhere, "in another process"
        advice = "find what differs between processes: id(), addresses as hashes, files, the clock"
    found, place = where
    if found is None:
        yield Finding(
            "good", "the same texts give the same episode: again, beside others, elsewhere"
        )
        return
    yield Finding(
        "blocks",
        f"not deterministic: the episode ({found.prompt}, {found.seed}), played {place}, "
        f"gives at turn {found.turn} {_cut(found.after)} instead of {_cut(found.before)}",
        advice,
    )


def _starts(trial: Trial) -> Iterator[Finding]:
    first: dict[int, object] = {}
    for each in trial.whole:
        if first.setdefault(each.prompt, each.replies[0]) != each.replies[0]:
            yield Finding(
                "warning",
                f"the first messages of prompt {each.prompt} depend on the seed",
                "take the start from the prompt alone: the episodes of a group are compared, and "
                "share their prompt's tokens",
            )
            return


def _speed(trial: Trial) -> Finding:
    resets = [each.seconds[0] for each in trial.whole]
    steps = [seconds for each in trial.whole for seconds in each.seconds[1:]]
    turns = [len(each.texts) for each in trial.whole]
    slow = max([*resets, *steps]) > _SLOW_SECONDS
    return Finding(
        "warning" if slow else "good",
        f"reset {_times(resets)}; step {_times(steps)}; steps of an episode: "
        f"{statistics.mean(turns):.1f} on average, {max(turns)} at most",
        "see to it that it awaits, and give the run enough episodes at once: engines wait for "
        "slow steps"
        if slow
        else "",
    )


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "never"
    ordered = sorted(1000 * each for each in seconds)
    middle, late = statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]
    return f"{middle:.1f} ms (95 %: {late:.1f}, most: {ordered[-1]:.1f})"


def _blocking(trial: Trial) -> Finding:
    calls = sum(len(each.seconds) for each in trial.whole)
    text = (
        f"{len(trial.whole)} episodes take {trial.at_once:.2f} s at once, {trial.in_turn:.2f} s "
        "one after the other"
    )
    if trial.computed >= calls * _NOTICEABLE_SECONDS:
        # Not the clock: what others leave of the machine is no fault of the environment's.
        return judged(
            trial.computed > _ONE_CORE * trial.at_once,
            f"{text}; a call computes for {1000 * trial.computed / calls:.0f} ms",
            "one process has one core for Python's code: raise environment.hosts",
        )
    noticeable = trial.in_turn >= calls * _NOTICEABLE_SECONDS
    parallel = trial.at_once < _SIDE_BY_SIDE_SHARE * trial.in_turn
    if parallel or not noticeable or len(trial.whole) < _FEWEST_SIDE_BY_SIDE:
        return Finding("good", text)
    if not trial.concurrent:
        return Finding(
            "warning",
            f"{text}, because of `concurrent = False`",
            "raise environment.hosts, or let several of its objects run at the same time",
        )
    return Finding(
        "blocks",
        f"{text}: its calls wait and let no other run meanwhile",
        "await what it waits for, and put what blocks into asyncio.to_thread; C code must let the "
        "interpreter lock go; a lock of the module's own must not be held while it waits",
    )


_KEPT = {
    "threads": "threads: end them in close()",
    "files": "open files or sockets: close them in close()",
    "processes": "child processes: end them, and wait for them, in close()",
}


def _leaks(trial: Trial) -> Iterator[Finding]:
    growth = trial.growth
    if growth is None:
        yield Finding("note", "its process was lost meanwhile, so that leaks cannot be told")
        return
    leaks = [Finding("blocks", *_left(growth, what)) for what in _KEPT if _kept(growth, what)]
    levels: tuple[tuple[float, Level], ...] = ((_MIB, "blocks"), (_MIB / 4, "warning"))
    for least, level in levels:
        if growth.memory >= least:
            text = f"each episode leaves {growth.memory / _MIB:.1f} MiB of memory behind"
            leaks.append(Finding(level, text, "drop what it holds, in close() at the latest"))
            break
    yield from leaks or [Finding("good", "an episode leaves nothing behind in its process")]


def _kept(growth: Usage, what: str) -> bool:
    return float(getattr(growth, what)) >= 0.5


def _left(growth: Usage, what: str) -> tuple[str, str]:
    kind, _, advice = _KEPT[what].partition(": ")
    return f"each episode leaves {getattr(growth, what):.1f} {kind} behind", advice


def _ends(trial: Trial) -> Finding:
    endless = sum(not each.done for each in trial.whole)
    return judged(
        not endless,
        f"{endless} of {len(trial.whole)} episodes did not end within {trial.turns} turns"
        if endless
        else "every episode ends by itself",
        "set done after some turns; else rollout.max_turns ends it, with the rewards so far",
    )


def _rewards(trial: Trial) -> Finding:
    returns = [sum(result.reward for result in each.results) for each in trial.whole]
    if min(returns) == max(returns) and len(returns) > 1:
        return Finding(
            "warning",
            f"every episode returns {returns[0]:g}: there is nothing to learn from",
            "reward a part of the way too, or begin with a model that succeeds now and then",
        )
    return Finding("good", f"returns are from {min(returns):g} to {max(returns):g}")


def _outcomes(trial: Trial) -> Iterator[Finding]:
    last = [each.results[-1] for each in trial.whole if each.done]
    told = Counter(str(result.info["outcome"]) for result in last if "outcome" in result.info)
    if told:
        counted = ", ".join(f"{name} {count}" for name, count in told.most_common())
        yield Finding("good", f"outcomes: {counted}")
    if told.total() < len(last):
        yield Finding(
            "note",
            f"{len(last) - told.total()} of {len(last)} episodes end without an outcome",
            'give info["outcome"], a word: it is counted in metrics and curves',
        )


def _observations(trial: Trial) -> Iterator[Finding]:
    shown = [message["content"] for each in trial.whole for message in each.messages]
    sizes = sorted(map(len, shown)) or [0]
    text = f"messages have {statistics.median(sizes):.0f} characters, {sizes[-1]} at most"
    advice = "show less, or page it: all of it stays in the context of the episode"
    yield judged(sizes[-1] <= _LONG_OBSERVATION, text, advice)
    unnamed = set().union(*shown) - set(trial.characters)
    if trial.characters and unnamed:
        yield Finding(
            "warning",
            f"messages have characters that `characters` lacks: {''.join(sorted(unnamed))!r:.80}",
            "add them: the tiny model reads them as one unknown token",
        )


def _short(text: str) -> str:
    return f"{text[:40]!r}…" if len(text) > 40 else repr(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
