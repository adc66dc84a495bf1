"""The conversations of one side of a session, and what they have had of their budgets."""

from __future__ import annotations

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.branches import Branches
from earl_core.trajectory.samples import Sample


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
        self._last: Sample | None = None
        self._owed = 0.0

    def pay(self, reward: float) -> None:
        """Give a reward to the last answer; to the first, where there is none yet."""
        self._owed += reward
        if self._last is not None:
            self._last.turn_rewards[-1] += self._owed
            self._owed = 0.0

    def answered(self, completion: Completion, sample: Sample) -> None:
        """Count an answer, the last turn of the sample."""
        self._last = sample
        self.pay(0.0)
        self.sampled += len(completion.tokens)
        self.versions |= {span.policy_version for span in completion.spans if span.end}
