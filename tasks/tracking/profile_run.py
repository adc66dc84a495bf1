"""The MLflow run of a profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from earl_core.config import RunConfig
from earl_core.secrets import redact
from tasks.tracking.mlflow_client import Numbers, default_uri, open_mlflow_run

logger = logging.getLogger(__name__)


def track(config: RunConfig, mark: str, metrics: Mapping[str, float], text: str) -> None:
    """Put the metrics and the report's text into the profile's MLflow run.

    One run for each fingerprint, so that a profile that goes on goes on there. Never raises: a
    tracker that is down costs a warning.
    """
    if not config.tracking.enabled:
        return
    uri = default_uri(config)
    try:
        uid = f"profile-{mark}"
        run = open_mlflow_run(uri, config.tracking.experiment, uid, uid, None)
        run.log_numbers([Numbers(round(metrics["profile/points"]), metrics, time.time())])
        run.log_text(text, "profile.md")
        run.end("FINISHED")
    except Exception as error:  # MLflow raises many kinds
        line = (str(error).strip() or repr(error)).splitlines()[0]
        logger.warning(
            "MLflow at %s did not take the profile's report (%s): it is only printed",
            redact(uri),
            redact(line)[:300],
        )
