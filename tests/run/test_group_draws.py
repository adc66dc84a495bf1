"""What the groups of a stream play, where a run has several environments."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from earl_core.config import parse_config
from earl_core.control.group_draws import GroupDraws
from earl_core.dispatch import Manifest, ManifestError
from earl_core.run import RunDirectory
from tests.run.test_run_directory import config_in

SIZE = 4


def opened(directory: Path, weight: float) -> RunDirectory:
    raw = config_in(directory).model_dump(exclude_unset=True)
    del raw["environment"]
    games = ("tic_tac_toe", "connect_four")
    raw["environments"] = [
        {"name": name, "weight": each} for name, each in zip(games, (1, weight), strict=True)
    ]
    raw["schedule"] = {"staleness": 1, "mode": "stream"}
    raw["algorithm"] = {"importance_correction": {}}
    return RunDirectory.open(parse_config(raw))


def seal(run: RunDirectory, draws: GroupDraws, batch: int) -> None:
    run.seal(
        Manifest(
            run=run.uid,
            iteration=batch,
            stage="collect",
            key="k",
            policy_version=batch,
            outputs=draws.outputs(batch),
        )
    )


def test_a_mixture_goes_on_where_the_last_seal_has_it_under_other_weights_too(
    tmp_path: Path,
) -> None:
    """No prompt is skipped or comes twice."""
    run = opened(tmp_path, 1)
    draws = GroupDraws(run)
    ahead = [draws.of(group) for group in (9, 8, 11, 10)]
    played = [draws.of(group) for group in range(2 * SIZE)]
    assert [draws.of(group) for group in (9, 8, 11, 10)] == ahead
    for batch in (0, 1):
        seal(run, draws, batch)
    draws.settle(2)
    assert [draws.of(group) for group in (9, 8, 11, 10)] == ahead
    # Whoever goes on with the run draws the same.
    again = GroupDraws(run)
    assert [again.of(group) for group in (9, 8, 11, 10)] == ahead
    assert again.outputs(2) == draws.outputs(2)
    run.close()

    run = opened(tmp_path, 3)
    other = GroupDraws(run)
    played += [other.of(group) for group in range(2 * SIZE, 6 * SIZE)]
    run.close()
    prompts = defaultdict(list)
    for label, prompt in played:
        prompts[label].append(prompt)
    assert prompts == {"tic_tac_toe": [*range(8)], "connect_four": [*range(16)]}


def test_a_damaged_seal_is_told_of_and_no_prompt_is_guessed(tmp_path: Path) -> None:
    """One that does not say where its batch has ended is passed over, because an older one says
    it."""
    run = opened(tmp_path, 1)
    draws = GroupDraws(run)
    for batch in (0, 1):
        seal(run, draws, batch)
    wanted = draws.of(2 * SIZE)
    path = run.stage_path(1, "collect")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"cursor"', b'"Cursor"'))
    with pytest.raises(ManifestError, match="collect"):
        GroupDraws(run).of(2 * SIZE)
    sealed = run.manifest(0, "collect")
    path.unlink()
    run.seal(sealed.model_copy(update={"iteration": 1, "outputs": {}}))
    assert GroupDraws(run).of(2 * SIZE) == wanted
    run.close()
