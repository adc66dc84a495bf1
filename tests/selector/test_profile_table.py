"""The profile table: forgetting, its file, and what it says between its points."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from earl_core.selector.profile.profile_table import (
    Correction,
    ProfileError,
    ProfilePoint,
    ProfileTable,
    fingerprint,
    read_table,
    table_path,
    write_table,
)


def point(rate: float = 100.0, iteration: int = 0, **fields: float) -> ProfilePoint:
    place = {"context": 1024.0, "requests": 16.0, **fields}
    return ProfilePoint(key="rollout tp4", tokens_per_second=rate, iteration=iteration, **place)


def test_new_measurements_outweigh_old_ones_exponentially() -> None:
    table = ProfileTable().observe(point(100.0, 0), half_life=4)
    table = table.observe(point(200.0, 4), half_life=4)
    (merged,) = table.points
    # The old one counts half: (0.5 · 100 + 200) / 1.5.
    assert merged.tokens_per_second == pytest.approx(250 / 1.5)
    assert merged.weight == pytest.approx(1.5)
    for iteration in range(5, 200):
        table = table.observe(point(50.0, iteration), half_life=4)
    assert table.points[0].tokens_per_second == pytest.approx(50.0)
    assert len(table.observe(point(requests=64.0), half_life=4).points) == 2


def test_the_last_word_on_memory_counts() -> None:
    failed = point().model_copy(update={"out_of_memory": True})
    table = ProfileTable().observe(point(), 4).observe(failed, 4)
    assert [p.out_of_memory for p in table.points] == [True]
    assert [p.out_of_memory for p in table.observe(point(), 4).points] == [False]


def test_file_round_trip_and_refusals(tmp_path: Path) -> None:
    mark = fingerprint({"model": "m", "layers": 2}, {"gpu": "H100"})
    assert mark == fingerprint({"layers": 2, "model": "m"}, {"gpu": "H100"})
    assert mark != fingerprint({"layers": 3, "model": "m"}, {"gpu": "H100"})
    assert read_table(tmp_path, mark) == ProfileTable()
    table = ProfileTable().observe(point(), 4).observe(point(7.0, 3, context=4096.0), 4)
    path = write_table(tmp_path / "profiles", mark, table)
    assert read_table(path.parent, mark) == table
    assert pq.read_table(path).column("key").to_pylist() == ["rollout tp4"] * 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.rename(table_path(path.parent, "other"))
    with pytest.raises(ProfileError, match="another format or model"):
        read_table(path.parent, "other")
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ProfileError, match="remove it"):
        read_table(path.parent, mark)


def test_a_whole_file_with_lines_that_make_no_sense_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path, "mark", ProfileTable().observe(point(), 4))
    table = pq.read_table(path)
    place = table.schema.get_field_index("tokens_per_second")
    column = pa.array([float("nan")], pa.float64())
    pq.write_table(table.set_column(place, table.schema.field(place), column), path)
    with pytest.raises(ProfileError, match=r"tokens_per_second: .* remove it"):
        read_table(tmp_path, "mark")


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    table_path(tmp_path, "mark").mkdir()
    with pytest.raises(IsADirectoryError):
        write_table(tmp_path, "mark", ProfileTable())
    assert [file.name for file in tmp_path.iterdir()] == ["mark.parquet"]


def test_a_correction_is_exact_near_its_points_and_fades_away_from_them() -> None:
    many = [point(50.0).model_copy(update={"weight": 4.0})]
    correct = Correction(many, lambda context, requests: 100.0)
    factor, measured = correct(1024.0, 16.0)
    assert factor == pytest.approx(0.5, rel=0.02)
    assert measured > 0.9
    factor, measured = correct(131072.0, 256.0)
    assert factor == pytest.approx(1.0, abs=1e-6)
    assert measured < 1e-6
    assert Correction([], lambda context, requests: 1.0)(1.0, 1.0) == (1.0, 0.0)


ratios = st.lists(
    st.tuples(st.floats(64, 131072), st.floats(1, 256), st.floats(0.2, 5)), min_size=1, max_size=9
)


@examples(ratios, st.floats(64, 131072), st.floats(1, 256))
def test_a_correction_stays_between_what_was_measured(
    measured: list[tuple[float, float, float]], context: float, requests: float
) -> None:
    points = [point(100 * r, context=c, requests=n) for c, n, r in measured]
    factor, weight = Correction(points, lambda c, n: 100.0)(context, requests)
    found = [r for _, _, r in measured]
    assert min([1.0, *found]) * 0.999 <= factor <= max([1.0, *found]) * 1.001
    assert 0.0 <= weight < 1.0
