"""How a stage is laid out on the hardware: the words that configuration, selector, learner and rollout share."""
