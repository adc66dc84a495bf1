"""Planning at scale, and what a 1,000-GPU iteration would spend on moving its batch.

No data moves here: manifests are made up, planning is measured, transfers are predicted
(`dispatch_traffic.py`) with the locality and balance of real plans.

    python -m benchmarks.dispatch_scale [--quick] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from earl_core.dispatch.reads.plan import Layout, make_plan
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry, parse_manifest
from earl_core.dispatch.shards.shard import described
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
)
from tools.harness import Report, Row, interval, median, parser, publish
from tools.traffic import Traffic, predict

ROWS_PER_PRODUCER = 16
GROUP_SIZE = 8
GPUS, GPUS_PER_HOST = 1000, 8
BYTES_PER_TOKEN_AND_GPU = 16_000
"""An iteration's bytes on 1,000 GPUs: 15,625 MiB at 1,024 tokens (arXiv 2510.05943, Table 1)."""
LINKS_GBIT = (25, 200, 400)
PICKLE_BYTES_PER_SECOND = 1.5e9
"""The fastest measured mode of a peer's batch pickle; a controller loads and dumps every byte."""


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    report = Report("dispatch_scale", "Dispatch plans at scale, and a 1,000-GPU iteration")
    sizes = (256, 1024) if options.quick else (64, 256, 1024)
    for count in sizes:
        _planning(report, count, repetitions=5 if options.quick else 21)
    contexts = (1024, 32768) if options.quick else tuple(1024 << power for power in range(6))
    for context in contexts:
        report.rows += _iteration(context)
    at_200 = [row for row in report.rows if row.get("gbit") == 200]
    for name, way in (("shuffle", "shuffle_s"), ("host_first", "host_first_s")):
        report.headline[f"predicted_gpus1000_{name}_speedup_min"] = min(
            float(row["controller_s"] or 0) / float(row[way] or 1) for row in at_200
        )
    report.notes += [
        f"plan_s: median; rollout, reference, reward and advantage manifests, {ROWS_PER_PRODUCER} "
        "rows a producer, every consumer a host of its own; from parsed manifests to the replica "
        "of each row and the merged byte ranges that all hosts read from each other. The headline "
        "is the slower of same and other hosts.",
        "json_mib: all four manifests; parse_s: reading them, digests checked; peak_mib: of "
        "Python's memory while the controller parses and plans. gib: the batch. remote: share of "
        "it that must move (host-first). uneven: the dearest replica above the mean.",
        "Seconds of the 1,000 GPUs are predicted, not measured (tools/traffic.py): "
        "125 hosts with one link each, the volumes of arXiv 2510.05943, Table 1; locality and the "
        "busiest link come from plans over 16 rows a GPU, two prompts of eight, lengths log-normal "
        "by prompt (sigma 0.5) and uniform within 30 %. The headlines are the "
        "least of all contexts at 200 Gbit/s.",
        "controller_s: a single controller, its link alone; pickle_s: where it also loads and "
        f"dumps all bytes, each at {PICKLE_BYTES_PER_SECOND / 1e9:g} GB/s. shuffle_s: direct, rows "
        "dealt out blindly; host_first_s: direct, by the plan, where rollout and update share "
        "their hosts.",
    ]
    publish(report, options)


def _planning(report: Report, count: int, repetitions: int) -> None:
    """Measure planning for `count` producers and as many consumers, each a host of its own."""
    tokens = np.random.default_rng(7).integers(1024, 32768, size=(count, ROWS_PER_PRODUCER))
    made_on = [f"host{number:04d}" for number in range(count)]
    stages = manifests(tokens, made_on)
    texts = [json.dumps(stage.model_dump(mode="json"), allow_nan=False) for stage in stages]
    parse_seconds, peak = _controller(texts, _layout(made_on))
    medians: list[float] = []
    every: list[float] = []
    for where, hosts in (
        ("same hosts", made_on),
        ("other hosts", [f"train{number:04d}" for number in range(count)]),
    ):
        layout = _layout(hosts)
        seconds = [_timed(stages, layout) for _ in range(repetitions)]
        plan = make_plan(stages, layout)
        medians.append(median(seconds))
        every += seconds
        report.rows.append(
            {
                "case": f"plan {count:,} x {count:,}, {where}",
                "plan_s": medians[-1],
                "parse_s": parse_seconds,
                "json_mib": sum(map(len, texts)) / 2**20,
                "peak_mib": peak / 2**20,
                "gib": sum(stage.tensor_bytes for stage in stages) / 2**30,
                "remote": 1 - Traffic(plan).local_share,
                "uneven": plan.imbalance,
            }
        )
    report.headline[f"plan_seconds_{count}"] = max(medians)
    report.notes.append(f"plan {count:,} x {count:,}: {interval(every)} s in all repetitions.")


def _layout(hosts: Sequence[str]) -> Layout:
    # At 32K tokens the quadratic part of attention is a third of a 7B model's cost.
    return Layout(data_parallel=len(hosts), hosts=tuple(hosts), linear=1.0, quadratic=1.5e-5)


def _timed(stages: Sequence[Manifest], layout: Layout) -> float:
    gc.collect()
    begin = time.perf_counter()
    traffic = Traffic(make_plan(stages, layout))
    ranges = sum(len(incoming) for incoming in traffic.by_host.values())
    seconds = time.perf_counter() - begin
    assert ranges or traffic.local_share == 1.0
    return seconds


