"""Experience preparation: how many processes compute rewards and advantages."""

from __future__ import annotations

from pydantic import Field

from earl_core.config.settings import Settings


class ExperienceConfig(Settings):
    """Each rank reads and writes the rows of its own groups only; they exchange moments."""

    ranks: int = Field(
        default=1, ge=1, description="Processes that compute rewards and advantages."
    )
