"""What `test_slices`, `test_checkpoint`, `test_reshard` and `tests/weights` do in several ranks.

Every rank runs all cases; a case gives a JSON value, or fails all.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import _dynamo, nn  # noqa: F401  (imported before the ranks part)
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from earl_core.dispatch.segments.pool_directory import MARK
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh, leave_world
from earl_core.learner.parallel_model import build_shell, parallelize
from earl_core.learner.reshard import reshard
from earl_core.learner.state.checkpoint import (
    CheckpointError,
    read_training_state,
    write_training_state,
)
from earl_core.learner.state.reshard import move_state
from earl_core.tensors import hashing
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.slices import boxes_of_all, local_box, slices_of
from earl_core.weights.publish import publish
from tests.learner.cuts import check_boxes, mesh_of, meshes
from tests.learner.helpers import random_samples
from tests.learner.test_policy_learner import make_learner
from tests.learnt import assert_learnt


class Moments:
    """An optimizer's state whose values follow from names, cut like the parameters."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in parameters.items():
            box = local_box(parameter)
            self.state[name] = {
                "step": torch.tensor(3.0),
                **{
                    key: value_of(name, key, parameter.shape)[box.index].clone()
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }

    def load_state(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.state[name] = dict(tensors)


def value_of(name: str, key: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{key}".encode()))
    return torch.randn(shape, generator=generator)


def policy(tied: bool, wide: int = 1) -> PreTrainedModel:
    """Two layers, with a vocabulary that no mesh divides evenly."""
    config = LlamaConfig(
        vocab_size=60 * wide + 1,
        hidden_size=32 * wide,
        intermediate_size=48 * wide,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(name, "weight", parameter.shape))
    return model


def laid_out(model: PreTrainedModel, mesh: UpdateMesh) -> PreTrainedModel:
    """The model cut for the mesh, in place."""
    return parallelize(model, mesh).model


def check_state(model: PreTrainedModel, state: dict[str, dict[str, torch.Tensor]]) -> int:
    """Every local part has the values of its box, bit for bit."""
    assert state.keys() == {name for name, _ in model.named_parameters()}
    for each in slices_of(dict(model.named_parameters())):
        found = {"weight": each.tensor, **state[each.name]}
        assert found.pop("step").item() == 3.0
        for key, tensor in found.items():
            wanted = value_of(each.name, key, torch.Size(each.shape))[each.box.index]
            assert torch.equal(tensor, wanted), (each.name, key)
    return len(state)


def check_files(mesh: UpdateMesh, scratch: Path, tied: bool) -> dict[str, Any]:
    """A checkpoint and published weights written by the mesh, whose ranks are on two hosts where
    weights are tied; the reference's read by it, and that of two hosts."""
    kind = "tied" if tied else "untied"
    if tied:
        mesh = on_two_hosts(mesh)
    model = laid_out(policy(tied), mesh)
    moments = Moments(dict(model.named_parameters()))
    target = scratch / f"{kind}-{'x'.join(map(str, mesh.deployment.axes))}"
    write_training_state(
        target,
        model=model,
        tokenizer=words(),
        optimizer=moments,
        state={"policy_version": 7},
        mesh=mesh,
    )
    host = mesh.hosts[mesh.rank] if mesh.hosts else ""
    memory = scratch / f"published-{target.name}-{host}"
    sent: list[int] = []
    hashed: list[int] = []
    with patch.object(Ranks, "send", counting(sent)), counting_hashes(hashed):
        manifest = publish(dict(model.named_parameters()), memory, 7, "bfloat16", mesh=mesh)
    for source in [scratch / f"{kind}-reference", *([target] if tied else [])]:
        empty = laid_out(policy(tied), mesh)
        with torch.no_grad():
            for parameter in empty.parameters():
                parameter.zero_()
        fresh = Moments({})
        state = read_training_state(source, model=empty, optimizer=fresh, mesh=mesh)
        assert state == {"policy_version": 7}
        check_state(empty, fresh.state)
    return {
        "state": str(target),
        "digest": manifest.digest,
        "file": manifest.files[0].path,
        "host": host,
        "hashed": sum(hashed),
        "sent": sum(sent),
        "lacking": lacking(model, mesh),
    }


def on_two_hosts(mesh: UpdateMesh) -> UpdateMesh:
    """The mesh with the second half of its ranks on another host."""
    ranks = mesh.deployment.ranks
    return replace(mesh, hosts=[f"host-{2 * rank // ranks}" for rank in range(ranks)])


def counting(sent: list[int]) -> Callable[[Ranks, torch.Tensor, int], dist.Work]:
    send = Ranks.send

    def counted(self: Ranks, tensor: torch.Tensor, to: int) -> dist.Work:
        sent.append(tensor.numel())
        return send(self, tensor, to)

    return counted


@contextlib.contextmanager
def counting_hashes(hashed: list[int]) -> Iterator[None]:
    """The bytes of each tensor that is hashed meanwhile."""
    real = hashing.tensor_hash

    def counted(tensor: torch.Tensor) -> str:
        hashed.append(tensor.nbytes)
        return real(tensor)

    with patch.object(hashing, "tensor_hash", counted):
        yield


def lacking(model: nn.Module, mesh: UpdateMesh) -> int:
    """Elements that the hosts hold no part of, of all hosts together."""
    named = dict(model.named_parameters())
    count = 0
    for held in boxes_of_all(slices_of(named), list(named), Ranks(mesh)):
        for host in set(mesh.hosts):
            here = {box for box, own in zip(held, mesh.hosts, strict=True) if own == host}
            count += sum(box.numel for box in set(held) - here)
    return count


def words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


def check_reshard(ranks: int) -> list[dict[str, Any]]:
    """Through all meshes and back to the first; values and memory after every hop."""
    every = meshes(ranks)
    results = []
    for tied, walk in ((False, [*every, every[0]]), (True, [every[0], every[-1], every[1]])):
        mesh = create_mesh(walk[0])
        parallel = parallelize(policy(tied), mesh)
        state = Moments(dict(parallel.model.named_parameters())).state
        for shape in walk[1:]:
            target = create_mesh(shape)
            shell = build_shell(parallel, target)
            moved = move_state(parallel.model, state, shell.model, target)
            mesh.close()
            parallel, mesh, state = shell, target, moved.state
            check_state(parallel.model, state)
            results.append({"peak": moved.peak_bytes, "moved": moved.moved_bytes})
        mesh.close()
    return results


def check_memory(ranks: int) -> list[dict[str, int]]:
    """What torch's allocator saw in each hop, in bytes beyond before and after."""
    walk = [
        {2: [(2, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)]},
        {4: [(4, 1, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 1, 4), (1, 4, 1, 1), (4, 1, 1, 1)]},
    ][ranks // 4][ranks]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mesh = create_mesh(mesh_of(*walk[0]))
        parallel = parallelize(policy(False, wide=8), mesh)
        state = Moments(dict(parallel.model.named_parameters())).state
        results = []
        for number, sizes in enumerate(walk[1:]):
            target = create_mesh(mesh_of(*sizes))
            shell = build_shell(parallel, target)
            with record_function(f"hop {number}"):
                moved = move_state(parallel.model, state, shell.model, target)
            mesh.close()
            parallel, mesh, state = shell, target, moved.state
            results.append({"counted": moved.peak_bytes})
        mesh.close()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.nbytes())
    largest = max(math.prod(each.shape) * 4 for each in parallel.model.parameters())
    for number, result in enumerate(results):
        (hop,) = [each for each in events if each.name() == f"hop {number}"]
        inside = range(hop.start_ns(), hop.start_ns() + hop.duration_ns())
        held = [0, *itertools.accumulate(nbytes for when, nbytes in changes if when in inside)]
        result |= {"seen": max(held) - max(0, held[-1]), "largest": largest}
    return results


def check_training(scratch: Path, ranks: int) -> list[float]:
    """A step, another mesh, a step, ...: how far the weights are from one process's."""
    base = scratch / "model"
    settings = {"threads": 1, "weight_decay": 0.1, "learning_rate": 1e-3}
    alone = make_learner(base, **settings)
    walk = [each for each in meshes(ranks) if each.tensor_parallel < 4]
    mesh = create_mesh(walk[0])
    learner = make_learner(base, mesh=mesh, **settings)
    differences = []
    for number, shape in enumerate(walk):
        samples = random_samples(9, seed=number)
        if number:
            reshard(learner, shape, learner.config)
        mesh = learner.mesh
        assert mesh.deployment == shape
        replicas = mesh.deployment.data_parallel
        mine = [each for each in samples if each.group_id % replicas == mesh.data_rank]
        before = {name: weight.clone() for name, weight in alone.named_weights().items()}
        norm = alone.update(samples, iteration=number)["grad_norm"]
        assert_learnt([norm], before, alone.named_weights())
        learner.update(mine, iteration=number)
        wanted = alone.named_weights()
        slices = slices_of(learner.named_weights())
        differences += [
            float((each.tensor - wanted[each.name][each.box.index]).abs().max())
            for each in slices
            if each.box.numel
        ]
    mesh.close()
    return [max(differences), len(walk)]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_failures(mesh: UpdateMesh, scratch: Path) -> list[str]:
    """What one rank cannot do fails on all with one message, and nothing is left of it."""
    model = laid_out(policy(False), mesh)
    weights = dict(model.named_parameters())
    moments = Moments(weights)
    there = scratch / f"failures-{mesh.deployment.ranks}"

    def write() -> None:
        write_training_state(
            there / "state",
            model=model,
            tokenizer=words(),
            optimizer=moments,
            state={},
            mesh=mesh,
        )

    def read() -> None:
        read_training_state(scratch / "damaged", model=model, optimizer=moments, mesh=mesh)

    def send() -> None:
        publish(weights, there / "published", 7, "bfloat16", mesh=mesh)

    def send_on() -> None:
        over = on_two_hosts(mesh)
        publish(weights, there / over.hosts[mesh.rank], 7, "bfloat16", mesh=over)

    messages = []
    last = mesh.rank == mesh.deployment.ranks - 1
    for action, broken, place, culprit in (
        (write, full, "os.posix_fallocate", mesh.rank == 0),
        (send, full, "os.posix_fallocate", mesh.rank == 0),
        (write, full, "earl_core.tensors.joint_file.write_part", last),
        (send, full, "earl_core.tensors.joint_file.write_part", last),
        (send_on, full, "earl_core.tensors.joint_file.write_part", last),
        (read, None, "", False),
    ):
        with patch(place, broken) if culprit else contextlib.nullcontext():
            try:
                action()
            except (OSError, CheckpointError) as error:
                number = error.errno if isinstance(error, OSError) else 0
                messages.append(f"{type(error).__name__} {number} {error}")
        # The store's mark stays, as long as the store does.
        left = Ranks(mesh).from_first(
            lambda: [str(each) for each in there.rglob("*.s*") if each.name != MARK]
        )
        assert left == [], left
    check_state(model, moments.state)
    return messages


def all_cases(scratch: Path, ranks: int) -> dict[str, Any]:
    """Every case of every mesh of this many ranks."""
    done: dict[str, Any] = {"boxes": {}, "files": {}}
    for shape in meshes(ranks):
        mesh = create_mesh(shape)
        done["boxes"][str(shape.axes)] = check_boxes(mesh)
        done["files"][f"{shape.axes}"] = check_files(mesh, scratch, tied=False)
        if shape.tensor_parallel > 1:
            done["files"][f"{shape.axes} tied"] = check_files(mesh, scratch, tied=True)
        if shape == meshes(ranks)[-1]:
            done["failures"] = check_failures(mesh, scratch)
        mesh.close()
    done["reshard"] = check_reshard(ranks)
    done["memory"] = check_memory(ranks)
    done["training"] = check_training(scratch, ranks)
    leave_world()
    return done


def two(scratch: Path) -> dict[str, Any]:
    return all_cases(scratch, 2)


def four(scratch: Path) -> dict[str, Any]:
    return all_cases(scratch, 4)
