"""Routers of a mixture of experts: what they choose is read, and may be chosen for them.

A router scores all experts, takes the `top_k` largest scores by one `torch.topk`, and makes the
weights of those that were taken: normalised, biased, scaled as the family does. Only that one call
is answered otherwise, so that the weights are the family's own, of the live scores, whatever was
chosen, and gradients reach the router through them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from earl_core.system.errors import ConfigError
from earl_core.trajectory.routing import RoutingShape

_TOPK = (torch.topk, torch.Tensor.topk)
_SHARES = (torch.softmax, F.softmax, torch.Tensor.softmax)
_GATES = (torch.sigmoid, F.sigmoid, torch.Tensor.sigmoid)
_ATTRIBUTE = "_earl_routers"


@dataclass(frozen=True)
class Charge:
    """A loss that is linear in the routers' probabilities: sum of w_t s_li p_tli over tokens t,
    layers l and experts i. slopes: float32 [layers, experts], s. weights: float32 [tokens], w."""

    slopes: torch.Tensor
    weights: torch.Tensor


class Routers:
    """The routers of one model, in the order of its layers. Made by `routers_of`."""

    def __init__(self, names: Sequence[str], routers: Sequence[nn.Module]) -> None:
        self.names = tuple(names)
        first: Any = routers[0]
        self.shape = RoutingShape(len(routers), int(first.top_k), int(first.num_experts))
        self._seats = [_Seat(router) for router in routers]

    def choose(self, routing: torch.Tensor | None, charge: Charge | None = None) -> None:
        """Choose for the passes that follow, those that are computed again included.

        routing: [tokens, width], integers on the device; tokens without a record, and all for None,
        are routed by the router. charge: its gradient is added to that of the passes.
        """
        for number, seat in enumerate(self._seats):
            seat.given, seat.charge = None, None
            if charge is not None:
                seat.charge = Charge(charge.slopes[number], charge.weights)
        if routing is None:
            return
        for seat, part in zip(
            self._seats, torch.split(routing, self.shape.chosen, dim=1), strict=True
        ):
            seat.given = part

    def live(self) -> torch.Tensor:
        """What the routers would have chosen, or have, in the last pass: int64 [tokens, layers,
        chosen]; padding is among the tokens."""
        return torch.stack([cast(torch.Tensor, seat.live) for seat in self._seats], dim=1)

    def charged(self) -> torch.Tensor:
        """The charge of the last pass, float64, without gradient; it had one."""
        return torch.stack([cast(torch.Tensor, seat.charged) for seat in self._seats]).sum()

    def forget(self) -> None:
        """Keep nothing of the last pass."""
        for seat in self._seats:
            seat.given = seat.live = seat.charge = seat.charged = None


class _Seat:
    """One router, and what is chosen for it. given: [tokens, chosen]; live: int64, likewise."""

    def __init__(self, router: Any) -> None:
        self.given: torch.Tensor | None = None
        self.live: torch.Tensor | None = None
        self.charge: Charge | None = None
        self.charged: torch.Tensor | None = None
        self.calls = 0
        self.plain = router.forward
        self._choice = _Choice(self, int(router.top_k), int(router.num_experts))
        router.forward = self

    # Compiled beside `_AddGradient`, torch 2.13 loses the number that `topk` is called with.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *inputs: torch.Tensor) -> Any:
        self.charged = None
        with self._choice:
            return self.plain(*inputs)

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

    def charge_for(self, scores: torch.Tensor, kind: str) -> torch.Tensor:
        """The same scores [tokens, experts], with the gradient of the charge. kind: `shares` are
        the probabilities, `gates` are normalised to them, `logits` are those of a softmax."""
        charge = self.charge
        if charge is None or self.charged is not None:
            return scores
        found = scores.detach().float()
        total = found.sum(dim=1, keepdim=True) if kind == "gates" else None
        shares = found.softmax(dim=1) if kind == "logits" else found
        if total is not None:
            shares = found / total
        costs = shares @ charge.slopes
        self.charged = torch.dot(costs.double(), charge.weights.double())
        slopes = charge.slopes.expand_as(found)
        if kind == "logits":
            slopes = shares * (slopes - costs[:, None])
        elif total is not None:
            slopes = (slopes - costs[:, None]) / total
        slopes = (slopes * charge.weights[:, None]).to(scores.dtype)
        return cast(torch.Tensor, _AddGradient.apply(scores, slopes))  # type: ignore[no-untyped-call]


class _AddGradient(torch.autograd.Function):
    """Hands numbers on; adds a known gradient to theirs. So a loss that is known before the pass
    needs no tensor that outlives its layer, whatever checkpoints, compiles or shards that."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(more)
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (more,) = ctx.saved_tensors
        return gradients[0] + more, None


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
        if function in _TOPK and self._of_experts(arguments[0]):
            scores = self._seat.charge_for(arguments[0], "logits")
            result = function(scores, *arguments[1:], **(named or {}))
            taken = result[1].shape[1] == self._chosen
            return self._seat.taken(scores, result) if taken else result
        result = function(*arguments, **(named or {}))
        if function in _SHARES and self._of_experts(result):
            return self._seat.charge_for(result, "shares")
        if function in _GATES and self._of_experts(result):
            return self._seat.charge_for(result, "gates")
        return result

    def _of_experts(self, scores: torch.Tensor) -> bool:
        return scores.dim() == 2 and scores.shape[1] == self._experts


