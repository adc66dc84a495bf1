"""Trials of an environment: played by random texts, played again, measured, and judged."""
