"""Parallelism Selector: picks each stage's deployment before it runs. Pure, imports no torch."""

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config.selector import SelectorConfig
from earl_core.deployment.plan import Basis, DeploymentPlan, Forbidden
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import NoFeasiblePlan, Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.choice.statistics import Statistics
from earl_core.selector.model.calibration import Calibration, Peak
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable

__all__ = [
    "Basis",
    "Calibration",
    "DeploymentPlan",
    "Forbidden",
    "Hardware",
    "ModelShape",
    "NoFeasiblePlan",
    "Peak",
    "Predictor",
    "ProfilePoint",
    "ProfileTable",
    "SelectionInput",
    "SelectorConfig",
    "StageDeployment",
    "Statistics",
    "select",
]
