"""EARL's core: everything but the workflow engine and the tracker.

`earl_core` imports neither Prefect nor MLflow, so that it runs on machines that have only torch,
transformers, accelerate and pyarrow. The layers above it are `tasks` (one Prefect task per stage)
and `flows` (what runs after what).
"""

__version__ = "0.1.0"
