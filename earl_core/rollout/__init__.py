"""Playing episodes: chat over token ids, the agent loop, the engines, the rollout worker."""
