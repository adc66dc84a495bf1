"""The episodes that a run keeps: `iterations/000012/episodes.parquet`, written from its shards.

One row per sample, ascending by `sample_id`: the columns of the rollout
(`earl_core.trajectory.schema`), `texts` as a list, and those of the rewards, null where an episode
could not be scored. Texts and outcomes pass the redactor, and so does `scoring`. Failed
episodes have no samples, and are not there. The file is whole or absent, and names the data that it
was made of. `EpisodeKeeper` writes it while the update goes on.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.run.remote_stores import HostStores
from earl_core.secrets import redact
from earl_core.system.errors import EarlError
from earl_core.system.files import open_file, writing_atomic
from earl_core.trajectory.samples import utf8
from earl_core.trajectory.schema import GROUP_SCHEMA, REWARD_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_BITS

NAME = "episodes.parquet"
PROBE_NAME = "probe.json"
"""Episodes of a run that its sources of rewards are asked for again (`experience.probe`)."""

_TEXTS = pa.field("texts", pa.large_list(pa.large_string()), nullable=False)
_REWARDS = [
    pa.field("reward", pa.float32()),
    pa.field("scores", pa.large_string()),
    REWARD_SCHEMA.field("turn_totals").with_nullable(True),
]
_SCORED = [field.name for field in _REWARDS]
_COLUMNS = pa.schema([*GROUP_SCHEMA.set(GROUP_SCHEMA.get_field_index("texts"), _TEXTS), *_REWARDS])
SCHEMA = pa.schema([field for field in _COLUMNS if field.name in (*ROLLOUT_SCHEMA.names, *_SCORED)])
"""Columns of the files of kept episodes; of groups that were played while weights changed there is
`token_versions` and `opponent_versions` besides."""

_SOURCE = b"earl.source"
_ADDED = ["role", "turn_totals"]
"""Files of older releases lack them."""
_BATCH = 64
"""Rows that are read at once: who wants a few episodes reads no more of them."""


_ROWS = 1024
"""Rows that are copied at once, where they are put in order."""


class EpisodesDamaged(EarlError):
    """A file of episodes that is not as it was written."""


def write_episodes(
    path: Path, stores: HostStores, rollout: Manifest, reward: Manifest, most: int | None = None
) -> None:
    """Write the episodes of an iteration, unless `path` holds them already; on disk at the end.

    rollout, reward: sealed manifests, whose shards are leased while they are read; other hosts'
    come through copies in the file's directory. most: the first so many episodes; None: all. Raises
    `ManifestError` for shards that are gone or damaged, and `OSError`.
    """
    source = f"{rollout.data_digest()} {reward.data_digest()} {most}".encode()
    if _source_of(path) == source:
        return
    ids = np.unique([row >> SAMPLE_BITS for entry in rollout.shards for row in entry.row_ids])
    rewards = pa.concat_tables(stores.table(entry, path.parent) for entry in reward.shards)
    samples = rewards["sample_id"]
    with writing_atomic(path) as descriptor, open(descriptor, "wb", closefd=False) as stream:
        # Shards that an older release wrote lack what came since.
        there = rollout.column_names() if rollout.shards else set(ROLLOUT_SCHEMA.names)
        fields = [field for field in _COLUMNS if field.name in (*there, *_SCORED)]
        schema = pa.schema(fields, {_SOURCE: source})
        with pq.ParquetWriter(
            stream, schema, compression="zstd", write_page_checksum=True
        ) as writer:
            # Not what a mixture's tokens were routed to: it is larger than all the rest.
            names = [field.name for field in fields if field.name not in _SCORED]
            for table in _ascending(stores, rollout, path.parent, names):
                if most is not None and len(ids) > most:
                    kept = np.searchsorted(table["episode_id"].to_numpy(), ids[most])
                    table = table.slice(0, kept)
                found = pc.index_in(table["sample_id"], samples)
                for field in _REWARDS:
                    table = table.append_column(field, rewards[field.name].take(found))
                writer.write_table(_with_texts(table).cast(schema))


def _ascending(
    stores: HostStores, rollout: Manifest, directory: Path, names: list[str]
) -> Iterator[pa.Table]:
    """These columns of all shards, rows by ascending sample_id, some at a time."""
    shards = sorted(filter(attrgetter("rows"), rollout.shards), key=lambda each: each.row_ids[0])
    tables = (stores.table(entry, directory).select(names) for entry in shards)
    if all(a.row_ids[-1] < b.row_ids[0] for a, b in itertools.pairwise(shards)):
        yield from tables
        return
    # Prompts were dealt to engines by other than their numbers.
    whole = pa.concat_tables(tables)
    order = np.argsort(whole["sample_id"].to_numpy())
    for start in range(0, len(order), _ROWS):
        yield whole.take(order[start : start + _ROWS])


def remove_oldest(run_directory: Path, most_bytes: int) -> None:
    """Remove the oldest iterations' files until the rest have `most_bytes` together."""
    held = 0
    for path in sorted(run_directory.glob(f"iterations/[0-9]*/{NAME}"), reverse=True):
        held += path.stat(follow_symlinks=False).st_size
        if held > most_bytes:
            path.unlink(missing_ok=True)


