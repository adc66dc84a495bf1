"""New weights to running engines: seconds per GB, against a copy and vLLM's reload from disk.

python -m benchmarks.publish [--quick] [--rounds N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.reshard import QUICK, SMOLLM2, ModelSize, connected, even_llama, in_ranks
from earl_core.config.model import AdapterConfig
from earl_core.config.rollout import VllmConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.learner.low_rank import attach_pairs, entry_of, pairs_of, peft_name
from earl_core.learner.parallel.mesh import leave_world
from earl_core.learner.parallel_model import parallelize
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.publish import publish
from tools.harness import REPOSITORY, Report, Row, interval, median, parser
from tools.harness import publish as publish_report

DTYPE = "bfloat16"
ADAPTER_RANK = 16
MESHES = {
    "1 rank": StageDeployment("update"),
    "2 ranks, fsdp": StageDeployment("update", shard=2),
    "2 ranks, tp": StageDeployment("update", tensor_parallel=2),
    "2 ranks, dp": StageDeployment("update", replicas=2),
}
Seconds = dict[str, list[float]]


def _change(model: PreTrainedModel) -> None:
    """Other weights, as after an update."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)


async def _engine_rounds(
    engine: Engine, model: PreTrainedModel, shared: Path, rounds: int
) -> tuple[Seconds, int]:
    """Publish and load `rounds` versions; the first into fresh pages."""

    def made(version: int) -> WeightsManifest:
        return publish(dict(model.named_parameters()), shared, version, DTYPE)

    return await _versions(engine, shared, rounds, made, lambda: _change(model))


async def _versions(
    engine: Engine,
    shared: Path,
    rounds: int,
    made: Callable[[int], WeightsManifest],
    change: Callable[[], None] = lambda: None,
) -> tuple[Seconds, int]:
    """Have the engine play `rounds` versions; the seconds, and the bytes of the last one."""
    seconds: Seconds = {"publish": [], "load": []}
    size, last = 0, None
    pool = SegmentPool(shared, sys.maxsize)
    for version in range(1, rounds + 1):
        change()
        began = time.perf_counter()
        manifest = made(version)
        published = time.perf_counter()
        await engine.play_under(manifest)
        seconds["publish"].append(published - began)
        seconds["load"].append(time.perf_counter() - published)
        if last is not None:
            pool.release(last)
        last, size = Path(manifest.files[0].path), manifest.bytes
    return seconds, size


async def _adapter_rounds(
    engine: Engine, size: ModelSize, shared: Path, rounds: int
) -> tuple[Seconds, int]:
    """Publish `rounds` versions of an adapter beside all matrices, and have the engine play them;
    the bytes of one."""
    with torch.device("meta"):
        shell = even_llama(size)
    entry = entry_of(AdapterConfig(rank=ADAPTER_RANK), shell, "")
    attach_pairs(shell, entry, torch.float32)
    pairs = {peft_name(n): torch.randn(each.shape) for n, each in pairs_of(shell).items()}

    def made(version: int) -> WeightsManifest:
        return publish(pairs, shared, version, DTYPE, adapter=entry)

    return await _versions(engine, shared, rounds, made)


async def _reload_rounds(
    engine: Any, model: PreTrainedModel, disk: Path, rounds: int
) -> dict[str, list[float]]:
    """Time vLLM's own way: a model directory on disk, and a reload from it."""
    seconds: Seconds = {"save": [], "reload": []}
    for _ in range(rounds):
        _change(model)
        began = time.perf_counter()
        weights = {name: each.to(torch.bfloat16) for name, each in model.state_dict().items()}
        model.save_pretrained(disk, state_dict=weights)
        saved = time.perf_counter()
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(disk)})
        await engine.reset_prefix_cache()
        seconds["save"].append(saved - began)
        seconds["reload"].append(time.perf_counter() - saved)
    return seconds


async def _with_engine(engine: Engine, action: Callable[[], Awaitable[Any]]) -> Any:
    await engine.start()
    try:
        return await action()
    finally:
        await engine.stop()


def _publish_in_ranks(size: ModelSize, name: str, shared: str, rounds: int) -> list[float]:
    """Return, in each rank, the seconds of each publication."""
    mesh = connected(MESHES[name])
    model = parallelize(even_llama(size), mesh).model
    pool = SegmentPool(Path(shared), sys.maxsize)
    seconds = []
    for version in range(1, rounds + 1):
        if mesh.deployment.ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        manifest = publish(dict(model.named_parameters()), Path(shared), version, DTYPE, mesh=mesh)
        seconds.append(time.perf_counter() - began)
        older = Path(manifest.files[0].path).with_name(f"weights-{version - 1:08d}.safetensors")
        if mesh.rank == 0 and version > 1:
            pool.release(older)
    mesh.close()
    leave_world()
    return seconds


