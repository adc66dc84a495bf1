"""Runs side by side, by what their directories keep: settings that differ, and the first stage
whose inputs are equal and whose outputs differ. Runs are only read."""

from earl_core.comparison.bisection import Bisection, bisect
from earl_core.comparison.equal_prompts import EqualPrompt, equal_prompts
from earl_core.comparison.recorded_run import RecordedRun, recorded_runs
from earl_core.comparison.settings import differing_settings

__all__ = [
    "Bisection",
    "EqualPrompt",
    "RecordedRun",
    "bisect",
    "differing_settings",
    "equal_prompts",
    "recorded_runs",
]
