"""What an iteration will need is started side by side, as soon as its plan is known."""

from __future__ import annotations

from earl_core.control.worker_groups import WorkerGroups
from earl_core.deployment.plan import DeploymentPlan
from earl_core.run import RunDirectory


def start_ahead(
    groups: WorkerGroups, run: RunDirectory, iteration: int, plan: DeploymentPlan
) -> None:
    """Begin to start the groups of the stages that are not sealed yet; returns at once.

    In the order of need. A seal is a hint only: a stage whose seal does not count starts its group
    itself.
    """

    def unsealed(*stages: str) -> bool:
        return not all(run.stage_path(iteration, stage).is_file() for stage in stages)

    if iteration >= run.config.iterations:
        needed = {"rollout": unsealed("evaluation")}
    else:
        needed = {
            "rollout": unsealed("rollout"),
            "reference": unsealed("reference"),
            "update": unsealed("update", "publish"),
        }
    roles = [role for role, wanted in needed.items() if wanted and role in plan.stages]
    groups.start_ahead((role, plan.stages[role]) for role in roles)