def read_samples(
    path: Path, most: int | None = None, columns: Iterable[str] | None = None
) -> pa.Table:
    """Columns (None: all) of all samples of the first `most` episodes (None: all), `episode_id`
    among them. Raises `FileNotFoundError` where none were kept, `EpisodesDamaged`."""
    batches, ids = [], np.empty(0, np.int64)
    try:
        with open_file(path) as stream:
            file = pq.ParquetFile(stream, page_checksum_verification=True)
            asked = file.schema_arrow.names if columns is None else columns
            there = file.schema_arrow.names
            names = [
                name
                for name in dict.fromkeys(["episode_id", *asked])
                if name in there or name not in _ADDED
            ]
            for batch in file.iter_batches(_BATCH, columns=names):
                batches.append(batch)
                ids = np.union1d(ids, batch["episode_id"].to_numpy())
                if most is not None and len(ids) > most:
                    break
            schema = pa.schema([file.schema_arrow.field(name) for name in names])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise EpisodesDamaged(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    table = pa.Table.from_batches(batches, schema)
    return table.filter(pc.is_in(table["episode_id"], pa.array(ids[:most])))


def _source_of(path: Path) -> bytes | None:
    """Return the digests of the manifests that an existing file was made of; None where there is no
    file to use."""
    try:
        with open_file(path) as stream:
            return (pq.read_schema(stream).metadata or {}).get(_SOURCE)
    except (OSError, pa.ArrowException):
        return None


def _with_texts(table: pa.Table) -> pa.Table:
    """Texts as lists; what people read has no secrets in it."""
    lists = [json.loads(row) for row in table["texts"].to_pylist()]
    texts = [[redact(utf8(text)) for text in each] for each in lists]
    there = [name for name in ("outcome", "scoring", "forms") if name in table.column_names]
    shown = {name: map(redact, table[name].to_pylist()) for name in there}
    for name, values in {"texts": texts, **shown}.items():
        field = SCHEMA.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, pa.array(list(values), field.type)
        )
    return table


logger = logging.getLogger(__name__)


class EpisodeKeeper:
    """Writes one iteration's episodes at a time, as `tracking.keep_episodes` asks. A failure costs
    a warning and a line of the ledger, never the run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._thread: threading.Thread | None = None
        # Iterations that overlap keep theirs from threads of their own.
        self._turn = threading.Lock()

    def begin(self, rollout: Manifest, reward: Manifest) -> None:
        """Keep the episodes of these sealed stages; returns at once."""
        if self._run.config.tracking.keep_episodes != "none":
            with self._turn:
                self._wait()
                self._thread = threading.Thread(
                    target=self._keep, args=(rollout, reward), name="earl-episodes", daemon=True
                )
                self._thread.start()

    def settle(self) -> None:
        """Wait for what was begun, a stage's deadline at most."""
        with self._turn:
            self._wait()

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._run.config.deadlines.stage)

    def _keep(self, rollout: Manifest, reward: Manifest) -> None:
        run, tracking, iteration = self._run, self._run.config.tracking, rollout.iteration
        most = tracking.keep_episodes if isinstance(tracking.keep_episodes, int) else None
        try:
            write_episodes(run.episodes_path(iteration), run.stores, rollout, reward, most)
            remove_oldest(run.path, tracking.keep_episodes_bytes)
        except Exception as error:
            logger.warning("the episodes of iteration %d were not kept: %s", iteration, error)
            run.note(iteration, "episodes", f"not kept: {error}")
