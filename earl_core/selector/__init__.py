"""Parallelism Selector: picks each stage's deployment before it runs. Pure, imports no torch."""

from earl_core.config.selector import SelectorConfig
from earl_core.selector.deployment import Basis, DeploymentPlan, Forbidden, StageDeployment
from earl_core.selector.memory_model import Calibration, Peak
from earl_core.selector.policy import select
from earl_core.selector.predict import NothingFits, Predictor
from earl_core.selector.profile_table import ProfilePoint, ProfileTable
from earl_core.selector.selection import SelectionInput, experience_deployment
from earl_core.selector.shapes import Hardware, ModelShape
from earl_core.selector.statistics import Statistics

__all__ = [
    "Basis",
    "Calibration",
    "DeploymentPlan",
    "Forbidden",
    "Hardware",
    "ModelShape",
    "NothingFits",
    "Peak",
    "Predictor",
    "ProfilePoint",
    "ProfileTable",
    "SelectionInput",
    "SelectorConfig",
    "StageDeployment",
    "Statistics",
    "experience_deployment",
    "select",
]
