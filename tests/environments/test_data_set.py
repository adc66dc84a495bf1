"""Data sets of the prompt environment: directories, globs, splits, compression, storages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError
from tests.environments.test_tools import in_pool


def rows(start: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(start, start + count)]


def lines(start: int, count: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows(start, count))


def save(folder: str, *shards: list[dict[str, str]]) -> None:
    """As `datasets.Dataset.save_to_disk` of datasets 5.2 does, in batches of two rows."""
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    for name, shard in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(shard)
        with (
            fsspec.open(f"{folder}/{name}", "wb", auto_mkdir=True) as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table, max_chunksize=2)
    with fsspec.open(f"{folder}/state.json", "w") as file:
        json.dump(state, file)


def questions(path: str | Path, **options: Any) -> list[str]:
    """All, by prompts from the last row on, so that the first repeats at the end."""
    environment = create("prompt", {"path": str(path), **options})
    seen: list[str] = []
    while len(seen) < 2 or seen[-1] != seen[0]:
        seen.append(environment.reset(len(seen), 0)[0]["content"])
    return seen[:-1]


def expected(start: int, count: int) -> list[str]:
    return [row["prompt"] for row in rows(start, count)]


@pytest.fixture(params=["file", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder on this machine, and one on a storage without files."""
    yield str(tmp_path) if request.param == "file" else f"memory://{tmp_path}"
    fsspec.filesystem("memory").store.clear()


def test_what_datasets_saved(home: str) -> None:
    save(f"{home}/one", rows(0, 5), [], rows(5, 3))
    assert questions(f"{home}/one") == expected(0, 8)
    save(f"{home}/both/train", rows(0, 3))
    save(f"{home}/both/test", rows(3, 4))
    with fsspec.open(f"{home}/both/dataset_dict.json", "w") as file:
        json.dump({"splits": ["train", "test"]}, file)
    assert questions(f"{home}/both", split="test") == expected(3, 4)
    with pytest.raises(ConfigError, match="has the splits train, test: name one of them"):
        questions(f"{home}/both")
    with pytest.raises(ConfigError, match="has no splits: drop the option split"):
        questions(f"{home}/one", split="test")


def test_directories_and_globs_of_files(home: str) -> None:
    files = {"test.jsonl": lines(0, 2), "train-1.jsonl.gz": gzip.compress(lines(5, 2))}
    files |= {"train-0.jsonl": b"\n" + lines(2, 3).rstrip(), "README.md": b"# Sums"}
    for name, content in files.items():
        with fsspec.open(f"{home}/data/{name}", "wb", auto_mkdir=True) as file:
            file.write(content)
    assert questions(f"{home}/data", split="train") == expected(2, 5)
    assert questions(f"{home}/data/t*.jsonl", split="test") == expected(0, 2)
    assert questions(f"{home}/data/train*") == expected(2, 5)
    for split in ({}, {"split": "dev"}):
        with pytest.raises(ConfigError, match="has the splits train, test: name one of them"):
            questions(f"{home}/data", **split)
    with pytest.raises(ConfigError, match=r"holds no .jsonl, .json, .csv or .parquet"):
        questions(f"{home}/data/*.parquet")


def test_parquet_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for number in range(2):
        path = tmp_path / "main" / f"train-{number:05}-of-00002.parquet"
        pq.write_table(pa.Table.from_pylist(rows(3 * number, 3)), path)
    assert questions(tmp_path) == expected(0, 6)
    assert questions(tmp_path, split="train") == expected(0, 6)


def test_rows_are_not_copied_out_of_the_file(tmp_path: Path) -> None:
    save(str(tmp_path), [{"prompt": "x" * 1_000_000, "answer": "1"}] * 20)
    before = pa.total_allocated_bytes()
    environment = create("prompt", {"path": str(tmp_path)})
    assert len(environment.reset(7, 0)[0]["content"]) == 1_000_000
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_episodes_in_hosts(tmp_path: Path) -> None:
    save(str(tmp_path), rows(0, 4))

    async def scenario(pool: EnvironmentPool) -> None:
        for prompt in range(6):
            (message,) = await pool.reset(prompt, prompt, 0)
            assert message["content"] == f"{prompt % 4} + 1?"
            result = await pool.step(prompt, f"That is {prompt % 4 + 1}.")
            assert (result.reward, result.info["outcome"]) == (1.0, "correct")

    reward = "earl_core.environments.rewards:contained_number"
    options = {"path": str(tmp_path), "reward_function": reward}
    in_pool(scenario, "prompt", tools=(), options=options)


def test_lists_of_json_and_tables_of_texts(home: str) -> None:
    table = 'prompt,answer\r\n"0 + 1?",1\r\n\r\n"1 + 1?","2"\r\n"two\nlines, ""2""",3'
    whole = json.dumps(rows(0, 3), indent=1).encode()
    files = {"a.json": whole, "b.json.gz": gzip.compress(whole), "c.json": lines(0, 3)}
    files |= {"d.csv": table.encode("utf-8-sig"), "only/train.json": whole}
    for name, content in files.items():
        with fsspec.open(f"{home}/{name}", "wb", auto_mkdir=True) as file:
            file.write(content)
    for name in ("a.json", "b.json.gz", "c.json", "only"):
        assert questions(f"{home}/{name}") == expected(0, 3)
    assert questions(f"{home}/d.csv") == [*expected(0, 2), 'two\nlines, "2"']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"prompt": "a", "answer": "b"}, 3]', "row 1 of .* is no JSON object"),
        ("a.json", '[{"prompt": "a", "answer": "b"}, {"prompt"', "row 1 of .* is no JSON: "),
        ("a.json", '[{"prompt": "a", "answer": "b"} {}]', "neither ',' nor ']' behind its row 0"),
        ("a.json", '[{"prompt": "a", "answer": "b"}] 1', "goes on behind its list"),
        ("a.json", '[{"prompt": "a", "answer": "b"},', "row 1 of .* is no JSON: "),
        ("a.json", "[]", "holds no rows"),
        ("a.json", '{"data": []}', r"row 0 .*\(line 1\) has no column 'prompt', .*; it has data"),
        ("a.csv", "prompt,answer\na,b\n\nc\n", r"row 1 of .*\(line 4\) has 1 values for the 2"),
        ("a.csv", "prompt,prompt\na,b\n", "does not name each column once: prompt, prompt"),
        ("a.csv", "prompt,answer\na,\n", r"row 0 .*\(line 2\) has an answer .* is empty"),
        ("a.csv", 'prompt,answer\na,b\n"a"b,c', "row 1 .* is no CSV"),
        ("a.csv", "prompt,answer\n", "holds no rows"),
    ],
)
def test_lists_and_tables_that_are_none(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        create("prompt", {"path": str(tmp_path / name)})
