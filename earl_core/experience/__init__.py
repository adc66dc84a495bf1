"""Rewards per episode, scores of reward functions among them, and advantages per token, on the CPU.
Imports no torch."""
