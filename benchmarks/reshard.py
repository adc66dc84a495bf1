"""A live learner changes its mesh: seconds and peak extra memory of each hop.

python -m benchmarks.reshard [--quick] [--rounds N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from earl_core.cluster.host import LOOPBACK, meeting_variables, rank_variables
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh, leave_world
from earl_core.learner.parallel_model import ParallelModel, build_shell, parallelize
from earl_core.learner.state.checkpoint import read_training_state, write_training_state
from earl_core.learner.state.optimizer import PolicyOptimizer
from earl_core.learner.state.reshard import move_state
from earl_core.system.memory import reset_peaks, resident_bytes, resident_peak_bytes
from earl_core.tensors.slices import slices_like, slices_of
from tools.harness import Report, Row, interval, median, parser, publish
from tools.shapes import Shape

RANKS = 2
HOPS = {
    "dp2": StageDeployment("update", replicas=2),
    "tp2": StageDeployment("update", tensor_parallel=2),
    "cp2": StageDeployment("update", context_parallel=2),
    "fsdp2": StageDeployment("update", shard=2),
}
WALK = ("dp2", "tp2", "cp2", "fsdp2", "tp2", "fsdp2", "dp2", "cp2", "dp2")
"""Every pair but those of cp2 and fsdp2, whose parts are the same."""
MEBIBYTE = 2**20


class ModelSize(NamedTuple):
    """Numbers in which the full and the quick benchmark differ."""

    layers: int
    vocabulary: int


SMOLLM2 = ModelSize(layers=30, vocabulary=49152)
QUICK = ModelSize(layers=4, vocabulary=8192)


def even_llama(size: ModelSize) -> LlamaForCausalLM:
    """A random float32 Llama of SmolLM2-135M's shape, but with 8 heads and 4 key-value heads.
    SmolLM2 has 9 and 3, also of 64 numbers, which two tensor ranks cannot share."""
    torch.manual_seed(0)
    shape = Shape("even", "llama", 576, 1536, size.layers, 8, 4, 64, size.vocabulary)
    return LlamaForCausalLM(shape.config(2048))


def connected(shape: StageDeployment) -> UpdateMesh:
    """The mesh, on this rank, which computes with its share of the cores. accelerate sets the
    threads when it connects the ranks, so they are set after that."""
    mesh = create_mesh(shape)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // shape.ranks))
    return mesh


def in_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` in each rank of one world; what each returned, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    given = (ranks, port, function, arguments, answers)
    world = torch.multiprocessing.spawn(_run, given, nprocs=ranks, join=False)  # type: ignore[no-untyped-call]
    found: dict[int, Any] = {}
    ended = False
    while not ended:
        ended = world.join(timeout=0.1)
        # A rank that has much to say waits until it is read.
        while not answers.empty():
            rank, result = answers.get()
            found[rank] = result
    return [found[rank] for rank in range(ranks)]


def _run(
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Any,
) -> None:
    os.environ.update({**meeting_variables(LOOPBACK, port), **rank_variables(rank, [""] * ranks)})
    answers.put((rank, function(*arguments)))


class _Learner:
    """Weights, optimizer and mesh of one rank, as the policy learner holds them."""

    def __init__(self, size: ModelSize, mesh: StageDeployment) -> None:
        self.parallel = parallelize(even_llama(size), connected(mesh))
        self.optimizer = PolicyOptimizer(self.parallel.model.named_parameters(), UpdateConfig())
        for parameter in self.parallel.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def adopt(self, parallel: ParallelModel, state: dict[str, dict[str, torch.Tensor]]) -> None:
        old, self.parallel = self.parallel, parallel
        self.optimizer.bind(parallel.model.named_parameters())
        for name, tensors in state.items():
            self.optimizer.load_state(name, tensors)
        old.mesh.close()

    def live(self, shape: StageDeployment) -> dict[str, float]:
        """The way of the system."""
        mesh = create_mesh(shape)
        shell = build_shell(self.parallel, mesh)
        moved = move_state(self.parallel.model, self.optimizer.state, shell.model, mesh)
        self.adopt(shell, moved.state)
        return {"received": moved.moved_bytes, "counted": moved.peak_bytes}

    def through_checkpoint(self, shape: StageDeployment, directory: Path) -> None:
        """Change the mesh as it happens when processes start again, without their start."""
        parallel = self.parallel
        write_training_state(
            directory,
            model=parallel.model,
            tokenizer=_tokenizer(),
            optimizer=self.optimizer,
            state={},
            mesh=parallel.mesh,
        )
        mesh = create_mesh(shape)
        fresh = parallelize(type(parallel.model)(parallel.model.config), mesh)
        self.adopt(fresh, {})
        read_training_state(directory, model=fresh.model, optimizer=self.optimizer, mesh=mesh)

    def held_bytes(self) -> int:
        weights = dict(self.parallel.model.named_parameters())
        parts = [
            (name, key, tensor)
            for name, entries in self.optimizer.state.items()
            for key, tensor in entries.items()
        ]
        slices = slices_of(weights) + slices_like(weights, parts)
        return sum(each.tensor.nbytes for each in slices)

    def checksum(self) -> float:
        """Add up all values, whatever the mesh: each element counts once."""
        total = torch.zeros(1, dtype=torch.float64)
        for name, parameter in self.parallel.model.named_parameters():
            for tensor in (parameter, *self.optimizer.state[name].values()):
                total += _sum_of_whole(parameter, tensor.detach())
        return float(total)


def _sum_of_whole(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    local = slices_of({"": parameter})[0]
    values = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    total = values.double().sum().view(1)
    if values.ndim == 0 or local.box.sizes == local.shape:
        return total
    dist.all_reduce(total)
    return total


def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = action()
    dist.barrier()
    return time.perf_counter() - began, result


def _measure(size: ModelSize, rounds: int, scratch: str) -> list[dict[str, Any]]:
    """Make the walk in each rank, `rounds` times; one row a hop."""
    learner = _Learner(size, HOPS[WALK[0]])
    before = learner.checksum()
    rows = [
        _hop(learner, start, end, copy=number == 0)
        for number in range(rounds)
        for start, end in pairwise(WALK)
    ]
    if abs(learner.checksum() - before) > 1e-9 * abs(before):
        raise RuntimeError("the values have changed on the way")
    for start, end in pairwise(WALK):
        directory = Path(scratch) / "state"
        seconds, _ = _timed(lambda end=end, at=directory: learner.through_checkpoint(HOPS[end], at))
        rows.append({"hop": f"{start} → {end}", "checkpoint": seconds})
    learner.parallel.mesh.close()
    leave_world()
    return rows


def _hop(learner: _Learner, start: str, end: str, copy: bool) -> dict[str, Any]:
    own = os.getpid()
    resident, _ = resident_bytes(own)
    reset_peaks([own])
    seconds, moved = _timed(lambda: learner.live(HOPS[end]))
    extra = resident_peak_bytes([own]) - max(resident, resident_bytes(own)[0])
    row = {"hop": f"{start} → {end}", "seconds": seconds, "resident": extra, **moved}
    if copy:
        source = torch.empty(learner.held_bytes(), dtype=torch.uint8).fill_(1)
        target = torch.empty_like(source).fill_(2)
        row["memcpy"], _ = _timed(lambda: target.copy_(source))
    return row


def main() -> None:
    """Run the benchmark."""
    arguments = parser("Change of the mesh of a live learner: seconds and memory of each hop.")
    arguments.add_argument("--rounds", type=int, default=5, help="how often each hop is made")
    options = arguments.parse_args()
    size, rounds = (QUICK, 1) if options.quick else (SMOLLM2, options.rounds)
    scratch = mkdtemp(prefix="earl-reshard-", dir="/dev/shm")
    try:
        ranks = in_ranks(_measure, RANKS, size, rounds, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    model = even_llama(size)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    report = Report("reshard", "Change of the mesh of a live learner: two ranks, gloo, float32")
    hops = [f"{a} → {b}" for a, b in pairwise(WALK)]
    for hop in hops:
        report.rows.append(_row(hop, [rows for rank in ranks for rows in rank], largest))
    worst = max(float(row["seconds"] or 0) for row in report.rows)
    report.headline = {
        "reshard_seconds_worst_hop": worst,
        "reshard_extra_over_largest_parameter": max(
            float(row["extra / largest"] or 0) for row in report.rows
        ),
        "reshard_speedup_vs_checkpoint": min(
            float(row["checkpoint s"] or 0) / float(row["seconds"] or 1) for row in report.rows
        ),
    }
    report.notes = [
        f"{weights // 4 / 1e6:.0f}M parameters with Adam: {3 * weights / MEBIBYTE:.0f} MiB in all; "
        f"the largest parameter has {largest / MEBIBYTE:.0f} MiB.",
        "seconds: median of all rounds, from the barrier before to the one after, with new "
        "process groups and the new model's shell; in the same processes.",
        "extra: most bytes that moving had allocated beyond those of before and after, the larger "
        "rank; resident: the same from the kernel's peak, with everything else in the process.",
        "memcpy: one copy of the bytes that a rank holds afterwards. checkpoint: written to "
        "shared memory, synced, and read by a fresh model under the new mesh.",
    ]
    publish(report, options)


def _row(hop: str, rows: list[dict[str, Any]], largest: int) -> Row:
    live = [row for row in rows if row["hop"] == hop and "seconds" in row]
    through = [row["checkpoint"] for row in rows if row["hop"] == hop and "checkpoint" in row]
    seconds = [row["seconds"] for row in live]
    counted = max(row["counted"] for row in live)
    return {
        "hop": hop,
        "seconds": median(seconds),
        "from to": interval(seconds),
        "memcpy s": median([row["memcpy"] for row in live if "memcpy" in row]),
        "checkpoint s": median(through),
        "received MiB": max(row["received"] for row in live) / MEBIBYTE,
        "extra MiB": counted / MEBIBYTE,
        "extra / largest": counted / largest,
        "resident MiB": max(row["resident"] for row in live) / MEBIBYTE,
    }


if __name__ == "__main__":
    main()
