"""The training state: optimizer, checkpoints, resharding."""
