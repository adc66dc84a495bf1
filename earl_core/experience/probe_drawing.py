"""The probe's episodes, drawn of those that a run has kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

from earl_core.experience.probe import SIZE, ProbedEpisode
from earl_core.experience.rescoring import readable_episodes
from earl_core.run.branches import Branches
from earl_core.secrets.redactor import HIDDEN
from earl_core.trajectory.samples import derive_seed


def draw_probe(file: Path, seed: int, branches: Branches) -> list[ProbedEpisode]:
    """Draw the probe of an earlier iteration's kept episodes, from all parts of them, for the sake
    of several environments; not those with secrets.

    seed, branches: the run's. Raises `EpisodesDamaged`, and `OSError`.
    """
    played = int(file.parent.name)
    found = [each for each in readable_episodes(file, "scores") if HIDDEN not in json.dumps(each)]
    step = max(1, math.ceil(len(found) / SIZE))
    episodes = []
    for each in found[::step]:
        scores, number = each.pop("scores"), each["episode_id"]
        del each["given"]
        of_episode = derive_seed(branches.seed(seed, played), played, "rollout", number)
        episodes.append(
            ProbedEpisode(
                episode=each,
                scores=scores or {},
                seed=derive_seed(of_episode, "environment"),
            )
        )
    return episodes
