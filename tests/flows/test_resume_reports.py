"""Public reports of what goes wrong when an asynchronous run is resumed, each as a case.

One run plays them all: a stream of groups, one of seven fifteen times as long as the others, which
is killed before an update, while groups beyond it are sealed and others unfinished; then resumed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from earl_core.config import load_config
from earl_core.config.stage_keys import stage_settings
from earl_core.run.record import read_lines
from earl_core.system.errors import ConfigError
from tests.flows.runs import KILLED, Runs
from tests.flows.test_stream import BATCH, SIZE, assert_once_and_young, stream, train

STALENESS, ITERATIONS, KILLED_IN = 2, 6, 2
ASKED = (
    *stream(STALENESS, ITERATIONS),
    f"checkpoint.keep_last={ITERATIONS}",
    "update.zero_advantage=compute",
)
LONG = [group for group in range(ITERATIONS * BATCH) if group % 7 == 6]


class Story(NamedTuple):
    """The run, what `groups.jsonl` held when it was killed, and the episodes of each iteration."""

    runs: Runs
    sealed: list[dict[str, Any]]
    rows: list[list[dict[str, Any]]]

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_lines(self.runs.run() / "groups.jsonl")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """One line of metrics for each iteration: the last."""
        return list({int(line["iteration"]): line for line in self.runs.metrics()}.values())


@pytest.fixture(scope="module")
def story(module_runs: Runs) -> Story:
    runs = module_runs
    process = runs.start(*ASKED, fault=f"collect.after@{KILLED_IN}=kill")
    assert process.wait(300) == KILLED
    runs.wait_for_workers_to_end()
    sealed = read_lines(runs.run() / "groups.jsonl")
    train(runs, *ASKED)
    runs.assert_learnt()
    kept = [runs.run() / f"iterations/{k:06d}/episodes.parquet" for k in range(ITERATIONS)]
    return Story(runs, sealed, [pq.read_table(path).to_pylist() for path in kept])


def test_what_was_played_and_not_trained_is_not_skipped(story: Story) -> None:
    """OpenRLHF #1322: the buffer was lost, the cursor was not, and its prompts were skipped."""
    ahead = [line["group"] for line in story.sealed if line["group"] >= KILLED_IN * BATCH]
    assert ahead, "the kill has found no group that waited"
    trained = {row["group_id"] for rows in story.rows for row in rows}
    assert trained == set(range(ITERATIONS * BATCH))


def test_what_was_played_and_not_trained_is_used_and_not_played_again(story: Story) -> None:
    """NeMo-RL #3410: restored groups were deleted although they could be trained on."""
    found = {line["group"]: line for line in story.journal}
    for line in story.sealed:
        assert found[line["group"]] == line


def test_what_was_in_flight_is_not_lost_and_the_long_keep_their_share(story: Story) -> None:
    """NeMo-RL #3599: 675 of 736 prompts in flight were skipped, which were the long ones."""
    turns: dict[int, set[int]] = {}
    for row in (row for rows in story.rows for row in rows):
        turns.setdefault(row["group_id"], set()).add(row["turns"])
    assert LONG
    assert all(turns[group] == {30} for group in LONG)
    assert all(turns[group] == {2} for group in turns if group not in LONG)


def test_the_rest_of_a_batch_is_not_thrown_away(story: Story) -> None:
    """NeMo-RL #3599, its second cause: of a prefetched batch only what filled a gap was kept."""
    for number, rows in enumerate(story.rows):
        wanted = range(number * BATCH, (number + 1) * BATCH)
        assert Counter(row["group_id"] for row in rows) == dict.fromkeys(wanted, SIZE)


def test_a_slow_group_does_not_hold_back_where_a_resume_begins(story: Story) -> None:
    """TRL #7274: one group that was never trained had all after it trained twice."""
    episodes = Counter(row["episode_id"] for rows in story.rows for row in rows)
    assert set(episodes.values()) == {1}
    again = [k for k, stage in story.runs.executed("sealed") if stage == "update"]
    assert Counter(again) == dict.fromkeys(range(ITERATIONS), 1)


