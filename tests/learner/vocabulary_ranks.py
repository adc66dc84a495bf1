"""Logits that are split over the tensor ranks of a mesh, against whole ones."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.model import likeliest
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
from earl_core.learner.token_logprobs import HeadScore
from earl_core.pretrained.logit_transform import NO_TRANSFORM, LogitTransform
from earl_core.tensors.slices import local_part

_CASES: tuple[tuple[EntropyMode, LogitTransform], ...] = (
    ("none", NO_TRANSFORM),
    ("detached", NO_TRANSFORM),
    ("differentiable", NO_TRANSFORM),
    ("detached", LogitTransform(scale=0.3, cap=20.0)),
    ("differentiable", LogitTransform(scale=0.3, cap=20.0)),
)


def _changed(logits: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    logits = logits * transform.scale
    if transform.cap is None:
        return logits
    return torch.tanh(logits / transform.cap) * transform.cap


def compare_vocabularies(mesh: UpdateMesh) -> dict[str, float]:
    """Log-probs, entropies and gradients of split logits against whole ones in float64.

    With few rows some ranks have none.
    """
    ranks, size = mesh.submesh("tensor_parallel"), mesh.deployment.tensor_parallel
    found: dict[str, float] = {}
    for rows, positions in ((23, 9), (8, 3), (5, 4), (2, 3), (1, 3), (9, 0)):
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * 3

        weight, hidden = random(rows, 6), random(positions, 6)
        towards = random(2, positions)
        targets = torch.randint(0, rows, (positions,), generator=generator)
        ids = torch.randint(0, rows, (1, 7), generator=generator)
        most = -(-rows // size)
        start = min(rows, most * mesh.tensor_rank)
        shard = VocabularyShard(start, min(most, rows - start), most, ranks.get_group())
        for mode, transform in _CASES:
            head = torch.nn.Linear(6, rows, bias=False)
            head.weight = torch.nn.Parameter(
                distribute_tensor(weight.float(), ranks, [Shard(0)], src_data_rank=None)
            )
            whole = weight.clone().requires_grad_()
            both = [each.requires_grad_() for each in (hidden.clone(), hidden.float())]
            theirs = torch.log_softmax(_changed(both[0] @ whole.T, transform) / 0.7, dim=-1)
            expected = [theirs.gather(1, targets[:, None])[:, 0], -(theirs.exp() * theirs).sum(-1)]
            score = HeadScore(0.7, mode, vocabulary=shard, chunk_tokens=4, transform=transform)
            ours = score(head, both[1], torch.arange(positions), targets)
            table = torch.nn.Embedding(1, 1)
            table.weight = head.weight
            looked = DTensor.from_local(shard.embed(table, ids), ranks, [Partial()]).full_tensor()
            table = torch.nn.functional.embedding(ids, whole)
            loss = (ours[0] * towards[0]).sum() + (looked**2).sum()
            reference = (expected[0] * towards[0]).sum() + (table**2).sum()
            if mode == "differentiable":
                loss = loss + (ours[1] * towards[1]).sum()
                reference = reference + (expected[1] * towards[1]).sum()
            loss.backward()
            reference.backward()
            chosen = likeliest(head, both[1], torch.arange(positions), shard)
            pairs = [
                (ours[0], expected[0]),
                (chosen.double(), (hidden @ weight.T).argmax(-1).double()),
                (looked, table),
                (both[1].grad, both[0].grad),
                (local_part(head.weight.grad), whole.grad[start : start + most]),
            ]
            assert (ours[1] is None) == (mode == "none")
            if ours[1] is not None:
                assert ours[1].requires_grad == (mode == "differentiable")
                pairs.append((ours[1], expected[1]))
            for number, (one, other) in enumerate(pairs):
                gap = (one - other).abs()
                name = f"{mesh.deployment} {rows}_{mode}_{number} {transform.cap} vocabulary"
                found[name] = float(gap.max()) if gap.numel() else 0.0
    return found
