"""The rows that an iteration plays where a curriculum chooses them, by what the run has sealed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from earl_core.rollout.mixture import Draw
from earl_core.rollout.row_curriculum import Posterior, Results, horizon, results_of
from earl_core.run import RunDirectory
from earl_core.run.branches import numbered
from earl_core.system.errors import EarlError

_Stamp = tuple[int, int, int] | None


class RowDraws:
    """Puts rows in the place of the prompts that environments count.

    Rows of iteration k follow from the rewards of iterations up to k - 1 - staleness, which are
    sealed whenever its episodes may begin. Nothing else is kept: whoever goes on with the run, or
    goes back, finds the same; in a branch, other rows, and none of those that it leaves out.
    counts: of prompts, by the labels of the environments that know how many they have.
    """

    def __init__(self, run: RunDirectory, counts: Mapping[str, int]) -> None:
        self._run, self._counts = run, dict(counts)
        self._read: dict[int, tuple[_Stamp, Mapping[str, Results]]] = {}

    def of(
        self, iteration: int, draws: Sequence[Draw], began: Mapping[str, int]
    ) -> tuple[list[Draw], dict[str, float]]:
        """The rows of these prompts of an iteration, and metrics of them.

        began: the first of the iteration's prompts, by label. No row comes twice in an iteration
        that plays no more than there are; else all come again in the same order. Raises
        `EarlError` where the branch leaves out all that there are.
        """
        played = {label for label, _ in draws} & self._run.config.row_curricula.keys()
        known = {label: self._posterior(iteration, label) for label in sorted(played)}
        seed = self._run.branches.seed(self._run.config.seed, iteration)
        without = self._run.branches.left_out(iteration)
        self._check_some_left(without)
        rankings = {
            label: self._ranked(label, each.ranking(seed, iteration, label), without)
            for label, each in known.items()
        }
        rows = []
        for label, prompt in draws:
            if label in rankings:
                place = (prompt - began.get(label, 0)) % len(rankings[label])
                prompt = int(rankings[label][place])
            elif label in without:
                prompt = numbered(prompt, without[label], self._counts.get(label, 0))
            rows.append((label, prompt))
        metrics = {}
        for label, posterior in known.items():
            of = f"of/{label}/rows" if label else "rows"
            chosen = [row for each, row in rows if each == label]
            metrics[f"{of}/known_share"] = posterior.known
            metrics[f"{of}/expected_success"] = posterior.expected(chosen)
        return rows, metrics

    def _ranked(
        self, label: str, rows: npt.NDArray[np.int64], without: Mapping[str, frozenset[int]]
    ) -> npt.NDArray[np.int64]:
        out = [number % self._counts[label] for number in without.get(label, ())]
        return rows[~np.isin(rows, out)] if out else rows

    def _check_some_left(self, without: Mapping[str, frozenset[int]]) -> None:
        for label, numbers in without.items():
            count = self._counts.get(label, 0)
            if count and len({number % count for number in numbers}) == count:
                named = f" of {label}" if label else ""
                raise EarlError(
                    f"the branches of {self._run.path} leave out all {count} prompts{named}: put "
                    "the data set right, and begin a run with the weights of a checkpoint (earl "
                    "train CONFIG --from RUN@N)"
                )

    def _posterior(self, iteration: int, label: str) -> Posterior:
        memory = self._run.config.row_curricula[label].memory
        newest = iteration - 1 - self._run.config.schedule.staleness
        looked_at = range(newest, max(-1, newest - horizon(memory)), -1)
        results = {newest - each: self._results(each)[label] for each in looked_at}
        return Posterior(results, self._counts[label], memory)

    def _results(self, iteration: int) -> Mapping[str, Results]:
        """The results of an iteration, none where it has none of a label. Read again where the file
        is another one, as in a run that has gone back. Raises `ManifestError`."""
        path = self._run.stage_path(iteration, "reward")
        status = path.stat() if path.exists() else None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size) if status else None
        if iteration not in self._read or self._read[iteration][0] != stamp:
            told = self._run.rewards(iteration).get("rows", {})
            found = defaultdict(_none, {label: results_of(each) for label, each in told.items()})
            self._read[iteration] = stamp, found
        return self._read[iteration][1]


def _none() -> Results:
    return results_of([])
