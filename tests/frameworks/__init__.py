"""Popular frameworks for agents, each in a Python of its own, against the gateway."""
