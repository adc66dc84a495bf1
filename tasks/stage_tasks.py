"""The task that does each stage or step of `earl_core.deployment.stages`."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import Task

from tasks.advantage import advantage
from tasks.collect import collect
from tasks.critic import critic
from tasks.demonstrate import demonstrate
from tasks.evaluate import evaluation
from tasks.publish import publish
from tasks.reference import reference
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.select import select
from tasks.stage import StageRef
from tasks.update import update
from tasks.value import value

TASKS: Mapping[str, Task[..., StageRef]] = {
    task.name: task
    for task in (
        *(select, rollout, collect, demonstrate, reference, value, reward, advantage),
        *(update, critic, publish, evaluation),
    )
}
"""Tasks by the stage's name. Each takes the run, the iteration, then references to the plan and to
what the stage reads; `select` the first two alone."""
