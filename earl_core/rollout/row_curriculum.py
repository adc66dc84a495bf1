"""Choice of the rows of a data set that an iteration plays, by the success of their last groups.

The policy's success at a row is uncertain: what is known of it is a Beta distribution, which begins
at Beta(1, 1) and counts the solved and unsolved episodes of the row's groups. For each iteration a
success is drawn from the distribution of every row (Thompson sampling), and the rows are ranked by
how near to 1/2 their draws are, where rewards of 0 and 1 vary most and a group is most likely to
have both. So does MoPPS (Qu et al. 2025, "Can Prompt Difficulty be Online Predicted for
Accelerating RL Finetuning of Reasoning Models?", arXiv 2507.04632), which forgets by a factor when
a row is played again. Here it forgets with each iteration, so that no row is starved: one that is
not played goes back to Beta(1, 1), whatever was known of it.

All follows from the run's seed, the iteration, and what earlier iterations have sealed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from earl_core.trajectory.samples import derive_seed

Results = npt.NDArray[np.int64]
"""Of an iteration: row, successes and episodes of each row that it has played, each a line."""


def results_of(counts: Sequence[Sequence[int]]) -> Results:
    """The results that a seal has as a list."""
    return np.asarray(counts, dtype=np.int64).reshape(-1, 3)


_FORGOTTEN = 1e-3
"""A weight below which results are not looked at any more."""


def horizon(memory: float) -> int:
    """The number of iterations whose results still count."""
    return 1 + math.floor(math.log(_FORGOTTEN) / math.log(memory)) if memory > 0 else 1


class Posterior:
    """What is known of the success at each row. results: those of iterations by how many came
    after them, 0 for the newest. rows: how many there are. memory: weight of an iteration's results
    relative to those of the next."""

    def __init__(self, results: Mapping[int, Results], rows: int, memory: float) -> None:
        self.alpha, self.beta = np.ones(rows), np.ones(rows)
        for age in sorted(results):
            counts = results[age]
            weight = 1.0 if age == 0 else memory**age
            # Prompts that were played before there was a curriculum are counted on and on.
            at = counts[:, 0] % rows
            np.add.at(self.alpha, at, weight * counts[:, 1])
            np.add.at(self.beta, at, weight * (counts[:, 2] - counts[:, 1]))

    @property
    def known(self) -> float:
        """The share of rows of which something is known."""
        return float(np.mean(self.alpha + self.beta > 2))

    def expected(self, rows: Sequence[int]) -> float:
        """The mean of the success that is expected at these rows."""
        alpha, beta = self.alpha[list(rows)], self.beta[list(rows)]
        return float(np.mean(alpha / (alpha + beta)))

    def ranking(self, seed: int, iteration: int, label: str) -> npt.NDArray[np.int64]:
        """All rows, each once, the one to play first in front. seed: the run's. label: of the
        environment."""
        key = derive_seed(seed, iteration, "rows", label)
        generator = np.random.Generator(np.random.Philox(key=key))
        draws = generator.beta(self.alpha, self.beta)
        return np.argsort(np.abs(draws - 0.5), kind="stable")
