"""Rewards of the game's episodes."""


def reward_of(won: bool, legal: bool, turns: int) -> float:
    """The sooner a game is won, the better. turns: how many it took."""
    if not legal:
        return -0.5
    return 1.0 - 0.1 * (turns - 1) if won else 0.0
