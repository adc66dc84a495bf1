"""One Prefect task per stage or step; the only place that knows Prefect and MLflow together."""
