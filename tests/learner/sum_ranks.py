"""What `test_sums` does in four ranks: errors of gradients in bf16 that the ranks add up."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import ContextCut, ContextGroup, PackExchange
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.prefix_tree import separate
from earl_core.learner.parallel.gradients import Gradients
from earl_core.learner.parallel.mesh import ALONE, UpdateMesh, create_mesh
from earl_core.learner.parallel_model import parallelize
from earl_core.tensors.slices import local_part
from tests.learner.mesh_cases import model

TOKENS, HEADS, DIM = 1501, 4, 16
RANKS = 4

Errors = dict[str, list[float]]
"""Relative, by norms: of one rank and of four."""


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert float(exact.norm()) > 0
    return float((found.double() - exact).norm() / exact.norm())


def norm_errors(mesh: UpdateMesh) -> Errors:
    """Of the last norm's gradient, whose tokens are dealt to the tensor ranks."""
    random = torch.Generator().manual_seed(0)
    states = torch.randn(1, TOKENS, 32, generator=random)
    # All tokens' parts of the gradient have one sign, so that it is the sum whose rounding counts.
    towards = states.sign() * torch.rand(1, TOKENS, 32, generator=random)
    states, towards = states.bfloat16(), towards.bfloat16()

    def gradient(mesh: UpdateMesh) -> torch.Tensor:
        parallel = parallelize(model("llama"), mesh, mixed=True)
        size, rank = mesh.deployment.tensor_parallel, mesh.tensor_rank
        mine, along = (each.tensor_split(size, dim=1)[rank] for each in (states, towards))
        norm = parallel.model.model.norm
        torch.autograd.backward((norm(mine) * along).float().sum())
        Gradients(parallel.model.parameters(), mesh).reduce()
        assert norm.weight.grad is not None
        return local_part(norm.weight.grad)

    exact = model("llama").model.norm
    torch.autograd.backward((exact(states.float()) * towards).sum())
    alone = UpdateMesh(ALONE, 0, torch.device("cpu"))
    return {"norm": [error(gradient(each), exact.weight.grad.double()) for each in (alone, mesh)]}


def attention_errors(exchange: PackExchange) -> Errors:
    """Of the gradients of keys and values, whose queries are dealt to the context ranks."""
    tree = separate([TOKENS])
    random = torch.Generator().manual_seed(1)
    states = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=random).bfloat16()
    towards = torch.rand(1, TOKENS, HEADS, DIM, generator=random).bfloat16()
    mine = torch.from_numpy(exchange.cut.positions(exchange.place.rank))

    def gradients(
        dtype: torch.dtype, places: torch.Tensor, exchange: PackExchange | None = None
    ) -> list[torch.Tensor]:
        leaves = [each[:, :, places].to(dtype).requires_grad_() for each in states]
        boundaries = SampleBoundaries.from_tree(tree, exchange=exchange)
        module = torch.nn.Module()
        attended, _ = varlen_attention(module, *leaves, None, sample_boundaries=boundaries)
        torch.autograd.backward((attended * towards[:, places].to(dtype)).float().sum())
        return [each.grad.double() for each in leaves if each.grad is not None]

    everything = torch.arange(TOKENS)
    exact, one = (gradients(dtype, everything) for dtype in (torch.float32, torch.bfloat16))
    found: Errors = {}
    for name, part, alone, expected in zip(
        ("query", "key", "value"),
        gradients(torch.bfloat16, mine, exchange),
        one, exact, strict=True,
    ):  # fmt: skip
        several = torch.zeros_like(expected)
        several[:, :, mine] = part
        dist.all_reduce(several, group=exchange.place.group)
        found[name] = [error(alone, expected), error(several, expected)]
    return found


def exchange_errors(exchange: PackExchange) -> Errors:
    """Of a sum over the context ranks, against one rounding of it; and two sums are equal."""
    random = torch.Generator().manual_seed(2)
    parts = torch.randn(RANKS, TOKENS, 24, generator=random).bfloat16()
    place = exchange.place
    expected = parts.double().sum(0)[exchange.cut.positions(place.rank)]
    found = [exchange.sum_to_owner(parts[place.rank]) for _ in range(2)]
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)
    return {"exchange": [error(expected.bfloat16(), expected), error(found[0], expected)]}


def errors(scratch: Path) -> Errors:
    """All of them, of this rank."""
    torch.set_num_threads(1)
    found = norm_errors(create_mesh(StageDeployment("update", tensor_parallel=RANKS)))
    place = ContextGroup.of(create_mesh(StageDeployment("update", context_parallel=RANKS)))
    assert place is not None
    exchange = PackExchange(place, ContextCut.even(TOKENS, RANKS))
    return found | attention_errors(exchange) | exchange_errors(exchange)
