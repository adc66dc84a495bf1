"""Records the episodes that `benchmarks.update` trains on: one iteration of a configuration.

`python -m tools.record_episodes [--model DIRECTORY] [--out FILE]` plays one iteration of the
demo as `earl train` does, stops before its update, and writes its samples with their advantages,
lengths as they came, as a small Parquet file. The committed `benchmarks/data/episodes.parquet` was
recorded with a trained checkpoint's `policy/`, whose games last longer than the initial model's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from tools.harness import REPOSITORY
from tools.process_tree import CommandFailed, train

EPISODES = REPOSITORY / "benchmarks" / "data" / "episodes.parquet"
_COLUMNS = ("episode_id", "group_id", "tokens", "loss_mask", "rollout_logprobs", "turn_starts")


def record(config: Path, overrides: list[str], scratch: Path) -> pa.Table:
    """Play iteration 0 and return its samples in row order, advantages and rewards joined."""
    spill, runs = scratch / "spill", scratch / "runs"
    settings = [
        *overrides,
        "iterations=1",
        "evaluation.every=0",
        "name=recorded",
        f"runs_directory={runs}",
        f"dispatch.directory={scratch / 'shards'}",
        "dispatch.durability=spill",
        f"dispatch.spill_url=file://{spill}",
    ]
    try:
        # A run that ends removes its shards; one that stops before its update keeps them.
        train(config, settings, scratch, environment={"EARL_FAULT": "update.before@0=raise"})
    except CommandFailed:
        log = (scratch / "train.log").read_text(encoding="utf-8", errors="replace")
        if "injected failure" not in log:
            raise
    return _joined(spill)


def _joined(spill: Path) -> pa.Table:
    tables = {stage: _read(spill, stage) for stage in ("rollout", "reward", "advantage")}
    rollout = tables["rollout"].sort_by("sample_id")
    for stage, column in (("reward", "reward"), ("advantage", "advantages")):
        other = tables[stage].sort_by("sample_id")
        if other["sample_id"].to_pylist() != rollout["sample_id"].to_pylist():
            raise RuntimeError(f"the {stage} stage wrote other samples than the rollout")
        rollout = rollout.append_column(column, other[column])
    return rollout.select([*_COLUMNS, "reward", "advantages"])


def _read(spill: Path, stage: str) -> pa.Table:
    files = sorted(spill.rglob(f"000000-{stage}-*.arrow"))
    if not files:
        raise RuntimeError(f"the run spilled no shard of the {stage} stage below {spill}")
    tables = []
    for file in files:
        with pa.ipc.open_file(file) as reader:
            tables.append(reader.read_all().replace_schema_metadata(None))
    return pa.concat_tables(tables)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--config", type=Path, default=Path("earl_core/recipes/demo.yaml"))
    made.add_argument("--model", type=Path, help="play with this model instead of model.path")
    made.add_argument("--out", type=Path, default=EPISODES)
    made.add_argument("--set", action="append", default=[], metavar="A.B=C")
    options = made.parse_args()
    overrides = list(options.set)
    if options.model:
        overrides += [f"model.path={options.model}", "model.builder=null"]
    with tempfile.TemporaryDirectory(prefix="earl-record-") as scratch:
        table = record(options.config, overrides, Path(scratch))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Flat encodings compress token ids well; nobody reads parts of so small a file.
    pa.parquet.write_table(table, options.out, compression="zstd", use_dictionary=True)
    print(f"{table.num_rows} samples, {options.out.stat().st_size} bytes in {options.out}")


if __name__ == "__main__":
    main()
