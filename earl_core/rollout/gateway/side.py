"""The conversations of one side of a session, and what they have had of their budgets."""

from __future__ import annotations

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.branches import Branches


class Side:
    """The conversations of the policy, or of its opponent. many: times the policy's budgets."""

    def __init__(self, chat: ChatTokenizer, settings: PlaySettings, seed: int, many: int) -> None:
        self.branches = Branches(chat, seed)
        self.most_calls = settings.max_turns * many
        limit = settings.max_tokens_per_episode
        self.most_tokens = None if limit is None else limit * many
        self.calls = self.sampled = 0
        self.versions: set[int] = set()
        """Policy versions that have sampled its answers."""

    def answered(self, completion: Completion) -> None:
        """Count an answer."""
        self.sampled += len(completion.tokens)
        self.versions |= {span.policy_version for span in completion.spans if span.end}
