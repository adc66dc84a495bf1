"""Change the mesh of a live learner: weights and optimizer state go from part to part in memory.

The new model is built on the meta device. Parameter by parameter, and each of its optimizer
tensors, every rank receives the box that it will own from those that hold it, and gives its old
part back, so that never more than parts of one parameter exist twice. Nothing is gathered, goes to
disk or is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from earl_core.tensors.collectives import Ranks
from earl_core.tensors.exchange import BoxExchange
from earl_core.tensors.slices import boxes_of_all, is_distributed, slices_of

if TYPE_CHECKING:
    from earl_core.learner.parallel.mesh import UpdateMesh

State = dict[str, dict[str, torch.Tensor]]


class _Entry(NamedTuple):
    """A tensor of a parameter's state. cut: whether like the parameter. dtype: its name in torch.
    device: its type. value: as nested lists, of what is not cut, which is alike on all ranks."""

    key: str
    cut: bool
    dtype: str
    device: str
    value: Any


@dataclass
class Moved:
    """Result and cost of moving a model. peak_bytes: most memory beyond that before and after."""

    state: State = field(default_factory=dict)
    moved_bytes: int = 0
    peak_bytes: int = 0


@torch.no_grad()
def move_state(old: nn.Module, state: State, shell: nn.Module, mesh: UpdateMesh) -> Moved:
    """Fill `shell`, a model on the meta device laid out for `mesh`, with what `old` holds.

    state: of the optimizer, by parameter name, with local parts. Returns it in the new layout.
    `old` and `state` are empty afterwards: their memory is given back part by part. Collective.
    Raises ValueError, before anything is moved, when the models' parameters differ.
    """
    ranks = Ranks(mesh)
    for parameter in old.parameters():
        parameter.grad = None
    before = dict(old.named_parameters())
    after = dict(shell.named_parameters())
    ranks.do(lambda: _check_same(before, after))
    mover = _Mover(before, after, state, places_of(shell), ranks, mesh)
    for name in before:
        mover.move(name)
    _take_buffers(old, shell)
    return mover.moved


class _Mover:
    """Moves one name after the other; knows every rank's boxes before and after."""

    def __init__(
        self,
        before: dict[str, nn.Parameter],
        after: dict[str, nn.Parameter],
        state: State,
        places: dict[str, Places],
        ranks: Ranks,
        mesh: UpdateMesh,
    ) -> None:
        names = list(before)
        old, new = slices_of(before), slices_of(after)
        self._rank = ranks.rank
        self._before, self._after, self._places = before, after, places
        self._slices = {each.name: each for each in old}
        self._held = dict(zip(names, boxes_of_all(old, names, ranks), strict=True))
        self._wanted = dict(zip(names, boxes_of_all(new, names, ranks), strict=True))
        self._state = state
        self._device = mesh.device
        # A rank whose part of a parameter is empty may have no state for it.
        described: dict[str, list[list[Any]]] = ranks.from_first(self._describe)
        self._entries = {name: [_Entry(*e) for e in each] for name, each in described.items()}
        largest = max(parameter.nbytes for parameter in before.values())
        self._exchange = BoxExchange(mesh.group("world"), largest)
        self.moved = Moved()

    def move(self, name: str) -> None:
        """A parameter and its optimizer state."""
        each = self._slices.pop(name)
        part = self._move(name, each.tensor, each.shape)
        fill(self._places[name], self._after[name], part)
        if part is not each.tensor:
            self._give_back(each.tensor, owned=is_distributed(self._before[name]))
        del each, part
        entries = self._state.pop(name, {})
        box = self._held[name][self._rank]
        for entry in self._entries.get(name, []):
            key, tensor = entry.key, entries.pop(entry.key, None)
            if tensor is None:
                # Where the others have theirs, because that decides which backend brings it: the
                # mesh's device, or the host where the state is offloaded.
                device = torch.device("cpu") if entry.device == "cpu" else self._device
                dtype = getattr(torch, entry.dtype)
                tensor = (
                    torch.empty(box.sizes, dtype=dtype, device=device)
                    if entry.cut
                    else torch.tensor(entry.value, dtype=dtype, device=device)
                )
            if entry.cut:
                part = self._move(name, tensor, tuple(self._before[name].shape))
                if part is not tensor:
                    self._give_back(tensor, owned=False)
                tensor = part
            self.moved.state.setdefault(name, {})[key] = tensor
        self.moved.moved_bytes = self._exchange.moved_bytes
        kept = max(0, self._exchange.held_bytes)
        self.moved.peak_bytes = self._exchange.peak_bytes - kept

    def _move(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return self._exchange.move(tensor, self._held[name], self._wanted[name], shape)

    def _give_back(self, tensor: torch.Tensor, owned: bool) -> None:
        """Free the memory, whoever else has a view of it: the old model is of no use any more."""
        storage = tensor.untyped_storage()
        # Several tensors may lie in one storage, such as one read from a file; FSDP2's do not.
        if storage.resizable() and (owned or storage.nbytes() == tensor.nbytes):
            self._exchange.drop(tensor)
            storage.resize_(0)

    def _describe(self) -> dict[str, list[_Entry]]:
        described: dict[str, list[_Entry]] = {}
        for name, entries in self._state.items():
            for key, tensor in sorted(entries.items()):
                cut = tuple(tensor.shape) == self._slices[name].box.sizes
                code = str(tensor.dtype).removeprefix("torch.")
                value = None if cut else tensor.tolist()
                entry = _Entry(key, cut, code, tensor.device.type, value)
                described.setdefault(name, []).append(entry)
        return described


def _check_same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    shapes, wanted = ({n: tuple(t.shape) for n, t in each.items()} for each in (before, after))
    if shapes != wanted:
        different = sorted(n for n in {*shapes, *wanted} if shapes.get(n) != wanted.get(n))
        raise ValueError(
            f"the new layout is of another model: {len(different)} parameters differ, such as "
            f"{different[0]}"
        )


Places = list[tuple[nn.Module, str]]
"""Modules and the attribute under which each has a parameter."""


def places_of(model: nn.Module) -> dict[str, Places]:
    """Where the model uses each parameter: module and attribute; two places for tied weights."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, Places] = {name: [] for name in names.values()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, leaf))
    return places


def fill(places: Places, empty: nn.Parameter, part: torch.Tensor) -> None:
    """Put a parameter in place of one on the meta device, of which this rank holds `part`."""
    whole = part
    if is_distributed(empty):
        from torch.distributed.tensor import DTensor

        meta = cast(DTensor, empty)
        whole = DTensor.from_local(
            part,
            meta.device_mesh,
            meta.placements,
            run_check=False,
            shape=meta.shape,
            stride=meta.stride(),
        )
    parameter = nn.Parameter(whole, requires_grad=empty.requires_grad)
    for module, leaf in places:
        module._parameters[leaf] = parameter


def _take_buffers(old: nn.Module, shell: nn.Module) -> None:
    modules = dict(shell.named_modules())
    for name, buffer in old.named_buffers():
        prefix, _, leaf = name.rpartition(".")
        modules[prefix]._buffers[leaf] = buffer