def test_a_resume_plays_nothing_to_catch_up(story: Story) -> None:
    """TRL #5863: batches were generated and thrown away until the saved step was reached."""
    before, whole = len(story.sealed), len(story.journal)
    assert whole - before == ITERATIONS * BATCH - len({line["group"] for line in story.sealed})


def test_a_batch_with_a_straggler_ends(story: Story) -> None:
    """NeMo-RL #3238: a batch with a long episode was drawn again and stood still for ever."""
    for group in LONG:
        assert group in {row["group_id"] for row in story.rows[group // BATCH]}


def test_no_token_is_older_than_the_bound_after_a_resume(story: Story) -> None:
    """AReaL #1388: after a recovery groups were counted as of another version than sampled them."""
    assert_once_and_young(story.runs.run(), STALENESS, ITERATIONS)


def test_ages_are_those_of_the_tokens(story: Story) -> None:
    """AReaL #1388: the metric, too."""
    for number, (line, rows) in enumerate(zip(story.lines, story.rows, strict=True)):
        sampled = np.concatenate([row["token_versions"] for row in rows])
        ages = number - sampled[sampled >= 0]
        assert line["update/age_max"] == ages.max()
        assert line["update/age_mean"] == pytest.approx(ages.mean())


def test_nothing_is_dropped_because_it_is_old(story: Story) -> None:
    """prime-rl #2960, tinker-cookbook #822: what was stale was dropped, so the slow was never
    trained."""
    assert sum(line.get("advantage/groups_dropped", 0) for line in story.lines) == 0
    assert all(len(rows) == BATCH * SIZE for rows in story.rows)


def test_a_resumed_run_takes_its_steps(story: Story) -> None:
    """verl #5725: a resumed run ended with success after no step."""
    assert [int(line["iteration"]) for line in story.lines] == list(range(ITERATIONS))
    assert all(line["update/optimizer_steps"] >= 1 for line in story.lines)
    assert all(line["update/grad_norm"] > 0 for line in story.lines)


def test_a_checkpoint_holds_the_weights_of_its_own_iteration(story: Story) -> None:
    """NeMo-RL #3312: weights of the iteration before were saved."""
    kept = [story.runs.weights(number) for number in range(ITERATIONS)]
    assert len(set(kept)) == ITERATIONS


def test_counters_go_on(story: Story) -> None:
    """SkyRL #2010: counts began at 0 again, and what is decided by them was skipped."""
    rates = [line["update/learning_rate"] for line in story.lines]
    undisturbed = np.interp(range(ITERATIONS), [0, ITERATIONS - 1], [rates[0], rates[-1]])
    assert rates == pytest.approx(undisturbed.tolist(), rel=1e-6)
    versions = [max(v for row in rows for v in row["token_versions"]) for rows in story.rows]
    assert versions == sorted(versions)


def test_a_run_that_has_ended_does_not_begin_again(story: Story) -> None:
    """OpenRLHF #1322: a loader that ended on the edge of a batch began again."""
    before = story.journal
    train(story.runs, *ASKED)
    assert story.journal == before


def test_another_size_of_batches_is_refused_before_it_miscounts(story: Story) -> None:
    """SkyRL #2010: the state of a run with other batches ended in a failed assertion."""
    other = [f"rollout.prompts_per_iteration={BATCH + 1}", f"iterations={ITERATIONS + 2}"]
    with pytest.raises(ConfigError, match="prompts_per_iteration"):
        train(story.runs, *ASKED, *other)


def test_no_staleness_is_the_synchronous_run(story: Story) -> None:
    """verl #6780: with the staleness at 0 another run was trained than without the schedule."""
    plain = load_config(str(story.runs.config), ["name=plain"])
    asked = load_config(str(story.runs.config), ["name=plain", "schedule={staleness: 0}"])
    for stage in ("rollout", "reward", "advantage", "update"):
        assert stage_settings(plain, stage) == stage_settings(asked, stage)
