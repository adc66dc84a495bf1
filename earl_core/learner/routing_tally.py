"""How the routers of a trained mixture choose: other than was played, and how evenly."""

from __future__ import annotations

import torch

from earl_core.learner.model import PackedTensors
from earl_core.pretrained.routers import Routers
from earl_core.tensors.collectives import Ranks


class RoutingTally:
    """Sums over the microbatches of an update, on the device. Empty for a model without routers.

    ranks: those that compute other tokens. coefficient: of the loss that balances experts.
    """

    def __init__(self, ranks: Ranks, coefficient: float) -> None:
        self._ranks, self._coefficient = ranks, coefficient
        self._charged = torch.zeros((), dtype=torch.float64)
        self._changed: torch.Tensor | None = None
        self._loads: torch.Tensor | None = None
        self._recorded = torch.zeros(())

    def add(self, packed: PackedTensors, routers: Routers | None) -> None:
        """Count a microbatch, after its passes; keeps nothing of it."""
        if routers is None:
            return
        shape, live = routers.shape, routers.live()
        if packed.charge is not None:
            self._charged = self._charged.to(live.device) + routers.charged()
        routers.forget()
        used, layers = live, torch.arange(shape.layers, device=live.device)
        if packed.routing is not None:
            given = packed.routing.view(-1, shape.layers, shape.chosen).to(torch.int64)
            known = ~(given == shape.unrecorded).flatten(1).all(dim=1)
            used = torch.where(known[:, None, None], given, live)
            same = (given[..., :, None] == live[..., None, :]).any(dim=-1)
            changed = ((~same) & known[:, None, None]).sum(dim=(0, 2)).double()
            self._changed = changed if self._changed is None else self._changed + changed
            self._recorded = self._recorded.to(live.device) + known.sum() * shape.chosen
        places = (layers[:, None] * shape.experts + used).reshape(-1)
        loads = torch.bincount(places, minlength=shape.layers * shape.experts)
        loads = loads.view(shape.layers, shape.experts)
        self._loads = loads if self._loads is None else self._loads + loads

    def metrics(self, steps: int) -> dict[str, float]:
        """The share of recorded choices that the live routers did not make, and the load of the
        busiest expert over the mean one: mean and largest of the layers; and the loss that balances
        experts before its coefficient, mean of so many optimizer steps. Collective."""
        own = {
            "changed": _plain(self._changed),
            "loads": _plain(self._loads),
            "recorded": float(self._recorded),
            "charged": float(self._charged),
        }
        every = self._ranks.gather_json(own)
        found: dict[str, float] = {}
        recorded = sum(each["recorded"] for each in every)
        if recorded:
            shares = _summed([each["changed"] for each in every]) / recorded
            found["routing_changed_share"] = float(shares.mean())
            found["routing_changed_share_max"] = float(shares.max())
        if any(each["loads"] for each in every):
            loads = _summed([each["loads"] for each in every])
            uneven = loads.amax(dim=1) / loads.mean(dim=1).clamp_min(1e-9)
            found["expert_load"] = float(uneven.mean())
            found["expert_load_max"] = float(uneven.max())
        if self._coefficient and recorded:
            charged = sum(each["charged"] for each in every)
            found["router_aux_loss"] = charged / (self._coefficient * steps)
        return found


def _plain(tensor: torch.Tensor | None) -> list[float]:
    return [] if tensor is None else tensor.tolist()


def _summed(every: list[list[float]]) -> torch.Tensor:
    return torch.stack([torch.tensor(each).double() for each in every if each]).sum(dim=0)
