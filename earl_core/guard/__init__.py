"""The guard: what an iteration's sealed data tells of poisoned rewards and environments and of a
collapse, and what is done about it."""
