"""The run in MLflow."""
