"""A whole iteration a second time, in float64: rewards, advantages, loss, gradients, AdamW.

Written from the papers and the documentation, with plain transformers, torch and NumPy. It shares
nothing with EARL: it takes what was played (rows of `episodes.parquet`), a model's directory and
the settings of a run file, one sample at a time, without packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

Row = dict[str, Any]
STEPS = 2
"""Optimizer steps of an update, all on the same samples: from the second on ratios differ."""


def load(directory: Path) -> Any:
    """A model in float64, with the attention and the experts of its own code."""
    made = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return made.eval()


def logprobs(model: Any, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens of a sample, and the entropies where they were sampled."""
    tokens = torch.tensor(row["tokens"])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    scores = torch.log_softmax(logits, dim=-1)
    mask = torch.tensor(row["loss_mask"][1:]).bool()
    chosen = scores.gather(1, tokens[1:, None])[:, 0]
    return chosen[mask], -(scores.exp() * scores).sum(-1)[mask]


@contextmanager
def routed(experts: list[torch.Tensor]) -> Iterator[None]:
    """Keep the experts that a pass chooses, layer by layer, and give its tokens the same ones where
    they are known (arXiv 2510.11370): weights stay those of the router that there is now."""
    usual, known = torch.topk, iter(list(experts))

    def topk(scores: torch.Tensor, *more: Any, **named: Any) -> Any:
        values, chosen = usual(scores, *more, **named)
        if (given := next(known, None)) is None:
            experts.append(chosen)
            return values, chosen
        return scores.gather(-1, given), given

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = usual


class Turn:
    """One answer: the sample and the places of its tokens there, in the order of time."""

    def __init__(self, row: Row, number: int) -> None:
        start, end = [*row["turn_starts"], len(row["tokens"])][number : number + 2]
        self.row, self.time = row, row["turn_numbers"][number]
        self.places = range(sum(row["loss_mask"][:start]), sum(row["loss_mask"][:end]))
        self.reward = row["turn_rewards"][number]
        self.observed = row["texts"][2 * number]


def advantages(
    rows: Sequence[Row], paid: dict[int, np.ndarray], name: str, options: dict[str, Any]
) -> dict[int, np.ndarray]:
    """Of the sampled tokens of each sample, by its id. paid: the KL penalty of each."""
    episodes: dict[int, list[Turn]] = {}
    for row in rows:
        turns = episodes.setdefault(row["episode_id"], [])
        turns += [Turn(row, number) for number in range(len(row["turn_starts"]))]
    for turns in episodes.values():
        turns.sort(key=lambda turn: turn.time)
    group_of = {row["episode_id"]: row["group_id"] for row in rows}
    found = {row["sample_id"]: np.zeros(sum(row["loss_mask"])) for row in rows}

    def penalties(turns: Sequence[Turn]) -> list[float]:
        return [paid[turn.row["sample_id"]][at] for turn in turns for at in turn.places]

    def to_go(turns: Sequence[Turn], discount: float, paying: bool) -> list[float]:
        values: list[float] = []
        for turn in reversed(turns):
            own = turn.reward - (sum(penalties([turn])) if paying else 0.0)
            values.insert(0, own + (discount * values[0] if values else 0.0))
        return values

    def give(turns: Sequence[Turn], values: Sequence[float]) -> None:
        left = iter(values)
        for turn in turns:
            for at in turn.places:
                found[turn.row["sample_id"]][at] += next(left)

    whole = {e: to_go(turns, 1.0, True)[0] for e, turns in episodes.items()}
    rest = {e: np.cumsum(np.array(penalties(turns))[::-1])[::-1] for e, turns in episodes.items()}
    if name == "reinforce_plus_plus":
        returns = {e: sum(turn.reward for turn in t) - rest[e] for e, t in episodes.items()}
        every = np.concatenate(list(returns.values()))
        for e, turns in episodes.items():
            give(turns, (returns[e] - every.mean()) / max(every.std(), 1e-4))
        return found
    for e, turns in episodes.items():
        group = [whole[other] for other in episodes if group_of[other] == group_of[e]]
        others = [whole[o] for o in episodes if group_of[o] == group_of[e] and o != e]
        tokens = len(rest[e])
        if name == "rloo":
            give(turns, [whole[e] - np.mean(others)] * tokens)
        elif name == "turn_returns":
            goes = np.repeat(to_go(turns, 1.0, False), [len(turn.places) for turn in turns])
            give(turns, (goes - rest[e] - np.mean(group)) * len(group) / len(others))
        else:
            spread = np.std(group, ddof=1) + 1e-6
            give(turns, [(whole[e] - np.mean(group)) / spread] * tokens)
    if name == "gigpo":
        anchored: dict[tuple[int, str], list[float]] = {}
        for e, turns in episodes.items():
            for turn, value in zip(turns, to_go(turns, options["discount"], True), strict=True):
                anchored.setdefault((group_of[e], turn.observed), []).append(value)
        for e, turns in episodes.items():
            for turn, value in zip(turns, to_go(turns, options["discount"], True), strict=True):
                among = anchored[group_of[e], turn.observed]
                spread = np.std(among, ddof=1) + 1e-6 if len(among) > 1 else 1.0
                give([turn], [(value - np.mean(among)) / spread] * len(turn.places))
    return found


