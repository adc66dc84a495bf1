"""What two-player board games share: turns, sides, illegal answers, rewards and messages.

Moves are written as numbers counted from 1; inside they count from 0.
"""

from __future__ import annotations

import random
import re
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal

from earl_core.environments.base import OPPONENT_REWARD, Message, StepResult
from earl_core.environments.games.opponents import (
    Opponent,
    OpponentName,
    Rules,
    StateT,
    make_opponent,
)
from earl_core.environments.options import Options, at_least, check_pattern
from earl_core.environments.policy_conversation import PolicyConversation

OUTCOMES = ("win", "draw", "loss", "illegal")
"""All ends of a game, as the agent sees them."""

MARKS = ("X", "O")
"""The marks of the player that moves first and of the other."""

_CHAT_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"

DEFAULT_ANSWER_PATTERN = r"\d+"


class BoardRewards(Options):
    """Rewards at the end of a game. win: reward of a game that is won. draw: reward of a draw.
    loss: reward of a game that is lost. illegal: reward of a game that an illegal answer ends."""

    win: float = 1.0
    draw: float = 0.3
    loss: float = -1.0
    illegal: float = -1.5


class BoardGameOptions(Options):
    """Options of every board game.

    opponent: random: random legal moves; greedy: wins or blocks where one move does it;
        perfect: searches the game; policy: the policy itself.
    agent_side: who moves first; both: the agent for even prompts, the opponent for odd ones.
    illegal_action: lose: an illegal answer ends the episode; retry: the model is told and asked
        again.
    max_retries: illegal answers forgiven in one episode (illegal_action: retry).
    retry_reward: reward of a turn whose illegal answer was forgiven.
    answer_pattern: regular expression whose first match, or its group 1, is the move's number.
    style: form of the messages. chat: for instruction-tuned models; compact: for tiny ones.
    rules_role: role of the message with the rules; user for chat templates without a system role.
    """

    opponent: OpponentName | Literal["policy"] = "random"
    agent_side: Literal["both", "first", "second"] = "both"
    rewards: BoardRewards = BoardRewards()
    illegal_action: Literal["lose", "retry"] = "lose"
    max_retries: int = 2
    retry_reward: float = -0.1
    answer_pattern: str = DEFAULT_ANSWER_PATTERN
    style: Literal["chat", "compact"] = "chat"
    rules_role: Literal["system", "user"] = "system"

    def __post_init__(self) -> None:
        at_least("max_retries", self.max_retries, 0)
        check_pattern("answer_pattern", self.answer_pattern)


@dataclass
class _Rival:
    """The policy on the opponent's side of one game. note: what it is told before its next turn.
    illegal: answers that were no legal move."""

    conversation: PolicyConversation
    note: str = ""
    illegal: int = 0


