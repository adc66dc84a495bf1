"""The guard's probe: recorded episodes that reward functions score, and environments replay, again.

It lies in the run directory as `probe.json`: up to `SIZE` of the first episodes that were kept,
drawn once. Its sources are asked for all of it right away; those that answer otherwise than they
were recorded do so by themselves (a judge, a clock), or were wrong just then: they are judged once
they have answered as recorded for a while. Texts in it are those of the kept episodes, without
secrets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from earl_core.guard.seen import HUGE, Bounds
from earl_core.run.episodes import PROBE_NAME
from earl_core.system.files import canonical_json, read_file, write_atomic
from earl_core.system.processes import host_name

logger = logging.getLogger(__name__)

PROBE = "probe"
"""Among the outputs of the manifests of rollout and reward: a dumped `Asked`."""

SIZE = 32
ASKED = 8
"""Episodes of the probe that an iteration asks for, all in four iterations. A source that goes
wrong for one episode in five is found within three but in one run of two hundred."""

STEADY = 12
"""Iterations in which a source that answered otherwise the first time answers as recorded before it
is judged: the probe is asked for three times then, which a source that errs by itself in one answer
of twenty survives once in 140 times."""

_SLOW, _SHARE = 0.02, 16
"""Seconds of an answer from which a source is slow: it is asked for one episode in so many that the
iteration plays, at most 6 % of its work, which is a part of the iteration."""

_CLOSE = 1e-6


class ProbedEpisode(BaseModel):
    """episode: as reward functions get it. scores: what functions gave, by label. seed: of the
    environment."""

    model_config = ConfigDict(extra="forbid")

    episode: dict[str, Any]
    scores: dict[str, float]
    seed: int

    @property
    def answers(self) -> list[str]:
        """What the policy said."""
        return [m["content"] for m in self.episode["messages"] if m["role"] == "assistant"]

    @property
    def observations(self) -> list[str]:
        """What the environment said, its last words included."""
        messages = self.episode["messages"]
        shown = [each["content"] for each in messages if each["role"] == "user"]
        return [*shown, self.episode["closing"]]


class Probe(BaseModel):
    """settings: a digest of those of the sources. since: the first iteration that had them.
    episodes: none before one of these has ended. settled: sources that have answered the whole of
    it once, each when it could. off: sources that are asked no more. slow: that are asked less.
    unsteady: that answered otherwise then and are not judged, with the last iteration in which they
    did."""

    model_config = ConfigDict(extra="forbid")

    settings: str
    since: int = 0
    episodes: list[ProbedEpisode] = []
    settled: list[str] = []
    off: list[str] = []
    slow: list[str] = []
    unsteady: dict[str, int] = {}

    @property
    def name(self) -> str:
        """What tells it from the run's earlier ones."""
        return f"{self.settings[:16]}@{self.since}"

    def places(
        self, source: str, iteration: int, episodes: int, found: Container[int] = ()
    ) -> list[int]:
        """The episodes that an iteration asks a source for: those that were answered otherwise
        lately, and all in turn. episodes: how many it plays. found: ids of the former."""
        size = len(self.episodes)
        if source in self.off:
            return []
        if source not in self.settled:
            return list(range(size))
        count = self._count(source, episodes)
        again = [at for at, e in enumerate(self.episodes) if e.episode["episode_id"] in found]
        turn = [(iteration * count + at) % size for at in range(count)]
        return [*again, *(at for at in turn if at not in again)][:count]

    def turn(self, source: str, episodes: int) -> int:
        """Iterations in which a source is asked for all, in turn. episodes: as of `places`."""
        return math.ceil(len(self.episodes) / self._count(source, episodes))

    def _count(self, source: str, episodes: int) -> int:
        count = min(ASKED, len(self.episodes))
        return min(count, max(1, episodes // _SHARE)) if source in self.slow else count

    def after(self, asked: Sequence[Asked], iteration: int) -> tuple[Probe, dict[str, str]]:
        """The probe when these answers of an iteration are known, however often it is asked; and
        what changes by them in the way that sources are judged, each the rest of a sentence."""
        silent = "gives no answer, and takes long: changes in it cannot be noticed"
        told = {s: silent for part in asked for s in part.silent if s not in self.off}
        unsteady = dict(self.unsteady)
        for part, source in [(each, source) for each in asked for source in each.asked]:
            if source in part.otherwise and (source in unsteady or source not in self.settled):
                if source not in unsteady:
                    told[source] = (
                        f"{part.text(source, 'a moment ago')}. It is judged once it has answered "
                        f"as recorded for {STEADY} iterations"
                    )
                unsteady[source] = iteration
            elif source in unsteady and iteration - unsteady[source] >= STEADY:
                del unsteady[source]
                told[source] = f"has answered as recorded for {STEADY} iterations, and is judged"
        sets = {
            "settled": {source for part in asked for source in part.asked},
            "off": {source for part in asked for source in part.silent},
            # Later a machine may have been busy.
            "slow": {source for part in asked for source in part.slow} - {*self.settled},
        }
        update = {name: sorted({*getattr(self, name), *more}) for name, more in sets.items()}
        return self.model_copy(update={**update, "unsteady": unsteady}), told

    def write(self, run: Path) -> None:
        """Put it into the run directory, with a checksum."""
        dumped = self.model_dump(mode="json")
        whole = {"sha256": _digest(dumped), **dumped}
        write_atomic(_path(run), canonical_json(whole))

    @classmethod
    def read(cls, run: Path) -> Probe | None:
        """The run's; None where there is none, or it is not as it was written."""
        try:
            whole = json.loads(read_file(_path(run)))
            if whole.pop("sha256") == _digest(whole):
                return cls.model_validate(whole)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        logger.warning("%s is damaged: it is drawn again", _path(run))
        return None


def _path(run: Path) -> Path:
    return run / PROBE_NAME


def _digest(dumped: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(dict(dumped))).hexdigest()


Places = Mapping[str, Sequence[int]]
"""By sources, the places of the probe's episodes that they are asked for."""


class Probed(NamedTuple):
    """of: the name of the probe; empty: it could not be read. episodes: of it, by the sources that
    are asked for them."""

    of: str = ""
    episodes: Mapping[str, Sequence[ProbedEpisode]] = {}


def probed_episodes(run: Path, places: Places) -> Probed:
    """These episodes of a run's probe; none where it cannot be read."""
    probe = Probe.read(run)
    if probe is None:
        return Probed()
    known = probe.episodes
    return Probed(
        probe.name,
        {
            source: [known[at] for at in asked if at < len(known)]
            for source, asked in places.items()
        },
    )


def of_probe(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What one of the results says of the probe; empty: none asked."""
    found = next((each[PROBE] for each in results if PROBE in each), None)
    return {} if found is None else {PROBE: found}


class Asked(BaseModel):
    """What came of asking for a part of the probe. of: its name. unread: the host on which it could
    not be read; empty: it was. asked: how many answers each
    source gave. otherwise: by source, what it said otherwise than before: (episode, one line).
    slow: sources that took long. silent: that took long and gave none."""

    of: str = ""
    unread: str = ""
    asked: dict[str, int] = {}
    otherwise: dict[str, list[tuple[int, str]]] = {}
    slow: list[str] = []
    silent: list[str] = []

    @classmethod
    def about(cls, probed: Probed) -> Asked:
        """Nothing yet, of these episodes. Made where sources are asked."""
        return cls(of=probed.of, unread="" if probed.of else host_name())

    @contextmanager
    def asking(self, source: str, number: int) -> Iterator[None]:
        """Enclose asking a source for so many answers: what takes long is noted, and what fails
        is told in the log, and says nothing."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            logger.warning("%s cannot be asked for recorded episodes", source, exc_info=error)
        if time.perf_counter() - started > _SLOW * number:
            (self.slow if self.asked.get(source) else self.silent).append(source)

    def text(self, source: str, when: str) -> str:
        """How a source answers otherwise, as part of a sentence that names no episode: their ids
        pass rules of redaction where they are shown. when: than what."""
        told = self.otherwise[source]
        return (
            f"answers {len(told)} of {self.asked[source]} recorded episodes otherwise than {when}: "
            f"the first of them gives {told[0][1]}"
        )

    def add(self, source: str, episode: int, difference: str) -> None:
        """Count an answer. difference: empty: it is the same."""
        self.asked[source] = self.asked.get(source, 0) + 1
        if difference:
            self.otherwise.setdefault(source, []).append((episode, difference))


def score_difference(before: float, now: float | None, bounds: Bounds = HUGE) -> str:
    """How two scores of an episode differ; empty: they are equal. now: None for no number.

    What is no number, or outside of what the source can give, is no difference: it is found in the
    iteration's own episodes, which leave their groups for it.
    """
    if now is None or not bounds[0] <= now <= bounds[1]:
        return ""
    same = math.isclose(before, now, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return "" if same else f"{now:.4g}, and was {before:.4g}"


def reply_difference(
    probed: ProbedEpisode, observations: Sequence[str], rewards: Sequence[float]
) -> str:
    """How an environment's replies to recorded answers differ from those recorded; empty: they are
    equal. observations: to `reset`, and to each answer. rewards: of the latter."""
    recorded = probed.episode["turn_rewards"]
    for turn, before in enumerate(probed.observations):
        now = observations[turn] if turn < len(observations) else "nothing"
        if turn and turn <= len(recorded):
            paid = rewards[turn - 1] if turn <= len(rewards) else 0.0
            if difference := score_difference(recorded[turn - 1], paid):
                return f"turn {turn} is paid {difference}"
        if before != now:
            return f"another observation after {turn} answers"
    return ""
