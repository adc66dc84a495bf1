"""Rules over manifests and checkpoints that say which sealed data a run still needs.

They delete nothing. The run directory releases shards and removes checkpoints; the run controller
deletes published weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from earl_core.dispatch.shards.manifest import Manifest
from earl_core.run.policy_versions import carried

_TRAINED_AGAIN = ("collect", "reward")
"""Stages whose rows later iterations read again, where they train groups again."""


def keeps_shards(manifest: Manifest, covered: int, trained_again: int = 0) -> bool:
    """Tell whether the run still needs the shards of a sealed manifest.

    covered: the last iteration that a STABLE checkpoint covers, -1 for none. Whatever came after it
    may be repeated from them. trained_again: iterations after its own in which a group may be
    trained again.
    """
    longer = trained_again if manifest.stage in _TRAINED_AGAIN else 0
    return manifest.iteration + longer > covered


def first_kept(iteration: int, trained_again: int) -> int:
    """The first iteration whose groups an iteration may train again; its own where none are.
    trained_again: as of `keeps_shards`."""
    return max(0, iteration - trained_again)


def keeps_weights(published: Manifest, oldest: int, newest: int) -> bool:
    """Tell whether the run still needs published weights.

    oldest: the oldest policy version that a rollout to come is played with. newest: the one that
    was made last; later ones are of iterations that are done again.
    """
    return oldest <= carried(published) <= newest


def kept_weights(publications: Iterable[Manifest], oldest: int, newest: int) -> list[Manifest]:
    """Return the published weights that the run still needs. publications: the newest version
    first; none is read after the first that is too old."""
    young = takewhile(lambda each: carried(each) >= oldest, publications)
    return [each for each in young if keeps_weights(each, oldest, newest)]


_STRETCH = 4
"""Iterations: a finding that is told in one may begin up to three earlier."""


def good_checkpoints(stable: Sequence[int]) -> set[int]:
    """Iterations whose checkpoint the guard may have the run go back to before anything is found:
    the first in each of the last two stretches of iterations, so that one is older than what has
    begun and has not been found yet. stable: ascending."""
    stretch = max(stable, default=0) // _STRETCH
    firsts = {each // _STRETCH: each for each in reversed(stable)}
    return {firsts[each] for each in (stretch - 1, stretch) if each in firsts}


def kept_checkpoints(stable: Sequence[int], keep_last: int, best: int | None) -> set[int]:
    """Iterations whose checkpoint stays: the last ones, and the one that was evaluated best.
    stable: ascending."""
    return {*stable[-keep_last:], *([] if best is None else [best])}
