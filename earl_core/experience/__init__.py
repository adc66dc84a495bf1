"""Rewards per episode and advantages per token, on the CPU. Imports no torch."""
