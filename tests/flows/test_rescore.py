"""New scores for kept episodes: what the functions are given, what is written, how it agrees."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats

from earl_core.config import ConfigError
from earl_core.experience.rescoring import SCHEMA, Agreement, Rescored, run_rescore
from earl_core.run.record import config_of_run
from earl_core.system.errors import EarlError
from flows.cli.rescoring import rescore
from tests.flows.runs import REPOSITORY, Runs

_FUNCTIONS = """
def same(episode):
    assert len(episode["messages"]) == 2 * episode["turns"]
    return episode["reward"]

def picky(episode):
    if episode["outcome"] != "illegal":
        raise ValueError(f"no {episode['outcome']}, please")
    return 1.0

def rude(episode):
    raise ValueError("no score\\n\\x1b[2Jfor you")
"""


@pytest.fixture(scope="module")
def trained(module_runs: Runs) -> Runs:
    assert module_runs.train_here({"overrides": ["iterations=1"]}) == [None]
    (module_runs.directory / "new_scores.py").write_text(_FUNCTIONS)
    return module_runs


def rescored(runs: Runs, function: str) -> Rescored:
    config = config_of_run(
        runs.run(), [f"reward.functions=[{{function: {function}}}]", "reward.retries=0"]
    )
    return run_rescore(runs.run(), config)


def contents(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file()
    }


def test_kept_episodes_get_scores_beside_them_and_the_run_stays_as_it_is(
    trained: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(trained.directory)
    before = contents(trained.run())
    same, picky = (rescored(trained, f"new_scores:{name}") for name in ("same", "picky"))
    after = contents(trained.run())
    assert after.keys() - before.keys() == {"rescored/same.parquet", "rescored/picky.parquet"}
    assert {name: after[name] for name in before} == before

    rows = pq.read_table(same.path).to_pylist()
    assert len(rows) == 16
    assert [row["score"] for row in rows] == [row["reward"] for row in rows]
    assert same.agreement()[:2] == (16, pytest.approx(1.0))
    assert same.agreement().agreeing == 1.0

    # An episode that the function fails on is named, and the others go on.
    kept = pq.read_table(trained.run() / "iterations/000000/episodes.parquet").to_pylist()
    outcomes = {row["episode_id"]: row["outcome"] for row in kept}
    for row in picky.table.to_pylist():
        outcome = outcomes[row["episode_id"]]
        assert (row["score"] is None) == (outcome != "illegal")
        why = row["failure"].strip()
        assert why == "" if outcome == "illegal" else why.endswith(f"no {outcome}, please")


def test_a_failure_is_said_in_a_line_and_steers_no_terminal(
    trained: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(trained.directory)
    with pytest.raises(EarlError, match=r"^rude gave none of 16 episodes a score: .*rude\.parquet"):
        rescore((str(trained.run()), ""), ["new_scores:rude"], ["reward.retries=0"], False)
    shown = capsys.readouterr().out
    said = "ValueError: no score \N{REPLACEMENT CHARACTER}[2Jfor you"
    (line,) = [line for line in shown.splitlines() if said in line]
    assert line.startswith("rude: ")
    assert line.count("rude") == 1
    assert "\x1b" not in shown


def test_a_function_without_any_score_is_an_error_and_the_others_are_written(
    trained: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(trained.directory)
    run, once = (str(trained.run()), ""), ["reward.retries=0"]
    rescore(run, ["new_scores:picky"], once, True)
    both = ["new_scores:rude", "new_scores:same"]
    with pytest.raises(EarlError, match=r"^rude gave none .*\nthe other functions' scores are"):
        rescore(run, both, once, True)
    copied = tmp_path / "run"
    shutil.copytree(trained.run(), copied, ignore=shutil.ignore_patterns("rescored"))
    for kept in copied.glob("iterations/*/episodes.parquet"):
        kept.write_bytes(b"nothing")
    with pytest.raises(EarlError, match=r"no kept episodes of .* can be read"):
        rescore((str(copied), ""), ["new_scores:same"], once, True)
    assert not (copied / "rescored/same.parquet").exists()


def test_the_queries_of_the_page_answer_of_a_run(
    trained: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(trained.directory)
    same = rescored(trained, "new_scores:same").path
    page = (REPOSITORY / "docs/how-to/query.md").read_text()
    blocks = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 7
    monkeypatch.chdir(trained.directory)
    database = duckdb.connect()
    answers = []
    # Other tests have scored by other functions.
    asked = ";".join(blocks).replace("runs/mine/rescored/*.parquet", str(same))
    for statement in asked.replace("runs/mine", "runs/run").split(";"):
        if statement.strip():
            answers.append(database.execute(statement).fetchall())
    episodes, alike, tokens, versions, scores, anew = (each for each in answers if each)
    assert episodes[0][:2] == (0, 16)
    assert 0 <= alike[0][1] <= 1
    assert all(times >= 8 and logprob < 0 for _, times, logprob in tokens)
    assert versions == [(0, 0.0, 0)]
    assert scores == [(0, None)], "the run has no function of that name"
    assert anew[0][:2] == (0, 16)


def test_what_cannot_be_scored_is_one_sentence(
    trained: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(trained.directory)
    with pytest.raises(ConfigError, match="cannot be imported"):
        rescored(trained, "new_scores:missing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        # The functions of the run's own are in nobody's way.
        rescore((str(trained.run()), ""), ["new_scores:gone"], ["reward.functions=[]"], True)
    config = config_of_run(trained.run(), ["reward.functions=[{function: a.b:c}]"])
    with pytest.raises(ConfigError, match="has kept no episodes"):
        run_rescore(tmp_path, config)
    assert not (tmp_path / "rescored").exists()


def test_the_agreement_is_spearmans_and_that_of_pairs_within_groups() -> None:
    generator = np.random.default_rng(0)
    rewards = generator.integers(0, 4, 60).astype(float)
    scores: list[float | None] = list(generator.integers(0, 4, 60) + 0.5 * rewards)
    scores[7] = None
    groups = np.repeat(np.arange(10), 6)
    rows: list[dict[str, Any]] = [
        {"iteration": 0, "group_id": group, "reward": reward, "score": score}
        for group, reward, score in zip(groups.tolist(), rewards, scores, strict=True)
    ]
    found = Agreement.of(pa.Table.from_pylist(rows, SCHEMA))
    both = [(r, s, g) for r, s, g in zip(rewards, scores, groups, strict=True) if s is not None]
    expected = scipy.stats.spearmanr([r for r, _, _ in both], [s for _, s, _ in both]).statistic
    assert found.episodes == 59
    assert found.rank_correlation == pytest.approx(expected, abs=1e-12)
    pairs = [(s, t) for r, s, g in both for q, t, h in both if g == h and r > q]
    assert found.pairs == len(pairs)
    assert found.agreeing == pytest.approx(np.mean([(np.sign(s - t) + 1) / 2 for s, t in pairs]))
    constant = Agreement.of(pa.Table.from_pylist([{**row, "score": 1.0} for row in rows], SCHEMA))
    assert np.isnan(constant.rank_correlation)
