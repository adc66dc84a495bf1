"""Ranks for the benchmarks of resharding and publishing, and the model that they hold."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from earl_core.cluster.host import LOOPBACK, meeting_variables, rank_variables
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh

MEBIBYTE = 2**20


class ModelSize(NamedTuple):
    """What differs between the full and the quick benchmark."""

    layers: int
    vocabulary: int


SMOLLM2 = ModelSize(layers=30, vocabulary=49152)
QUICK = ModelSize(layers=4, vocabulary=8192)


def even_llama(size: ModelSize) -> LlamaForCausalLM:
    """A random float32 Llama of SmolLM2-135M's shape, but with 8 heads and 4 key-value heads.

    SmolLM2 has 9 and 3, also of 64 numbers, which two tensor ranks cannot share.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def connected(shape: StageDeployment) -> UpdateMesh:
    """The mesh, on this rank, which computes with its share of the cores.

    accelerate sets the threads when it connects the ranks, so they are set after that.
    """
    mesh = create_mesh(shape)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // shape.ranks))
    return mesh


def in_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` in each rank of one world; what each returned, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[int, Any, str]] = context.Queue()
    children = [
        context.Process(target=_run, args=(rank, ranks, port, function, arguments, answers))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < ranks:
            try:
                rank, result, error = answers.get(timeout=5)
            except queue.Empty:
                if any(child.exitcode for child in children):
                    raise RuntimeError("a rank was killed") from None
                continue
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            results[rank] = result
    finally:
        for child in children:
            if len(results) < ranks:
                child.kill()
            child.join()
    return [results[rank] for rank in range(ranks)]


def _run(
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Queue[tuple[int, Any, str]],
) -> None:
    os.environ.update({**meeting_variables(LOOPBACK, port), **rank_variables(rank, [""] * ranks)})
    try:
        answers.put((rank, function(*arguments), ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, its own memory and shared pages it has touched."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Let `VmHWM` begin anew from what is resident now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
