"""Where two runs begin to differ: real runs with a difference in one stage, and edited copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from earl_core.comparison import Bisection, bisect, recorded_runs
from earl_core.comparison.recorded_run import Place
from earl_core.comparison.weights import compare_tensors
from earl_core.dispatch import Manifest, read_manifest
from earl_core.dispatch.shards.manifest import sealed_path, write_manifest
from earl_core.run.record import FORKED, SOFTWARE, Journal, read_lines, read_record, write_record
from tests.flows.runs import STAGES, Runs

Undisturbed = Callable[..., Runs]


@pytest.fixture
def pair(undisturbed: Undisturbed, tmp_path: Path) -> tuple[Path, Path]:
    """A finished run, and a copy of it under another uid, whose keys are made as a fork's are."""
    one, other = undisturbed().run(), tmp_path / "again"
    shutil.copytree(one, other)
    record = read_record(other)
    forked = {"from": "run@1", "keys": record["uid"]}
    write_record(other, {**record, "uid": "0123456789ab", FORKED: forked})
    for path in other.glob("iterations/*/*.json"):
        write_manifest(path, read_manifest(path).model_copy(update={"run": "0123456789ab"}))
    return one, other


def found(*paths: Path) -> Bisection:
    return bisect(*recorded_runs(paths))


def edit(run: Path, stage: str, change: Callable[[Manifest], dict[str, Any]]) -> None:
    """Seal a stage of iteration 1 again, with changes."""
    path = sealed_path(run, 1, stage)
    sealed = read_manifest(path)
    write_manifest(path, sealed.model_copy(update=change(sealed)))


def other_checksum(sealed: Manifest) -> dict[str, Any]:
    first, *rest = sealed.shards
    return {"shards": (first.model_copy(update={"checksum": "f" * 16}), *rest)}


def other_digest(sealed: Manifest) -> dict[str, Any]:
    return {"outputs": {**sealed.outputs, "digest": "f" * 32}}


def two_threads(sealed: Manifest) -> dict[str, Any]:
    plan = sealed.outputs["plan"]
    update = {**plan["stages"]["update"], "threads": 2}
    stages = {**plan["stages"], "update": update}
    return {"outputs": {**sealed.outputs, "plan": {**plan, "stages": stages}}}


def rewrite(run: Path, column: str, change: Callable[[list[Any]], None]) -> None:
    """Change a column of the episodes of iteration 1."""
    path = run / "iterations" / "000001" / "episodes.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    change(values)
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    pq.write_table(
        table.set_column(place, field, pa.array(values, field.type)), path, write_page_checksum=True
    )


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_run_that_was_trained_again_is_the_same(pair: tuple[Path, Path]) -> None:
    same = found(*pair)
    assert same.difference is None
    assert same.plan is None
    assert same.damage == same.notes == []
    # The weights that it begins with, and every stage of both iterations.
    assert same.compared == 1 + 2 * len(STAGES)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "select"])
def test_a_difference_in_each_stage_is_found(pair: tuple[Path, Path], stage: str) -> None:
    edit(pair[1], stage, other_digest if stage in ("update", "publish") else other_checksum)
    difference = found(*pair).difference
    assert difference is not None
    assert (difference.iteration, difference.stage) == (1, stage)
    told = "digest" if stage in ("update", "publish") else "checksum"
    assert any(told in text for text in difference.outputs)
    assert all(text.endswith(": equal") for text in difference.inputs)
    assert difference.inputs
    assert [cause.kind for cause in difference.causes] == ["none"]


def test_a_plan_with_another_thread_is_named_beside_what_follows(pair: tuple[Path, Path]) -> None:
    edit(pair[1], "select", two_threads)
    alone = found(*pair)
    assert alone.plan is not None
    assert (alone.plan.iteration, alone.plan.changes) == (1, ["update threads: 1 → 2"])
    assert alone.difference is None

    edit(
        pair[1],
        "update",
        lambda sealed: {
            "outputs": {
                **other_digest(sealed)["outputs"],
                "deployment": {**sealed.outputs["deployment"], "threads": 2},
            }
        },
    )
    difference = found(*pair).difference
    assert difference is not None
    assert [(each.kind, each.text) for each in difference.causes] == [
        ("layout", "update threads: 1 → 2")
    ]


