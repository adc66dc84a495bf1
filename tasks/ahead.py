"""What an iteration will need is started side by side, as soon as its plan is known."""

from __future__ import annotations

from earl_core.selector import DeploymentPlan
from tasks.session import Session


def start_ahead(session: Session, iteration: int, plan: DeploymentPlan) -> None:
    """Begin to start the groups of the stages that are not sealed yet; returns at once.

    A seal is a hint only: a stage whose seal does not count starts its group itself.
    """

    def unsealed(*stages: str) -> bool:
        paths = (session.run.stage_path(iteration, stage) for stage in stages)
        return not all(path.is_file() for path in paths)

    if iteration >= session.config.iterations:
        needed = {"rollout": unsealed("evaluation")}
    else:
        needed = {
            "rollout": unsealed("rollout"),
            "update": unsealed("update", "publish"),
            "reference": unsealed("reference"),
        }
    roles = [role for role, wanted in needed.items() if wanted and role in plan.stages]
    session.groups.start_ahead((role, plan.stages[role]) for role in roles)
