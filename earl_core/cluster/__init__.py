"""Worker groups: the processes that do a stage's heavy work; `worker_group.WorkerGroup` first."""