def test_rows_and_columns_are_named(pair: tuple[Path, Path]) -> None:
    def other_token(values: list[list[int]]) -> None:
        values[2][-1] += 1

    def other_reward(values: list[float]) -> None:
        values[3] = 9.0

    rewrite(pair[1], "tokens", other_token)
    edit(pair[1], "rollout", other_checksum)
    difference = found(*pair).difference
    assert difference is not None
    rows = difference.rows
    assert rows is not None
    assert (difference.source, rows.compared, rows.columns) == ("kept episodes", 16, {"tokens": 1})
    (row,) = rows.rows
    table = pq.read_table(pair[0] / "iterations" / "000001" / "episodes.parquet")
    assert row.ids["sample_id"] == table["sample_id"][2].as_py()
    tokens = table["tokens"][2].as_py()
    (cell,) = row.cells
    assert (cell.column, cell.place) == ("tokens", len(tokens) - 1)
    assert (cell.one, cell.other) == (str(tokens[-1]), str(tokens[-1] + 1))

    edit(pair[1], "rollout", lambda sealed: {"shards": read_shards(pair[0], "rollout")})
    rewrite(pair[1], "tokens", lambda values: values[2].__setitem__(-1, tokens[-1]))
    rewrite(pair[1], "reward", other_reward)
    edit(pair[1], "reward", other_checksum)
    difference = found(*pair).difference
    assert difference is not None
    assert difference.rows is not None
    assert (difference.stage, difference.rows.columns) == ("reward", {"reward": 1})


def read_shards(run: Path, stage: str) -> tuple[Any, ...]:
    return read_manifest(sealed_path(run, 1, stage)).shards


def test_another_seed_is_found_in_the_first_rollout(undisturbed: Undisturbed) -> None:
    runs = undisturbed()
    result = found(runs.run(), runs.run("other"))
    difference = result.difference
    assert difference is not None
    assert (difference.iteration, difference.stage) == (0, "rollout")
    assert difference.inputs == ["initial: equal"]
    texts = {cause.kind: cause.text for cause in difference.causes}
    # The opponent draws by the seed, too.
    assert texts.keys() == {"setting", "draws", "environment"}
    assert texts["setting"] == "setting seed: 0 → 1, on which rollout depends"
    assert result.damage == []


