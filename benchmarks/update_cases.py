"""The workloads of `benchmarks.update`, and the sides that it compares."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.update_models import HYBRID, MOE

EARL, PLAIN, COMPILED, POSITIONS, TRL = "earl", "plain", "compiled", "positions", "trl"
SKIP, COMPUTE = "skip", "compute"
ADAPTER = "adapter"
APART, SINGLE = "apart", "single"
ADAPTER_RANK = 16
SIDES = {
    EARL: "EARL",
    ADAPTER: f"EARL, an adapter of rank {ADAPTER_RANK} beside all matrices",
    PLAIN: "plain torch loop, the same packs and attention (the limit)",
    COMPILED: "the same loop, MLPs and norms under torch.compile",
    POSITIONS: "plain torch loop, packed by position ids, sdpa with a dense mask, nothing shared",
    TRL: "TRL",
    SKIP: "EARL, update.zero_advantage: skip",
    COMPUTE: "EARL, update.zero_advantage: compute",
    APART: "EARL, nothing shared",
    SINGLE: "plain loop of transformers, one sample at a time",
}
LOOP_OF = {
    EARL: None, ADAPTER: None, PLAIN: "SamePacking", COMPILED: "SamePacking",
    POSITIONS: "PositionIds", TRL: None,
    SKIP: None, COMPUTE: None, APART: None, SINGLE: "Single",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One workload in one precision: `count` episodes as recorded, or of `tokens` tokens.

    updates: measured in each process. device_batches: rows of TRL's device batch, the fastest is
    used. estimator: gives the advantages anew. model: one of `update_models`; empty: the
    configuration's. Long samples need activation checkpointing to fit.
    """

    name: str
    precision: str
    tokens: int | None
    count: int
    group_size: int
    rounds: int
    updates: int
    sides: tuple[str, ...]
    device_batches: tuple[int, ...] = ()
    estimator: str | None = None
    model: str = ""

    @property
    def first(self) -> str:
        """The side of EARL that the others are compared with."""
        return self.sides[0]

    @property
    def title(self) -> str:
        """Name of the case in the table."""
        return f"{self.name} {self.precision}"


_THREE = (EARL, PLAIN, TRL)
CASES = (
    Case("short", "bf16", None, 24, 4, 2, 2, (*_THREE, ADAPTER, POSITIONS, COMPILED), (8, 24)),
    Case("short", "fp32", None, 24, 4, 1, 1, (*_THREE, ADAPTER), (8,)),
    Case("4k", "bf16", 4096, 2, 2, 2, 1, (*_THREE, ADAPTER), (1,)),
    Case("4k", "fp32", 4096, 2, 2, 1, 1, (*_THREE, ADAPTER), (1,)),
    Case("16k", "bf16", 16384, 2, 2, 1, 1, _THREE, (1,)),
    Case("16k", "fp32", 16384, 2, 2, 1, 1, _THREE, (1,)),
    Case("grpo", "bf16", None, 48, 4, 3, 2, (SKIP, COMPUTE), estimator="grpo"),
    Case("grpo", "fp32", None, 48, 4, 3, 1, (SKIP, COMPUTE), estimator="grpo"),
    Case("mixture", "fp32", None, 24, 4, 2, 2, (EARL, PLAIN), model=MOE),
    Case("hybrid", "fp32", None, 24, 4, 2, 1, (EARL, APART, SINGLE), model=HYBRID),
)
QUICK = Case("short", "auto", None, 8, 4, 1, 2, (*_THREE, ADAPTER), (8,))

ROUTED = (
    "EARL trains recorded experts, those which the untrained model chooses; the plain loop routes "
    "by itself, with transformers' `grouped_mm` experts."
)
SKIPPED = (
    "zero_advantage_speedup: `compute` over `skip`. 7 of 12 groups have no spread: 58 % of the "
    "tokens, of which a twentieth is computed all the same. Groups share prefixes, so 3,676 tokens "
    "against 2,205 (2,007 without the twentieth) go through the model: 1.67 (1.83) at the most."
)