def routers_of(model: nn.Module) -> Routers | None:
    """The model's routers, taken in hand when this is first asked; None where it has none, or has
    one whose choice cannot be made for it."""
    if _ATTRIBUTE not in vars(model):
        found = _found(model)
        replayed = found and not unread_routers(model)
        routers = Routers(list(found), list(found.values())) if replayed else None
        # Beside the model's modules and parameters, which it is none of.
        vars(model)[_ATTRIBUTE] = routers
    return cast("Routers | None", vars(model)[_ATTRIBUTE])


def unread_routers(model: nn.Module) -> list[str]:
    """The kinds of routers whose choice cannot be made for them; of a mixture without a module that
    is known as a router, the model."""
    found = _found(model)
    kinds = {type(router): router for router in found.values()}
    unread = [kind.__name__ for kind, router in kinds.items() if not _can_be_told(router)]
    sizes = {(router.top_k, router.num_experts) for router in cast(Any, found.values())}
    if len(sizes) > 1 or (not found and _is_mixture(model)):
        unread.append(type(model).__name__)
    return unread


def freeze_routers(model: nn.Module) -> None:
    """Have the routers' parameters require no gradient. Raises `ConfigError` where there are
    none."""
    found = _found(model)
    if not found:
        raise ConfigError(
            f"model.freeze_routers is true, but {type(model).__name__} has no module that is known "
            "as a router of experts: leave it out"
        )
    for router in found.values():
        router.requires_grad_(False)


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that choose among experts, of whose scores one matrix is the only one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        given: Any = module
        chosen, experts = (getattr(given, key, None) for key in ("top_k", "num_experts"))
        if isinstance(chosen, int) and isinstance(experts, int):
            sizes = [tuple(each.shape) for each in module.parameters()]
            matrices = [size for size in sizes if len(size) > 1 and size[0] != 1]
            if len(matrices) == 1 and len(matrices[0]) == 2 and matrices[0][0] == experts:
                found[name] = module
    return found


def _is_mixture(model: nn.Module) -> bool:
    """Tell whether a model has as many experts as its configuration says; some have numbers of
    experts there that they do not use."""
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = {getattr(text, name, None) for name in names} - {None, 0, 1}
    return any(
        (isinstance(module, nn.ModuleList) and name.endswith("experts") and len(module) in counts)
        or any(each.ndim == 3 and each.shape[0] in counts for each in module._parameters.values()
               if each is not None)
        for name, module in model.named_modules()
    )  # fmt: skip


@torch.no_grad()
def _can_be_told(router: nn.Module) -> bool:
    """Tell whether a router chooses by one call, once, and makes the same of what it is told: tried
    on a copy with random weights on the CPU."""
    draw = torch.Generator().manual_seed(0)
    trial: Any = _copied(router, draw)
    seat = _Seat(trial)
    matrix = next(each for each in trial.parameters() if each.shape[0] == trial.num_experts)
    # Some are handed the bias of the choice by their layer.
    more = [torch.zeros(trial.num_experts)] * (_inputs(seat) - 1)
    for leading in ((5,), (1, 5)):
        states = torch.randn(*leading, matrix.shape[1], generator=draw)
        try:
            with torch.device("cpu"):
                return _follows(trial, seat, [states, *more])
        except Exception:
            seat.given, seat.calls = None, 0
    return False


def _copied(router: nn.Module, draw: torch.Generator) -> nn.Module:
    """A router with random weights on the CPU and its class's own forward."""
    memo: dict[int, Any] = {id(vars(router).get("forward")): None}
    for parameter in router.parameters():
        memo[id(parameter)] = nn.Parameter(torch.randn(parameter.shape, generator=draw))
    for buffer in router.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    trial = copy.deepcopy(router, memo)
    vars(trial).pop("forward", None)
    return trial


def _follows(trial: Any, seat: _Seat, inputs: list[torch.Tensor]) -> bool:
    offered, chosen = _read(trial(*inputs))
    live = seat.live
    if seat.calls != 1 or live is None or not torch.equal(chosen, live):
        return False
    results = []
    for told in (chosen, chosen.flip(1), (chosen + 1) % trial.num_experts):
        seat.given = told
        results.append(_read(trial(*inputs)))
        if not torch.equal(results[-1][1], told):
            return False
    # A weight is that of its expert, wherever that stands. Where a token is given all experts, the
    # scores look like weights, and stay where they are.
    (again, _), (flipped, _), _ = results
    return any(
        torch.equal(weights, same) and torch.allclose(other.flip(1), same)
        for weights, same, other in zip(offered, again, flipped, strict=True)
    )


def _read(result: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Find what may be the weights, and the experts, [tokens, chosen] each, among what a router
    returns."""
    (chosen,) = (each for each in result if not each.is_floating_point())
    return [t for t in result if t.is_floating_point() and t.shape == chosen.shape], chosen


def _inputs(seat: _Seat) -> int:
    """Count what a router must be given."""
    given = inspect.signature(seat.plain).parameters.values()
    return sum(each.default is each.empty for each in given)