def _controller(texts: Sequence[str], layout: Layout) -> tuple[float, int]:
    """Seconds to parse the manifests, and peak bytes of parsing and planning."""
    begin = time.perf_counter()
    parsed = [parse_manifest(json.loads(text)) for text in texts]
    seconds = time.perf_counter() - begin
    del parsed
    gc.collect()
    tracemalloc.start()
    stages = [parse_manifest(json.loads(text)) for text in texts]
    kept = Traffic(make_plan(stages, layout))
    kept.by_host  # noqa: B018  (a cached property: computing it is the point)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def _iteration(context: int) -> list[Row]:
    """Predicted seconds of both ways at all link rates, at a mean context of `context` tokens."""
    hosts = GPUS // GPUS_PER_HOST
    names = [f"host{number:04d}" for number in range(hosts) for _ in range(GPUS_PER_HOST)]
    random = np.random.default_rng(context)
    tokens = _lengths(context, random)
    layout = Layout(data_parallel=hosts, ranks_per_replica=GPUS_PER_HOST, hosts=tuple(names))
    plan = make_plan(manifests(tokens, names), layout)
    traffic = Traffic(plan)
    host_first = traffic.local_share, _busiest(traffic)
    reshuffled = _reshuffled(tokens, hosts, random)
    volume = BYTES_PER_TOKEN_AND_GPU * context * GPUS
    rows: list[Row] = []
    for gbit in LINKS_GBIT:
        rate = gbit * 1e9
        each = volume / hosts
        alone = predict(hosts, each, rate, 0.0, 1.0, 1.0, 0.0, "single_controller")
        shuffle, first = (
            predict(hosts, each, rate, share, 1.0, 1.0, busiest, "direct")
            for share, busiest in (reshuffled, host_first)
        )
        rows.append(
            {
                "case": f"1,000 GPUs, {context // 1024}K tokens",
                "gib": volume / 2**30,
                "remote": 1 - host_first[0],
                "uneven": plan.imbalance,
                "gbit": gbit,
                "controller_s": alone,
                "pickle_s": alone + 2 * volume / PICKLE_BYTES_PER_SECOND,
                "shuffle_s": shuffle,
                "host_first_s": first,
            }
        )
    return rows


def _lengths(context: int, random: np.random.Generator) -> np.ndarray:
    """int64 [GPUs, rows] around a mean; the episodes of one prompt resemble each other."""
    groups = random.lognormal(-0.125, 0.5, size=(GPUS, ROWS_PER_PRODUCER // GROUP_SIZE))
    each = np.repeat(groups, GROUP_SIZE, axis=1) * random.uniform(
        0.7, 1.3, (GPUS, ROWS_PER_PRODUCER)
    )
    return np.maximum(each * context, 1).astype(np.int64)


def _busiest(traffic: Traffic) -> float:
    """Load of the busiest host's link above the mean bytes received, as a share of the mean."""
    mean = traffic.moved_bytes / len(traffic.by_host)
    return traffic.plan.busiest_bytes / mean - 1 if mean else 0.0


def _reshuffled(tokens: np.ndarray, hosts: int, random: np.random.Generator) -> tuple[float, float]:
    """Local share and busiest link when rows are dealt out blindly, as many to each host."""
    size = tokens.ravel().astype(np.float64)
    source = np.arange(len(size)) * hosts // len(size)
    target = random.permutation(source)
    away = source != target
    moved = [np.bincount(ends[away], size[away], hosts) for ends in (source, target)]
    local = float(size[~away].sum() / size.sum())
    return local, float(np.max(moved) / np.mean(moved) - 1)


STAGES = {
    "rollout": ROLLOUT_SCHEMA,
    "reference": REFERENCE_SCHEMA,
    "reward": REWARD_SCHEMA,
    "advantage": ADVANTAGE_SCHEMA,
}
_TURNS, _REASON_BYTES = 4, 4


def manifests(tokens: np.ndarray, hosts: Sequence[str]) -> list[Manifest]:
    """The sealed manifests of all stages. tokens: int64 [producers, rows], tokens of each row.
    hosts: the host of each producer."""
    producers, rows = tokens.shape
    ids = np.arange(producers * rows).reshape(tokens.shape) << 16
    found = []
    for stage, schema in STAGES.items():
        shards = tuple(
            _shard(stage, number, hosts[number], ids[number], tokens[number], schema)
            for number in range(producers)
        )
        found.append(
            Manifest(
                run="scale", iteration=12, stage=stage, key="0" * 64, policy_version=12,
                shards=shards,
            ).sealed()
        )  # fmt: skip
    return found


def _shard(
    stage: str, number: int, host: str, ids: np.ndarray, tokens: np.ndarray, schema: pa.Schema
) -> ShardEntry:
    strings = [field.name for field in schema if pa.types.is_large_string(field.type)]
    elements = dict.fromkeys(strings, np.full(len(ids), _REASON_BYTES))
    elements |= {"tokens": tokens, "turns": np.full(len(ids), _TURNS)}
    generation = 1_790_000_000_000_000_000 + number
    file = f"000012-{stage}-{number}-{generation}.arrow"
    return described(schema, ids, elements, host, file)


if __name__ == "__main__":
    main()
