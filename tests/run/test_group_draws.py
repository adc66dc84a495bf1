"""What the groups of a stream play, where a run has several environments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from earl_core.config import parse_config
from earl_core.config.environment import CurriculumConfig
from earl_core.control.group_draws import GroupDraws
from earl_core.control.row_draws import RowDraws
from earl_core.dispatch import Manifest, ManifestError
from earl_core.experience.group_returns import GroupReturns
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from tests.run.test_run_directory import config_in

SIZE = 4


def opened(
    directory: Path, weight: float, curriculum: dict[str, float] | None = None
) -> RunDirectory:
    raw = config_in(directory).model_dump(exclude_unset=True)
    del raw["environment"]
    games = ("tic_tac_toe", "connect_four")
    raw["environments"] = [
        {"name": name, "weight": each} for name, each in zip(games, (1, weight), strict=True)
    ]
    raw["curriculum"] = curriculum
    raw["schedule"] = {"staleness": 1, "mode": "stream"}
    raw["algorithm"] = {"importance_correction": {}}
    return RunDirectory.open(parse_config(raw))


def draws_of(run: RunDirectory, counts: Mapping[str, int] | None = None) -> GroupDraws:
    return GroupDraws(run, RowDraws(run, counts or {}))


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
    draws = draws_of(run)
    ahead = [draws.of(group) for group in (9, 8, 11, 10)]
    played = [draws.of(group) for group in range(2 * SIZE)]
    assert [draws.of(group) for group in (9, 8, 11, 10)] == ahead
    for batch in (0, 1):
        seal(run, draws, batch)
    draws.settle(2)
    assert [draws.of(group) for group in (9, 8, 11, 10)] == ahead
    # Whoever goes on with the run draws the same.
    again = draws_of(run)
    assert [again.of(group) for group in (9, 8, 11, 10)] == ahead
    assert again.outputs(2) == draws.outputs(2)
    run.close()

    run = opened(tmp_path, 3)
    other = draws_of(run)
    played += [other.of(group) for group in range(2 * SIZE, 6 * SIZE)]
    run.close()
    prompts = defaultdict(list)
    for label, prompt in played:
        prompts[label].append(prompt)
    assert prompts == {"tic_tac_toe": [*range(8)], "connect_four": [*range(16)]}


def reward(run: RunDirectory, batch: int, groups: dict[str, list[list[float]]]) -> None:
    """Seal the returns of each environment's groups."""
    returns = {label: GroupReturns.of(each).model_dump() for label, each in groups.items()}
    run.seal(
        Manifest(
            run=run.uid,
            iteration=batch,
            stage="reward",
            key="k",
            policy_version=batch,
            outputs={"returns": returns},
        )
    )


def test_a_curriculum_learns_from_what_is_trained_before_a_group_may_begin(tmp_path: Path) -> None:
    """With the staleness s that is iteration k - 1 - s, and nothing later, whoever asks when."""
    run = opened(tmp_path, 1, {"memory": 0.0, "least_share": 0.2})
    draws = draws_of(run)
    drawn = []
    for batch in range(8):
        # Groups of the batch may begin as soon as this is sealed.
        if batch >= 2:
            reward(run, batch - 2, {"tic_tac_toe": [[0.0, 1.0]], "connect_four": [[0.5, 0.5]]})
        drawn.append([draws.of(batch * SIZE + place) for place in range(SIZE)])
        if batch >= 1:
            seal(run, draws, batch - 1)
            draws.settle(batch)
        assert [draws_of(run).of(batch * SIZE + place) for place in range(SIZE)] == drawn[-1]
    labels = [[label for label, _ in each] for each in drawn]
    assert [each.count("connect_four") for each in labels[:2]] == [2, 2]
    # A fifth of the prompts follows the weights: a tenth is this game's.
    assert sum(each.count("connect_four") for each in labels[2:]) in (2, 3)
    for name in ("tic_tac_toe", "connect_four"):
        prompts = [prompt for each in drawn for label, prompt in each if label == name]
        assert prompts == [*range(len(prompts))]
    # In a run that goes back, what a batch learns from is made anew.
    run.stage_path(5, "reward").unlink()
    reward(run, 5, {"tic_tac_toe": [[0.5, 0.5]], "connect_four": [[0.0, 1.0]]})
    draws.settle(6)
    again = [
        [each.of(7 * SIZE + place) for place in range(SIZE)] for each in (draws, draws_of(run))
    ]
    assert again[0] == again[1] != drawn[7]
    run.close()


def test_another_staleness_draws_otherwise_so_that_groups_are_played_anew(tmp_path: Path) -> None:
    run = opened(tmp_path, 1)
    keys = []
    for curriculum in (CurriculumConfig(), None):
        for staleness in (1, 2):
            schedule = run.config.schedule.model_copy(update={"staleness": staleness})
            changed = {"schedule": schedule, "curriculum": curriculum}
            run.config = run.config.model_copy(update=changed)
            keys.append(GroupBatches(run).key(0))
    assert len(set(keys[:2])) == 2
    assert len(set(keys[2:])) == 1
    run.close()


def test_a_damaged_seal_is_told_of_and_no_prompt_is_guessed(tmp_path: Path) -> None:
    """One that does not say where its batch has ended is passed over, because an older one says
    it."""
    run = opened(tmp_path, 1)
    draws = draws_of(run)
    for batch in (0, 1):
        seal(run, draws, batch)
    wanted = draws.of(2 * SIZE)
    path = run.stage_path(1, "collect")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"cursor"', b'"Cursor"'))
    with pytest.raises(ManifestError, match="collect"):
        draws_of(run).of(2 * SIZE)
    sealed = run.manifest(0, "collect")
    path.unlink()
    run.seal(sealed.model_copy(update={"iteration": 1, "outputs": {}}))
    assert draws_of(run).of(2 * SIZE) == wanted
    run.close()
