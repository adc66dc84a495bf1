"""Routers of a mixture of experts: what they choose is read, and may be chosen for them.

A router scores all experts, takes the `top_k` largest scores by one `torch.topk`, and makes the
weights of those that were taken: normalised, biased, scaled as the family does. Only that one call
is answered otherwise, so that the weights are the family's own, of the live scores, whatever was
chosen, and gradients reach the router through them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from earl_core.trajectory.routing import RoutingShape

_TOPK = (torch.topk, torch.Tensor.topk)
_ATTRIBUTE = "_earl_routers"


class Routers:
    """The routers of one model, in the order of its layers. Made by `routers_of`."""

    def __init__(self, names: Sequence[str], routers: Sequence[nn.Module]) -> None:
        self.names = tuple(names)
        first: Any = routers[0]
        self.shape = RoutingShape(len(routers), int(first.top_k), int(first.num_experts))
        self._seats = [_Seat(router) for router in routers]

    def choose(self, routing: torch.Tensor | None) -> None:
        """Choose for the passes that follow, those that are computed again included.

        routing: [tokens, width], integers on the device; tokens without a record, and all for None,
        are routed by the router.
        """
        if routing is None:
            for seat in self._seats:
                seat.given = None
            return
        for seat, part in zip(
            self._seats, torch.split(routing, self.shape.chosen, dim=1), strict=True
        ):
            seat.given = part

    def live(self) -> torch.Tensor:
        """What the routers would have chosen, or have, in the last pass: int64 [tokens, layers,
        chosen]; padding is among the tokens."""
        return torch.stack([cast(torch.Tensor, seat.live) for seat in self._seats], dim=1)

    def forget(self) -> None:
        """Keep nothing of the last pass."""
        for seat in self._seats:
            seat.given = seat.live = None


class _Seat:
    """One router, and what is chosen for it. given: [tokens, chosen]; live: int64, likewise."""

    def __init__(self, router: Any) -> None:
        self.given: torch.Tensor | None = None
        self.live: torch.Tensor | None = None
        self.calls = 0
        self._forward = router.forward
        self._choice = _Choice(self, int(router.top_k), int(router.num_experts))
        router.forward = self

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with self._choice:
            return self._forward(*inputs)

    def taken(self, scores: torch.Tensor, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the router is told that its largest scores are."""
        self.calls += 1
        self.live = result[1].detach()
        if self.given is None:
            return result[0], result[1]
        given = self.given.to(torch.int64)
        unknown = (given == torch.iinfo(self.given.dtype).max).all(dim=1, keepdim=True)
        chosen = torch.where(unknown, result[1], given)
        return scores.gather(1, chosen), chosen


class _Choice(TorchFunctionMode):
    """Answers the router's call of `topk`, which takes `chosen` of the scores [tokens, experts]."""

    def __init__(self, seat: _Seat, chosen: int, experts: int) -> None:
        super().__init__()
        self._seat, self._chosen, self._experts = seat, chosen, experts

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and have the seat say what was taken."""
        result = function(*arguments, **(named or {}))
        if function not in _TOPK:
            return result
        scores = arguments[0]
        if scores.dim() != 2 or scores.shape[1] != self._experts:
            return result
        return self._seat.taken(scores, result) if result[1].shape[1] == self._chosen else result


def routers_of(model: nn.Module) -> Routers | None:
    """The model's routers, taken in hand when this is first asked; None where it has none, or has
    one whose choice cannot be made for it."""
    if _ATTRIBUTE not in vars(model):
        found = _found(model)
        kinds = {type(router): router for router in found.values()}
        replayed = found and all(map(_can_be_told, kinds.values()))
        routers = Routers(list(found), list(found.values())) if replayed else None
        # Beside the model's modules and parameters, which it is none of.
        vars(model)[_ATTRIBUTE] = routers
    return cast("Routers | None", vars(model)[_ATTRIBUTE])


def unread_routers(model: nn.Module) -> list[str]:
    """The kinds of routers whose choice cannot be made for them."""
    kinds = {type(router): router for router in _found(model).values()}
    return [kind.__name__ for kind, router in kinds.items() if not _can_be_told(router)]


def _found(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        given: Any = module
        numbers = [getattr(given, key, None) for key in ("top_k", "num_experts")]
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or not all(isinstance(n, int) for n in numbers):
            continue
        if weight.shape[0] == numbers[1]:
            found[name] = module
    return found


@torch.no_grad()
def _can_be_told(router: nn.Module) -> bool:
    """Tell whether a router chooses by one call, once, and makes the same of what it is told: tried
    on a copy with random weights on the CPU."""
    weight = cast(torch.Tensor, router._parameters["weight"])
    experts, hidden = weight.shape
    draw = torch.Generator().manual_seed(0)
    trial: Any = copy.copy(router)
    trial.__dict__ = {k: v for k, v in vars(router).items() if k != "forward"}
    trial._parameters = {
        name: None if each is None else nn.Parameter(torch.randn(each.shape, generator=draw))
        for name, each in router._parameters.items()
    }
    trial._buffers = {
        name: None if each is None else torch.zeros(each.shape, dtype=each.dtype)
        for name, each in router._buffers.items()
    }
    states = torch.randn(5, hidden, generator=draw)
    seat = _Seat(trial)
    try:
        with torch.device("cpu"):
            alone = trial(states)
            chosen, live = alone[-1], seat.live
            if seat.calls != 1 or live is None or not torch.equal(chosen, live):
                return False
            results = []
            for told in (chosen, chosen.flip(1), (chosen + 1) % experts):
                seat.given = told
                results.append(trial(states))
                if not torch.equal(results[-1][-1], told):
                    return False
    except Exception:
        return False
    # A weight is that of its expert, wherever that stands.
    again, flipped, _ = results
    return all(map(torch.equal, alone, again)) and torch.allclose(flipped[-2].flip(1), again[-2])