class BoardGame(ABC, Generic[StateT]):
    """A game of the agent against a seeded opponent; implements `Environment`.

    The prompt index fixes the agent's side and, when it moves second, the opponent's first move;
    the seed fixes the opponent's other moves. The seed fixes no move where the policy is the
    opponent. `info` at the end: `outcome` (win, draw, loss, illegal), `side` (first, second),
    `metrics` (agent_moves, illegal_answers, and of the policy as opponent
    opponent_illegal_answers), `opponent_reward` of the latter.
    """

    name: ClassVar[str]
    compact_characters: ClassVar[str]
    """Every one of compact observations and answers."""
    options_model: ClassVar[type[BoardGameOptions]] = BoardGameOptions
    policy: dict[str, str] | None = None

    def __init__(self, rules: Rules[StateT], options: BoardGameOptions, depth: int | None) -> None:
        self.options = options
        self._rules = rules
        self.wants_policy = options.opponent == "policy"
        self._opponent: Opponent = self._ask_policy
        if options.opponent != "policy":
            self._opponent = make_opponent(options.opponent, rules, depth)
        self._pattern = re.compile(options.answer_pattern)
        self._state = rules.start()
        self._side = 0
        self._random = random.Random()
        self._agent_moves = 0
        self._agent_move: int | None = None
        self._illegal = 0
        self._done = True

    @abstractmethod
    def rules_text(self) -> str:
        """The rules and the form of an answer, for the first message."""

    @abstractmethod
    def board_text(self, state: StateT) -> str:
        """The board in chat style, with the moves' numbers on it."""

    @abstractmethod
    def compact_text(self, state: StateT) -> str:
        """The board in compact style, of `compact_characters`."""

    @property
    def return_range(self) -> tuple[float, float]:
        """The least and the greatest return; a game that is cut off has none of its end's."""
        options, ends = self.options, vars(self.options.rewards).values()
        forgiven = 0.0
        if options.illegal_action == "retry":
            forgiven = options.max_retries * options.retry_reward
        low, high = min(0.0, *ends) + min(0.0, forgiven), max(0.0, *ends) + max(0.0, forgiven)
        return low, high if low < high else low + 1.0

    @property
    def characters(self) -> str:
        """Every one of observations and answers, for a character tokenizer."""
        return self.compact_characters if self.options.style == "compact" else _CHAT_CHARACTERS

    def reset(self, prompt: int, seed: int) -> list[Message]:
        side = self.options.agent_side
        self._side = prompt % 2 if side == "both" else int(side == "second")
        # String seeds go through SHA-512: equal in every process and Python version.
        self._random = random.Random(f"{self.name}/opponent/{prompt}/{seed}")
        self._state = self._rules.start()
        self._agent_moves = self._illegal = 0
        self._agent_move = None
        self._rival: _Rival | None = None
        self._done = False
        opening = None
        if self._side == 1:
            opening = self._opponent(self._state, random.Random(f"{self.name}/opening/{prompt}"))
            self._state = self._rules.play(self._state, opening)
        return self._first_messages(self._turn_text(opening))

    def step(self, text: str) -> StepResult:
        if self._done:
            raise RuntimeError("the game is over or was not begun: call reset first")
        move = self.read_move(text)
        if move is None:
            return self._refuse()
        self._agent_moves += 1
        self._agent_move = move
        self._state = self._rules.play(self._state, move)
        if not self._over():
            move = self._opponent(self._state, self._random)
            self._state = self._rules.play(self._state, move)
            if not self._over():
                return StepResult([_user(self._turn_text(move))], 0.0, False)
        winner = self._rules.winner(self._state)
        return self._end("draw" if winner is None else "win" if winner == self._side else "loss")

    def close(self) -> None:
        self._done = True

    def read_move(self, text: str) -> int | None:
        """The legal move that an answer names, counted from 0; None when it names none."""
        match = self._pattern.search(text)
        if match is None:
            return None
        digits = match.group(self._pattern.groups) or ""
        # Longer numbers are no moves, and int() of a very long one raises.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 3):
            return None
        move = int(digits) - 1
        return move if move in self._rules.moves(self._state) else None

    def legal_answers(self) -> list[str]:
        """The legal moves as the agent should write them, in the configured style."""
        form = "{}" if self.options.style == "compact" else "[{}]"
        return [form.format(move + 1) for move in sorted(self._rules.moves(self._state))]

    def _over(self) -> bool:
        state = self._state
        return self._rules.winner(state) is not None or not self._rules.moves(state)

    def _ask_policy(self, state: StateT, source: random.Random) -> int:
        """The move of the policy on the opponent's side; a random one where there is no policy."""
        if self.policy is None:
            return source.choice(sorted(self._rules.moves(state)))
        rival = self._rival or _Rival(PolicyConversation(**self.policy))
        text = self._turn_text(self._agent_move, rival.note, 1 - self._side)
        messages = [_user(text)] if self._rival else self._first_messages(text)
        self._rival = rival
        move = self.read_move(rival.conversation.ask(*messages))
        rival.note = ""
        if move is None:
            rival.illegal += 1
            move = source.choice(sorted(self._rules.moves(state)))
            rival.note = f"That is not a legal move: {move + 1} is played for you."
        return move

    def _first_messages(self, turn: str) -> list[Message]:
        if self.options.style == "compact":
            return [_user(turn)]
        if self.options.rules_role == "user":
            return [_user(f"{self.rules_text()}\n\n{turn}")]
        return [{"role": "system", "content": self.rules_text()}, _user(turn)]

    def _turn_text(self, move: int | None, note: str = "", side: int | None = None) -> str:
        """move: the other side's, counted from 0. side: that is to move, the agent's if None."""
        if self.options.style == "compact":
            return ("!" if note else "") + self.compact_text(self._state)
        side = self._side if side is None else side
        mine, theirs = MARKS[side], MARKS[1 - side]
        lines = [note] if note else []
        if move is not None:
            lines.append(f"{theirs} plays {move + 1}.")
        lines += [self.board_text(self._state), f"You are {mine}. Your move?"]
        return "\n".join(lines)

    def _refuse(self) -> StepResult:
        self._illegal += 1
        if self.options.illegal_action == "lose" or self._illegal > self.options.max_retries:
            return self._end("illegal")
        text = self._turn_text(None, "That is not a legal move.")
        return StepResult([_user(text)], self.options.retry_reward, False)

    def _end(self, outcome: Literal["win", "draw", "loss", "illegal"]) -> StepResult:
        self._done = True
        words = {
            "win": "You win.",
            "draw": "It is a draw.",
            "loss": "You lose.",
            "illegal": "That is not a legal move. You lose.",
        }
        if self.options.style == "compact":
            text = self.compact_text(self._state)
        else:
            text = f"{self.board_text(self._state)}\n{words[outcome]}"
        metrics = {"agent_moves": float(self._agent_moves), "illegal_answers": float(self._illegal)}
        if self.wants_policy:
            metrics["opponent_illegal_answers"] = float(self._rival.illegal if self._rival else 0)
        info: dict[str, Any] = {
            "outcome": outcome,
            "outcomes": list(OUTCOMES),
            "side": ("first", "second")[self._side],
            "metrics": metrics,
        }
        if self.wants_policy:
            info[OPPONENT_REWARD] = self._opponents(outcome)
        return StepResult([_user(text)], float(getattr(self.options.rewards, outcome)), True, info)

    def _opponents(self, outcome: str) -> float:
        """What the opponent is paid: the outcome as it sees it, less what illegal answers cost."""
        rewards, rival = self.options.rewards, self._rival
        seen = {"win": rewards.loss, "draw": rewards.draw}.get(outcome, rewards.win)
        return float(seen + self.options.retry_reward * (rival.illegal if rival else 0))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
