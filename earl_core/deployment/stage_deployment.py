"""The layout of one stage on the hardware: the numbers of ranks along each axis.

Imports no torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import (
    no_info_after_validator_function,
    plain_serializer_function_ser_schema,
)

from earl_core.deployment.stages import TRAINED

Degree = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]

Checkpointing = Literal["none", "selective", "full"]
"""The activations that a decoder layer keeps for the backward pass: all of them; the outputs of
matrix products and attention; its input alone. The rest is computed again."""

CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
"""The kinds of checkpointing, from the fastest to the smallest."""


def _checkpointing(stored: Any) -> Any:
    """Plans and observations of earlier versions say whether a layer keeps its input alone."""
    return {True: "full", False: "none"}[stored] if isinstance(stored, bool) else stored


AXES = ("replicas", "shard", "context_parallel", "tensor_parallel")
"""The axes of a mesh, in the order of rank numbers, the fastest last."""

EXPERT_AXES = ("expert_copies", "expert_shard", "expert_context", "expert_parallel")
"""The axes of the same ranks as experts see them: whole copies, ranks that share the parts of the
same experts, context ranks, ranks with different experts."""


class StageDeployment(NamedTuple):
    """The layout of one stage for one iteration; its worker groups follow when it changes.

    rollout: `replicas` engines of `tensor_parallel` devices each. Training stages: a mesh of
    replicas (copies of the parameters) x shard (ranks that share one copy, FSDP) x
    context_parallel (ranks that share the tokens of each microbatch) x tensor_parallel (ranks that
    share each matrix). expert_parallel: data-parallel ranks (replicas x shard) that hold different
    experts of a mixture; it takes no further ranks. threads: CPU threads of each device.
    max_model_len: tokens of one sequence. logits_chunk_tokens: positions whose logits exist at a
    time. offload_optimizer: its state lies in the host's memory. 0 for a size: it has no limit
    here.

    A plain tuple, because a choice makes hundreds within milliseconds; pydantic checks it as a
    field of a model, and writes it as a mapping.
    """

    stage: str
    replicas: Degree = 1
    tensor_parallel: Degree = 1
    context_parallel: Degree = 1
    shard: Degree = 1
    threads: Degree = 1
    max_tokens_per_microbatch: Size = 0
    max_model_len: Size = 0
    max_running_requests: Size = 0
    activation_checkpointing: Annotated[Checkpointing, BeforeValidator(_checkpointing)] = "none"
    logits_chunk_tokens: Size = 0
    offload_optimizer: bool = False
    expert_parallel: Degree = 1

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        written = plain_serializer_function_ser_schema(cls._asdict)
        return no_info_after_validator_function(cls._make, handler(source), serialization=written)

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """Ranks along each of `AXES`."""
        return self.replicas, self.shard, self.context_parallel, self.tensor_parallel

    @property
    def expert_axes(self) -> tuple[int, int, int, int]:
        """Ranks along each of `EXPERT_AXES`. Those with different experts follow each other among
        the data-parallel ranks, which `expert_parallel` divides; what they leave of `shard` shares
        the parts of the same experts."""
        common = math.gcd(self.shard, self.expert_parallel)
        copies = self.replicas * common // self.expert_parallel
        return copies, self.shard // common, self.context_parallel, self.expert_parallel

    @property
    def ranks(self) -> int:
        """Ranks of all groups, each with a device of its own (on a CPU, with `threads` cores)."""
        return math.prod(self.axes)

    @property
    def groups(self) -> int:
        """Worker groups: one for each engine, else one of all ranks."""
        return self.replicas if self.stage == "rollout" else 1

    @property
    def world_size(self) -> int:
        """Worker processes: an engine has one, whatever runs inside it."""
        return self.replicas if self.stage == "rollout" else self.ranks

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.replicas * self.shard

    @property
    def parts(self) -> int:
        """Ranks that share the parameters of one copy, tensor parallelism aside: context ranks hold
        parts of them as shard ranks do."""
        return self.shard * self.context_parallel

    @property
    def label(self) -> str:
        """The deployment in a few words, for tables and reasons."""
        words = [f"TP {self.tensor_parallel}"]
        words += [f"CP {self.context_parallel}"] if self.context_parallel > 1 else []
        words += [f"shard {self.shard}"] if self.shard > 1 else []
        words += [f"EP {self.expert_parallel}"] if self.expert_parallel > 1 else []
        words += [f"x {self.replicas}"] if self.replicas > 1 or self.stage == "rollout" else []
        words += [f"{self.threads} threads"] if self.threads > 1 else []
        words += [f"microbatch {size}"] if (size := self.max_tokens_per_microbatch) else []
        words += [f"at most {most} running"] if (most := self.max_running_requests) else []
        words += {"none": [], "selective": ["selective checkpointing"], "full": ["checkpointing"]}[
            self.activation_checkpointing
        ]
        words += [f"logits by {size}"] if (size := self.logits_chunk_tokens) else []
        words += ["optimizer offloaded"] if self.offload_optimizer else []
        return ", ".join(words).replace(", x ", " x ")


Move = Literal["none", "settings", "reshard", "rebuild"]
"""`settings`: live ranks take other limits and move nothing. `reshard`: live ranks exchange their
slices. `rebuild`: the processes end and others start."""


def move_between(before: StageDeployment, after: StageDeployment) -> Move:
    """Return the kind of move that leads from one stage deployment to another of the same stage."""
    if before == after:
        return "none"
    if before.stage == "rollout":
        limited = before._replace(max_running_requests=after.max_running_requests)
        return "settings" if limited == after else "rebuild"
    if before.stage not in TRAINED or before.ranks != after.ranks:
        return "rebuild"
    moved = ("axes", "expert_parallel", "offload_optimizer")
    same = all(getattr(before, name) == getattr(after, name) for name in moved)
    return "settings" if same else "reshard"
