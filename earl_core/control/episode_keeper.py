"""Episodes kept while the update goes on, by a thread of its own, before their shards go."""

from __future__ import annotations

import logging
import threading

from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.run.episodes import remove_oldest, write_episodes

logger = logging.getLogger(__name__)


class EpisodeKeeper:
    """Writes one iteration's episodes at a time, as `tracking.keep_episodes` asks.

    What goes wrong costs a warning and a line of the ledger, never the run.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def begin(self, rollout: Manifest, reward: Manifest) -> None:
        """Keep the episodes of these sealed stages; returns at once."""
        if self._run.config.tracking.keep_episodes != "none":
            self.settle()
            self._thread = threading.Thread(
                target=self._keep, args=(rollout, reward), name="earl-episodes", daemon=True
            )
            self._thread.start()

    def settle(self) -> None:
        """Wait for what was begun, a stage's deadline at most."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._run.config.deadlines.stage)

    def _keep(self, rollout: Manifest, reward: Manifest) -> None:
        run, tracking, iteration = self._run, self._run.config.tracking, rollout.iteration
        most = tracking.keep_episodes if isinstance(tracking.keep_episodes, int) else None
        try:
            write_episodes(run.episodes_path(iteration), run.store, rollout, reward, most)
            remove_oldest(run.path, tracking.keep_episodes_bytes)
        except Exception as error:
            logger.warning("the episodes of iteration %d were not kept: %s", iteration, error)
            run.note(iteration, "episodes", f"not kept: {error}")
