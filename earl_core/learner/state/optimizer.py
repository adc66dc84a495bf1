"""AdamW over the parts of the parameters that a rank holds, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim.adamw import adamw

from earl_core.config.update import UpdateConfig
from earl_core.tensors.device_copies import on_device
from earl_core.tensors.slices import buckets, local_part

State = dict[str, torch.Tensor]


class PolicyOptimizer:
    """AdamW; vectors (norms, biases) are not decayed. Tied weights are one parameter.

    It works on plain tensors that share the memory of the ranks' local parts, so that one kernel
    serves every mesh: fused, and on the CPU deterministic. `state` holds by parameter name
    "exp_avg" and "exp_avg_sq", float32 with the shape of the local part, and "step", a float32
    scalar; it is empty before the first step.

    offload: on a GPU the state is kept in pinned host memory and brought in bucket by bucket; on
    the CPU it is there anyway.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: UpdateConfig,
        *,
        offload: bool = False,
    ) -> None:
        self._config = config
        self.learning_rate = config.learning_rate
        self.offload = offload
        self.state: dict[str, State] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self.bind(named_parameters)

    def bind(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Train these parameters from now on; drops all state, which `load_state` puts back."""
        self._parameters = {
            name: parameter for name, parameter in named_parameters if parameter.requires_grad
        }
        self.state.clear()

    def zero_grad(self) -> None:
        """Forget the gradients, memory and all."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients; parameters without one stay as they are, and their state too."""
        work: list[tuple[list[str], float]] = []
        for decayed in (True, False):
            names = [
                name
                for name, parameter in self._parameters.items()
                if parameter.grad is not None and (parameter.ndim >= 2) == decayed
            ]
            self._make_state(names)
            work.append((names, self._config.weight_decay if decayed else 0.0))
        if self._on_host:
            self._step_from_host(work)
        else:
            for names, decay in work:
                self._apply(names, [self.state[name] for name in names], decay)

    def load_state(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the state of a parameter: "step", "exp_avg" and "exp_avg_sq" of its local part.
        Tensors that are where they belong are used as they are."""
        self.state[name] = {key: self._placed(name, tensor) for key, tensor in tensors.items()}

    @property
    def _on_host(self) -> bool:
        return self.offload and any(
            parameter.device.type == "cuda" for parameter in self._parameters.values()
        )

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        device = self._parameters[name].device
        if not self._on_host:
            return tensor.to(device)
        tensor = tensor.cpu()
        return tensor if device.type == "cpu" or tensor.is_pinned() else tensor.pin_memory()

    def _make_state(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.state:
                local = local_part(self._parameters[name])
                state = {"step": torch.zeros((), dtype=torch.float32, device=local.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(local, memory_format=torch.preserve_format)
                self.load_state(name, state)

    def _step_from_host(self, work: Sequence[tuple[Sequence[str], float]]) -> None:
        """The states of a few buckets are on the device at a time, on their way or in use."""

        def states_of(bucket: tuple[Sequence[str], float]) -> list[torch.Tensor]:
            return [tensor for name in bucket[0] for tensor in self.state[name].values()]

        def act(bucket: tuple[Sequence[str], float], here: Sequence[torch.Tensor]) -> None:
            tensors = iter(here)
            names, decay = bucket
            states = [{key: next(tensors) for key in self.state[name]} for name in names]
            self._apply(names, states, decay)

        parts = [
            (bucket, decay) for names, decay in work for bucket in buckets(names, self._nbytes)
        ]
        device = next(iter(self._parameters.values())).device
        on_device(parts, states_of, act, device)

    def _nbytes(self, name: str) -> int:
        return local_part(self._parameters[name]).nbytes

    def _apply(self, names: Sequence[str], states: Sequence[State], decay: float) -> None:
        """One step of these parameters with their states on their device."""
        lists: tuple[list[torch.Tensor], ...] = ([], [], [], [], [])
        for name, state in zip(names, states, strict=True):
            parameter = self._parameters[name]
            local = local_part(parameter)
            if local.numel() == 0:
                state["step"] += 1
                continue
            assert parameter.grad is not None
            parts = (local, local_part(parameter.grad), state["exp_avg"], state["exp_avg_sq"])
            for each, part in zip(lists, (*parts, state["step"]), strict=True):
                each.append(part)
        if not lists[0]:
            return
        parameters, gradients, averages, squares, steps = lists
        adamw(
            parameters, gradients, averages, squares, [], steps,
            fused=True,
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=self.learning_rate,
            weight_decay=decay,
            eps=self._config.epsilon,
            maximize=False,
        )  # fmt: skip


def learning_rate(config: UpdateConfig, iteration: int, iterations: int) -> float:
    """The learning rate of an iteration, counted from 0, of a run of `iterations`.

    Warm-up rises linearly to the full rate over `warmup_iterations`; afterwards the schedule
    falls from it towards 0, which the iteration after the last would reach. It depends on the
    arguments only, so that a resumed run needs no scheduler state.
    """
    if iteration < config.warmup_iterations:
        return config.learning_rate * (iteration + 1) / config.warmup_iterations
    length = max(1, iterations - config.warmup_iterations)
    progress = min(1.0, (iteration - config.warmup_iterations) / length)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate
