"""The rows of each iteration, from what a run directory has sealed."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.config import parse_config
from earl_core.control.prompt_waves import whole_iteration
from earl_core.control.row_draws import RowDraws
from earl_core.dispatch import Manifest, ManifestError
from earl_core.rollout.row_curriculum import Posterior, results_of
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from tests.run.test_group_draws import SIZE, draws_of, seal
from tests.run.test_run_directory import config_in

COUNT = 9


def opened(directory: Path, mixed: bool, stream: bool = True, memory: float = 0.9) -> RunDirectory:
    raw = config_in(directory).model_dump(exclude_unset=True)
    del raw["environment"]
    asked = {"name": "prompt", "options": {"path": "x"}, "curriculum": {"memory": memory}}
    if mixed:
        raw["environments"] = [{**asked, "label": "sums"}, {"name": "connect_four"}]
    else:
        raw["environment"] = asked
    raw["algorithm"] = {"importance_correction": {}}
    raw["schedule"] = {"staleness": 1, "mode": "stream"} if stream else {}
    return RunDirectory.open(parse_config(raw))


def reward(run: RunDirectory, batch: int, rows: dict[str, list[list[int]]]) -> None:
    """Seal the successes of an iteration's rows."""
    given = {"run": run.uid, "iteration": batch, "stage": "reward", "key": "k"}
    run.seal(Manifest(**given, policy_version=batch, outputs={"rows": rows}))


def of_batch(run: RunDirectory, batch: int, label: str) -> list[tuple[str, int]]:
    """As whoever opens the run now has them."""
    draws = draws_of(run, {label: COUNT})
    return [draws.of(batch * SIZE + place) for place in range(SIZE)]


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_follow_from_what_is_trained_before_a_group_may_begin(
    tmp_path: Path, mixed: bool
) -> None:
    """Each iteration's are those of a ranking by the results of iterations up to k - 2, whoever
    asks when; a run that goes back has other ones by other results."""
    run, label = opened(tmp_path, mixed), "sums" if mixed else ""
    draws, drawn, sealed = draws_of(run, {label: COUNT}), [], {}
    for batch in range(6):
        if batch >= 2:
            rows = sorted({row for each, row in drawn[batch - 2] if each == label})
            sealed[batch - 2] = [[row, row % 3, 2] for row in rows]
            reward(run, batch - 2, {label: sealed[batch - 2]})
        drawn.append([draws.of(batch * SIZE + place) for place in range(SIZE)])
        seal(run, draws, batch)
        draws.settle(batch)
        assert of_batch(run, batch, label) == drawn[-1]
        # Ages are counted from the newest iteration that may be known.
        known = {batch - 2 - each: results_of(sealed[each]) for each in range(max(0, batch - 1))}
        posterior = Posterior(known, COUNT, 0.9)
        ranking = posterior.ranking(run.config.seed, batch, label).tolist()
        own = [row for each, row in drawn[-1] if each == label]
        assert own == ranking[: len(own)]
        assert len(own) == (SIZE // 2 if mixed else SIZE)
        of = "of/sums/rows" if mixed else "rows"
        assert draws.metrics(batch) == {
            f"{of}/known_share": posterior.known,
            f"{of}/expected_success": posterior.expected(own),
        }
    if mixed:
        others = [prompt for each in drawn for label, prompt in each if label == "connect_four"]
        assert others == [*range(3 * SIZE)]
    run.stage_path(3, "reward").unlink()
    with pytest.raises(ManifestError):
        of_batch(run, 5, label)
    # An iteration that has imitated has none, whatever the settings are now.
    given = {"run": run.uid, "iteration": 3, "stage": "demonstrate", "key": "k"}
    run.seal(Manifest(**given, policy_version=3, outputs={}))
    assert of_batch(run, 4, label) == drawn[4]
    assert len(of_batch(run, 5, label)) == SIZE
    run.stage_path(3, "demonstrate").unlink()
    hopeless = sorted({row for each, row in drawn[5] if each == label})
    reward(run, 3, {label: [[row, 0, 40] for row in hopeless]})
    draws.settle(4)
    again = [draws.of(5 * SIZE + place) for place in range(SIZE)]
    assert again == of_batch(run, 5, label) != drawn[5]
    assert of_batch(run, 4, label) == drawn[4]
    run.close()


def test_waves_go_on_in_the_same_ranking_and_few_rows_come_again(tmp_path: Path) -> None:
    run = opened(tmp_path, mixed=False, stream=False)
    rows = RowDraws(run, {"": COUNT})
    wave = whole_iteration(run, 0)
    counted = [("", prompt) for prompt in range(wave.first, wave.first + 2 * COUNT + 1)]
    whole = rows.of(0, counted, wave.began)[0]
    ranking = [row for _, row in whole[:COUNT]]
    assert sorted(ranking) == [*range(COUNT)]
    assert [row for _, row in whole] == [*ranking, *ranking, ranking[0]]
    parts = [rows.of(0, part, wave.began)[0] for part in (counted[:5], counted[5:])]
    assert parts[0] + parts[1] == whole
    run.close()


def test_another_staleness_or_rule_plays_groups_anew(tmp_path: Path) -> None:
    run = opened(tmp_path, mixed=False)
    keys = {GroupBatches(run).key(0)}
    schedule = run.config.schedule.model_copy(update={"staleness": 2})
    run.config = run.config.model_copy(update={"schedule": schedule})
    keys.add(GroupBatches(run).key(0))
    assert len(keys) == 2
    run.close()
    run = opened(tmp_path, mixed=False, memory=0.5)
    assert GroupBatches(run).key(0) not in keys
    run.close()
