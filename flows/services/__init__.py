"""Services that `earl up` starts and `earl down` ends: Prefect's server, MLflow's, a worker."""