def _memcpy(size: int, rounds: int) -> list[float]:
    source = torch.empty(size, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(2)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Run the benchmark."""
    arguments = parser("New weights to running engines, against a copy and a reload from disk.")
    arguments.add_argument("--rounds", type=int, default=10, help="versions that are published")
    options = arguments.parse_args()
    model_size, rounds = (QUICK, 4) if options.quick else (SMOLLM2, options.rounds)
    shared = Path(mkdtemp(prefix="earl-publish-", dir="/dev/shm"))
    (REPOSITORY / "build").mkdir(exist_ok=True)
    disk = Path(mkdtemp(prefix="publish-", dir=REPOSITORY / "build"))
    report = Report("publish", f"New weights to running engines, {DTYPE}")
    try:
        asyncio.run(_run(report, model_size, rounds, shared, disk))
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    publish_report(report, options)


async def _run(
    report: Report, model_size: ModelSize, rounds: int, shared: Path, disk: Path
) -> None:
    transformers_logging.disable_progress_bar()
    model = even_llama(model_size)
    model.to(torch.bfloat16).save_pretrained(disk / "model")
    model = even_llama(model_size)
    torch_engine = TorchEngine(disk / "model", dtype=DTYPE)
    seconds, size = await _with_engine(
        torch_engine, lambda: _engine_rounds(torch_engine, model, shared / "torch", rounds)
    )
    memcpy = median(_memcpy(size, rounds))
    gigabytes = size / 1e9
    report.rows.append(_row("torch engine", seconds, memcpy, gigabytes))
    engine = TorchEngine(disk / "model", dtype=DTYPE, adapter_rank=ADAPTER_RANK)
    seconds, written = await _with_engine(
        engine, lambda: _adapter_rounds(engine, model_size, shared / "adapter", rounds)
    )
    report.rows.append(
        _row(f"torch engine, pairs of rank {ADAPTER_RANK}", seconds, memcpy, gigabytes)
    )
    report.headline["adapter_bytes_ratio"] = size / written
    for name, mesh in MESHES.items():
        times = in_ranks(
            _publish_in_ranks, mesh.ranks, model_size, name, str(shared / name), rounds
        )
        slowest = [max(each) for each in zip(*times, strict=True)]
        report.rows.append(_row(f"nobody ({name})", {"publish": slowest}, memcpy, gigabytes))
    if importlib.util.find_spec("vllm") is not None:
        await _vllm_rows(report, model, rounds, shared, disk, memcpy, gigabytes)
    report.notes += [
        f"{size / 1e6:,.0f} MB. Medians without the first round, which writes fresh pages; later "
        "ones write into the pages of a version that nobody reads.",
        "publish: cast from float32 into the shared file, digest, seal. load: check sizes, names "
        "and digest, fill the engine's own tensors (vLLM packs them anew), empty its caches.",
        f"pairs: of an adapter of rank {ADAPTER_RANK} beside all matrices of the layers, held by "
        "the engine beside the model; s / GB and the last columns count the whole model's bytes.",
        "memcpy: one copy of these bytes into memory already faulted. save and reload: "
        "`save_pretrained` to disk, then vLLM's `reload_weights` of the directory, from the page "
        "cache. It checks nothing, and leaves tied output layers on a CPU as they were.",
    ]


async def _vllm_rows(
    report: Report,
    model: PreTrainedModel,
    rounds: int,
    shared: Path,
    disk: Path,
    memcpy: float,
    gigabytes: float,
) -> None:
    from earl_core.rollout.engines.vllm_engine import VllmEngine

    engine = VllmEngine(
        disk / "model",
        dtype=DTYPE,
        max_model_len=512,
        max_running_requests=16,
        scratch=disk,
        settings=VllmConfig(kv_cache_gib=1),
    )

    async def both() -> tuple[Seconds, Seconds]:
        ours, _ = await _engine_rounds(engine, model, shared / "vllm", rounds)
        theirs = await _reload_rounds(engine._engine, model, disk / "reload", rounds)
        return ours, theirs

    ours, theirs = await _with_engine(engine, both)
    report.rows.append(_row("vLLM, TP 1", ours, memcpy, gigabytes))
    report.rows.append(_row("vLLM's own, from disk", theirs, memcpy, gigabytes))
    total, other = (_total(each) for each in (ours, theirs))
    report.headline["publish_seconds_per_gb_vllm"] = total / gigabytes
    report.headline["publish_speedup_vs_vllm_reload"] = other / total


def _total(seconds: Seconds) -> float:
    return sum(median(each[1:]) for each in seconds.values())


def _row(engine: str, seconds: Seconds, memcpy: float, gigabytes: float) -> Row:
    """The first of two columns is what the learner does, the second what the engine does."""
    total = _total(seconds)
    written, *loaded = seconds.values()
    return {
        "to": engine,
        "publish or save s": median(written[1:]),
        "from to": interval(written[1:]),
        "first s": written[0],
        "load s": median(loaded[0][1:]) if loaded else None,
        "s / GB": total / gigabytes,
        "publish / memcpy": median(written[1:]) / memcpy,
        "all / memcpy": total / memcpy,
    }


if __name__ == "__main__":
    main()