@pytest.mark.parametrize("kind", ["policy", "adapter"])
def test_a_changed_tensor_is_named(pair: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    one = shutil.copytree(pair[0], tmp_path / "one")
    edit(pair[1], "update", other_digest)
    folders = [run / "checkpoints" / "000001" / kind for run in (one, pair[1])]
    if kind == "adapter":
        # Which files there are is what tells an adapter's checkpoint from a model's.
        for folder in folders:
            os.rename(folder.with_name("policy"), folder)
            os.rename(folder / "config.json", folder / "adapter_config.json")
            os.rename(folder / "model.safetensors", folder / "adapter_model.safetensors")
    (path,) = folders[1].glob("*.safetensors")
    flip(path, path.stat().st_size - 1)
    result = found(one, pair[1])
    assert result.difference is not None
    weights = result.difference.weights
    assert weights is not None
    assert len(weights.differing) == 1
    assert weights.most is not None
    assert weights.most > 0


def test_the_sign_of_a_zero_is_found_where_it_is(tmp_path: Path) -> None:
    values = np.zeros(8, np.float32)
    for name, number in (("one", 0.0), ("other", -0.0)):
        values[5] = number
        (tmp_path / name).mkdir()
        save_file({"w": values}, tmp_path / name / "model.safetensors")
    apart = compare_tensors(tmp_path / "one", tmp_path / "other")
    assert (apart.differing, apart.first, apart.most) == (["w"], 5, 0.0)


def test_flipped_bits_of_files_are_named(pair: tuple[Path, Path]) -> None:
    """Of kept episodes, of a checkpoint, of a seal: what nothing was computed with is no
    difference of the runs."""
    folder = pair[1] / "iterations" / "000001"
    flip(folder / "episodes.parquet", 2000)
    flip(pair[1] / "checkpoints" / "000001" / "optimizer.safetensors", 5000)
    flip(folder / "advantage.json", 400)
    result = found(*pair)
    assert result.difference is None
    assert len(result.damage) == 3
    for name in ("episodes.parquet", "checkpoints/000001", "advantage.json"):
        (text,) = [text for text in result.damage if name in text]
        assert "damaged" in text


def test_episodes_that_were_changed_after_the_seal_are_named(pair: tuple[Path, Path]) -> None:
    rewrite(pair[1], "rollout_logprobs", lambda values: values[0].__setitem__(-1, -9.0))
    result = found(*pair)
    assert result.difference is None
    (text,) = result.damage
    assert "iteration 1, rollout" in text
    assert "column rollout_logprobs of sample" in text


def test_versions_and_attempts_are_causes(pair: tuple[Path, Path]) -> None:
    edit(pair[1], "update", other_digest)
    ledger = pair[1] / "ledger.jsonl"
    lines = read_lines(ledger)
    (begun,) = [line for line in lines if SOFTWARE in line]
    assert begun[SOFTWARE].keys() >= {"torch", "Python", "EARL's code", "processor", "cores"}
    begun[SOFTWARE] |= {"torch": "1.0", "cores": "64"}
    place = [line["stage"] for line in lines if line["iteration"] == 1].index("update")
    first = lines.index([line for line in lines if line["iteration"] == 1][place])
    again = [{**begun, "attempt": 2}, {**lines[first], "attempt": 2}]
    again += [{**line, "attempt": 2} for line in lines[first + 1 :]]
    ledger.unlink()
    Journal(ledger).append_all([*lines[: first + 1], *again])
    difference = found(*pair).difference
    assert difference is not None
    causes = {cause.kind: cause.text for cause in difference.causes}
    assert causes.keys() == {"software", "machine", "attempt"}
    assert causes["software"].endswith("→ 1.0")
    assert causes["machine"].endswith("→ 64")
    assert "again has begun it 2 times" in causes["attempt"]


def test_a_run_that_goes_on_and_a_fork_are_compared_as_far_as_they_are(
    pair: tuple[Path, Path],
) -> None:
    for stage in ("update", "publish"):
        sealed_path(pair[1], 1, stage).unlink()
    going = found(*pair)
    assert (going.difference, going.until) == (None, (1, "advantage"))
    shutil.rmtree(pair[1] / "iterations" / "000000")
    forked = found(*pair)
    assert (forked.difference, forked.compared) == (None, 5)
    edit(pair[1], "rollout", other_checksum)
    difference = found(*pair).difference
    assert difference is not None
    assert difference.inputs == ["publish of iteration 0: not told: its seal is gone"]


@pytest.mark.parametrize("first", ["reward", "reference"])
def test_a_stage_that_another_one_runs_beside_may_still_come(
    pair: tuple[Path, Path], first: str
) -> None:
    for stage in {"reward", "reference", "advantage", "update", "publish"} - {first}:
        sealed_path(pair[1], 1, stage).unlink()
    assert found(*pair).difference is None
    sealed_path(pair[1], 1, "rollout").unlink()
    assert found(*pair).difference is not None


@pytest.mark.slow
def test_differences_of_real_runs_are_found(runs: Runs, undisturbed: Undisturbed) -> None:
    """A seed of one stage, a bit of a shard, and settings that one stage depends on."""

    def named(name: str, *overrides: str) -> list[str]:
        return [f"name={name}", *overrides]

    steps = [
        {"overrides": named("seed"), "plant": "seed"},
        {"overrides": named("bit"), "plant": "bit"},
        {"overrides": named("weight", "reward.environment_weight=2", "iterations=1")},
        {"overrides": named("grpo", "algorithm.advantage=grpo", "iterations=1")},
        {"overrides": named("rate", "update.learning_rate=2e-3", "iterations=1")},
        {"overrides": ["update.learning_rate=2e-3"], "fork": ["seed", "0", "forked"]},
    ]
    assert runs.train_here(*steps) == [None] * len(steps)
    base = undisturbed().run()
    expected = {
        # The opponent draws by the episode's seed, too.
        "seed": (1, "rollout", {"draws", "environment"}),
        # The first that reads what is trained.
        "bit": (1, "reference", {"damage"}),
        "weight": (0, "reward", {"setting"}),
        "grpo": (0, "advantage", {"setting"}),
        "rate": (0, "update", {"setting"}),
    }
    for name, where in expected.items():
        result = found(base, runs.run(name))
        difference = result.difference
        assert difference is not None, name
        kinds = {cause.kind for cause in difference.causes}
        assert (difference.iteration, difference.stage, kinds) == where, name
        # Of the bit, which others have read, the kept episodes still tell.
        assert [("column loss_mask" in text) for text in result.damage] == [True] * (name == "bit")
    difference = found(runs.run("seed"), runs.run("forked")).difference
    assert difference is not None
    assert (difference.iteration, difference.stage) == (1, "update")
    assert [cause.text for cause in difference.causes] == [
        "setting update.learning_rate: 0.001 → 0.002, on which update depends"
    ]


@pytest.mark.slow
def test_another_number_of_threads_is_named(runs: Runs) -> None:
    """Real ranks: sums of a wider model are divided among two threads."""
    wide = [
        f"model.path={runs.directory / 'wide'}",
        "model.builder=earl_core.models.tiny:build",
        "model.builder_options={hidden: 256, layers: 2, heads: 4, warm_start_steps: 5}",
        "iterations=1",
        "rollout.prompts_per_iteration=8",
        "algorithm.kl={placement: none, coefficient: 0}",
    ]
    runs.train(*wide, "name=one")
    runs.train(*wide, "name=two", "update.threads=2")
    result = found(runs.run("one"), runs.run("two"))
    assert result.plan is not None
    assert result.plan.changes == ["update threads: 1 → 2"]
    difference = result.difference
    assert difference is not None
    assert (difference.iteration, difference.stage) == (0, "update")
    texts = [cause.text for cause in difference.causes]
    assert "update threads: 1 → 2" in texts
    assert any(text.startswith("setting update.threads: 1 → 2") for text in texts)
    assert difference.weights is not None
    assert difference.weights.most is not None
    assert np.isfinite(difference.weights.most)


def test_places_sort_as_stages_run() -> None:
    names = ["initial", "rollout_wave1", "reward_wave1", "rollout_wave2", "rollout", "reward"]
    places = [Place.of(0, name) for name in names]
    assert sorted(places) == places
