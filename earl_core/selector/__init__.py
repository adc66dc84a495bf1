"""Parallelism Selector: picks each stage's deployment before it runs. Pure, imports no torch."""

from earl_core.selector.deployment import DeploymentPlan, StageDeployment
from earl_core.selector.selection import Hardware, ModelShape, SelectionInput, Statistics, select

__all__ = [
    "DeploymentPlan",
    "Hardware",
    "ModelShape",
    "SelectionInput",
    "StageDeployment",
    "Statistics",
    "select",
]
