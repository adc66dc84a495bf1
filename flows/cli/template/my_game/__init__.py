"""A game, and how it is rewarded."""
