"""Services that `earl up` starts and `earl down` ends: a Prefect server, an MLflow server, a
worker."""