def kl(name: str, difference: Any) -> Any:
    """The estimate from log pi - log ref."""
    if name == "k1":
        return difference
    if name == "k2":
        return difference**2 / 2
    return (-difference).exp() - 1 + difference


def policy_loss(
    options: dict[str, Any], now: torch.Tensor, old: torch.Tensor, mu: torch.Tensor, gain: Any
) -> torch.Tensor:
    """Of each sampled token. mu: the log-probs that it was sampled by; gain: its
    advantage."""
    name, positive = options["name"], gain > 0
    ratio = (now - old).exp()
    if name == "ppo_clip":
        inside = torch.clip(ratio, 1 - options["clip_low"], 1 + options["clip_high"])
        return -torch.minimum(ratio * gain, inside * gain)
    if name == "cispo":
        return -torch.clip(ratio.detach(), max=1 + options["clip_high"]) * gain * now
    if name == "dppo":
        moved = now.detach().exp() - mu.exp()
        kept = torch.where(positive, moved <= options["mask_high"], moved >= -options["mask_low"])
        return -torch.where(kept, (now - mu).exp() * gain, 0.0)
    assert name == "sapo"
    tau = torch.where(positive, options["tau_positive"], options["tau_negative"])
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * gain


class Optimized:
    """A model in float64 and AdamW's state."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.steps = 0
        self.first = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        self.second = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def step(self) -> float:
        options = self.options
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float((each**2).sum()) for each in gradients.values()))
        # As torch's own clipping has it, of a gradient of zeros too.
        scale = min(1.0, options["max_grad_norm"] / (norm + 1e-6))
        self.steps += 1
        for name, parameter in self.model.named_parameters():
            if name not in gradients:
                continue
            gradient = gradients[name] * scale
            first, second = self.first[name], self.second[name]
            first.mul_(options["beta1"]).add_((1 - options["beta1"]) * gradient)
            second.mul_(options["beta2"]).add_((1 - options["beta2"]) * gradient**2)
            mean = first / (1 - options["beta1"] ** self.steps)
            square = second / (1 - options["beta2"] ** self.steps)
            if parameter.ndim >= 2:
                parameter.mul_(1 - options["learning_rate"] * options["weight_decay"])
            parameter.sub_(options["learning_rate"] * mean / (square.sqrt() + options["epsilon"]))
        return norm


class Critic(Optimized):
    """Values by a linear head of zeros on the model's last states; advantages by them (arXiv
    1506.02438) and clipped regression (arXiv 1707.06347's own code)."""

    def __init__(
        self, directory: Path, update: dict[str, Any], learning_rate: float, clip: float | None
    ) -> None:
        model = load(directory)
        width = model.get_output_embeddings().weight.shape[1]
        model.lm_head = torch.nn.Linear(width, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.lm_head.weight)
        super().__init__(model, {**update, "learning_rate": learning_rate})
        self.clip = math.inf if clip is None else clip

    def values(self, row: Row) -> torch.Tensor:
        """Before each sampled token of a sample."""
        states = self.model.model(input_ids=torch.tensor(row["tokens"])[None])[0][0, :-1]
        return self.model.lm_head(states)[torch.tensor(row["loss_mask"][1:]).bool(), 0]

    def iteration(
        self, rows: Sequence[Row], paid: dict[int, np.ndarray], options: dict[str, Any]
    ) -> dict[int, np.ndarray]:
        """The advantages of each sample's sampled tokens, by its id; then two steps."""
        with torch.no_grad():
            old = {row["sample_id"]: self.values(row) for row in rows}
        found = {key: np.zeros(len(each)) for key, each in old.items()}
        steps: dict[int, list[int]] = {key: [] for key in old}
        for e in {row["episode_id"] for row in rows}:
            own = [row for row in rows if row["episode_id"] == e]
            turns = [Turn(row, n) for row in own for n in range(len(row["turn_starts"]))]
            ahead = after = 0.0
            for turn in sorted(turns, key=lambda turn: -turn.time):
                key, reward, places = turn.row["sample_id"], turn.reward, list(turn.places)
                if options.get("level") == "turn":
                    reward, places = reward - sum(paid[key][at] for at in places), places[:1]
                for at in reversed(places):
                    cost = 0.0 if options.get("level") == "turn" else paid[key][at]
                    error = reward - cost + options["gamma"] * after - float(old[key][at])
                    ahead = error + options["gamma"] * options["lambda"] * ahead
                    found[key][at], after, reward = ahead, float(old[key][at]), 0.0
                    steps[key].append(at)
                found[key][list(turn.places)] = (
                    ahead if options.get("level") == "turn" else found[key][list(turn.places)]
                )
        self._learn(rows, old, found, steps)
        return found

    def _learn(
        self,
        rows: Sequence[Row],
        old: dict[int, torch.Tensor],
        found: dict[int, np.ndarray],
        steps: dict[int, list[int]],
    ) -> None:
        count = sum(map(len, steps.values()))
        for _ in range(STEPS):
            self.model.zero_grad()
            for row in rows:
                at = steps[row["sample_id"]]
                was, now = old[row["sample_id"]][at], self.values(row)[at]
                target = was + torch.from_numpy(found[row["sample_id"]])[at]
                near = was + (now - was).clamp(-self.clip, self.clip)
                errors = torch.maximum((now - target) ** 2, (near - target) ** 2)
                (errors.sum() / (2 * count)).backward()
            self.step()


class Reference(Optimized):
    """The policy, its frozen beginning, and AdamW's state; `iteration` after `iteration`."""

    def __init__(self, directory: Path, algorithm: dict[str, Any], update: dict[str, Any]) -> None:
        super().__init__(load(directory), update)
        self.frozen, self.algorithm = load(directory), algorithm

    def iteration(
        self, rows: Sequence[Row], temperature: float, critic: Critic | None = None
    ) -> dict[str, float]:
        """One update of the policy by what was played, in two steps: the mean of their gradients'
        norms, how far the sampled log-probs were from the policy's, and how far the tokens'
        probabilities moved in the first step at most. critic: says the advantages, and learns."""
        placement = self.algorithm["kl"]["placement"]
        anchored, paid = {}, {}
        for row in rows:
            with torch.no_grad():
                anchored[row["sample_id"]], _ = logprobs(self.frozen, row, temperature)
            sampled = torch.tensor(row["rollout_logprobs"]).double()
            sampled = sampled[torch.tensor(row["loss_mask"]).bool()]
            difference = sampled - anchored[row["sample_id"]]
            cost = self.algorithm["kl"].get("coefficient", 0.0) if placement == "reward" else 0.0
            paid[row["sample_id"]] = (cost * difference).numpy()
        options = dict(self.algorithm["advantage"])
        if critic is None:
            credit = advantages(rows, paid, options.pop("name"), options)
        else:
            credit = critic.iteration(rows, paid, options)
        weights, norms = token_weights(rows, self.algorithm["aggregation"]), []
        before: dict[int, torch.Tensor] = {}
        experts: dict[int, list[torch.Tensor]] = {}
        mismatch = moved = 0.0
        for _ in range(STEPS):
            self.model.zero_grad()
            for row in rows:
                key = row["sample_id"]
                with routed(experts.setdefault(key, [])):
                    now, entropy = logprobs(self.model, row, temperature)
                old = before.setdefault(key, now.detach())
                sampled = torch.tensor(row["rollout_logprobs"]).double()
                sampled = sampled[torch.tensor(row["loss_mask"]).bool()]
                mismatch = max(mismatch, float((old - sampled).abs().max()))
                moved = max(moved, float((now.exp() - old.exp()).abs().max()))
                gain = torch.from_numpy(credit[key])
                loss = policy_loss(self.algorithm["policy_loss"], now, old, sampled, gain)
                if correction := self.algorithm.get("importance_correction"):
                    loss = loss * (old - sampled).exp().clip(max=correction["cap"])
                if placement == "loss":
                    estimate = kl(self.algorithm["kl"]["estimator"], now - anchored[key])
                    loss = loss + self.algorithm["kl"]["coefficient"] * estimate
                loss = loss - self.algorithm.get("entropy_coefficient", 0.0) * entropy
                (weights[key] * loss).sum().backward()
            norms.append(self.step())
        return {"grad_norm": float(np.mean(norms)), "mismatch": mismatch, "moved": moved}


def token_weights(rows: Sequence[Row], aggregation: dict[str, Any]) -> dict[int, float]:
    """What each token of a sample counts in the loss."""
    tokens: dict[int, int] = {}
    for row in rows:
        tokens[row["episode_id"]] = tokens.get(row["episode_id"], 0) + sum(row["loss_mask"])
    everything, episodes = sum(tokens.values()), len(tokens)
    return {
        row["sample_id"]: {
            "token_mean": 1 / everything,
            "sequence_mean_token_mean": 1 / (episodes * tokens[row["episode_id"]]),
            "sequence_mean_token_sum": 1 / episodes,
            "constant": 1 / (episodes * aggregation.get("length", 1)),
        }[aggregation["name"]]
        for row in rows
    }
