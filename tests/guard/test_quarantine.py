"""Episodes that are not to be believed, in iterations that train their groups again."""

from __future__ import annotations

from pathlib import Path

from earl_core.control.guarding import quarantined_before
from earl_core.dispatch import Manifest
from earl_core.guard.decision import GUARD, Decision
from earl_core.run import RunDirectory
from tests.run.test_run_directory import config_in


def test_what_left_its_group_stays_out_where_the_group_is_trained_again(tmp_path: Path) -> None:
    """Four groups of two episodes an iteration: group 5, of iteration 1, has episodes 10 and 11."""
    run = RunDirectory.open(config_in(tmp_path))

    def manifest(iteration: int, stage: str, **outputs: object) -> Manifest:
        return Manifest(
            run=run.uid,
            iteration=iteration,
            stage=stage,
            key="k",
            policy_version=iteration,
            outputs=outputs,
        )

    try:
        left = Decision(quarantined=(8, 11)).model_dump(mode="json")
        run.seal(manifest(1, "advantage", **{GUARD: left}))
        again = manifest(2, "collect", replayed={"groups": [2, 5, 6]})
        assert quarantined_before(run, again) == {11}
        assert quarantined_before(run, manifest(2, "rollout")) == set()
    finally:
        run.close()
