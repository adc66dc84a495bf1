"""Rules over manifests and checkpoints that say which sealed data a run still needs.

They delete nothing. The run directory releases shards and removes checkpoints; the run controller
deletes published weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from earl_core.dispatch.shards.manifest import Manifest
from earl_core.run.policy_versions import carried


def keeps_shards(manifest: Manifest, covered: int) -> bool:
    """Tell whether the run still needs the shards of a sealed manifest.

    covered: the last iteration that a STABLE checkpoint covers, -1 for none. Whatever came after it
    may be repeated from them.
    """
    return manifest.iteration > covered


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


def kept_checkpoints(stable: Sequence[int], keep_last: int, best: int | None) -> set[int]:
    """Iterations whose checkpoint stays: the last ones, and the one that was evaluated best.
    stable: ascending."""
    return {*stable[-keep_last:], *([] if best is None else [best])}
