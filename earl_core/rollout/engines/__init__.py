"""Engines that turn prompts of token ids into sampled token ids and their log-probs."""
