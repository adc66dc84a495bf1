"""Plain, slow implementations with scalars and autograd, written from the papers."""

from __future__ import annotations

import math
from typing import Any

import torch

Episode = dict[str, torch.Tensor]


def _clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    if value.item() < low:
        return value * 0.0 + low
    if value.item() > high:
        return value * 0.0 + high
    return value


def _smaller(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first if first.item() <= second.item() else second


def _larger(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first if first.item() >= second.item() else second


def policy_terms(spec: dict[str, Any], episode: Episode) -> list[torch.Tensor]:
    """Loss of each token of one episode."""
    name, terms = spec["name"], []
    now, old = episode["logprobs"], episode["old_logprobs"]
    sequence_ratio = torch.exp((now - old).mean()) if len(now) else None
    for t in range(len(now)):
        advantage = episode["advantages"][t]
        if name == "policy_gradient":
            term = -advantage * now[t]
        elif name == "cispo":
            weight = min(math.exp((now[t] - old[t]).item()), 1 + spec["clip_high"])
            term = -weight * advantage * now[t]
        elif name == "dppo":
            sampled = episode["rollout_logprobs"][t]
            gained = math.exp(now[t].item()) - math.exp(sampled.item())
            too_far = gained > spec["mask_high"] if advantage > 0 else -gained > spec["mask_low"]
            term = -torch.exp(now[t] - sampled) * advantage * (0.0 if too_far else 1.0)
        elif name == "sapo":
            tau = spec["tau_positive"] if advantage > 0 else spec["tau_negative"]
            ratio = torch.exp(now[t] - old[t])
            term = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
        elif name == "gspo":
            assert sequence_ratio is not None
            low, high = 1 - spec["clip_low"], 1 + spec["clip_high"]
            clipped = _clip(sequence_ratio, low, high)
            term = -_smaller(sequence_ratio * advantage, clipped * advantage)
        else:
            ratio = torch.exp(now[t] - old[t])
            clipped = _clip(ratio, 1 - spec["clip_low"], 1 + spec["clip_high"])
            objective = _smaller(ratio * advantage, clipped * advantage)
            if spec.get("dual_clip") and advantage.item() < 0:
                objective = _larger(objective, ratio * 0.0 + spec["dual_clip"] * advantage)
            term = -objective
        terms.append(term * episode["importance_weights"][t])
    return terms


def aggregate(spec: dict[str, Any], terms: list[list[torch.Tensor]]) -> torch.Tensor:
    """One number from the losses of the tokens of each episode."""
    present = [episode for episode in terms if episode]
    sums = [torch.stack(episode).sum() for episode in present]
    if spec["name"] == "token_mean":
        return torch.stack(sums).sum() / sum(map(len, present))
    if spec["name"] == "sequence_mean_token_mean":
        means = [total / len(episode) for total, episode in zip(sums, present, strict=True)]
        return torch.stack(means).mean()
    if spec["name"] == "sequence_mean_token_sum":
        return torch.stack(sums).mean()
    return torch.stack(sums).mean() / int(spec["length"])


def verl_low_var_kl(logprob: torch.Tensor, ref_logprob: torch.Tensor) -> torch.Tensor:
    """verl 0.9.1, `core_algos.kl_penalty_forward`, `low_var_kl`: clamped twice."""
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    kld = torch.exp(kl) - kl - 1
    return torch.clamp(kld, min=-10, max=10)


def kl_term(name: str, now: float, reference: float) -> float:
    """The value of one token's KL estimate; k3 with the bounds of verl's `low_var_kl`."""
    difference = reference - now
    if name == "k3":
        difference = min(max(difference, -20.0), 20.0)
        return min(max(math.exp(difference) - difference - 1, -10.0), 10.0)
    return {"k1": -difference, "k2": difference**2 / 2}[name]
