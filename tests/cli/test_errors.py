"""Errors as text."""

from __future__ import annotations

import errno

import pytest
import typer

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed, WorkerLost
from earl_core.config import ConfigError
from earl_core.dispatch import ManifestError, PoolFull
from earl_core.rollout.errors import RolloutFailed
from flows.cli.errors import describe, exit_code, reported

WHERE = Where("rollout", 0, "rollout", "rollout", 3, "/logs/rollout-0.log", "line\nTraceback: x")


def test_wrong_input_is_told_from_failure() -> None:
    assert exit_code(ConfigError("x")) == 2
    assert exit_code(ManifestError("x")) == exit_code(ValueError("x")) == 1


def test_an_error_in_a_worker_counts_like_one_here() -> None:
    error = WorkerCallFailed(WHERE, Raised.of(ConfigError("correct the path")))
    assert describe(error) == "error: correct the path"
    assert exit_code(error) == 2


def test_a_remedy_follows_its_problem_here_and_from_a_worker() -> None:
    error = ConfigError("model.path is wrong", remedy="correct it")
    told = "error: model.path is wrong: correct it"
    assert describe(error) == describe(WorkerCallFailed(WHERE, Raised.of(error))) == told
    assert (error.problem, error.remedy) == ("model.path is wrong", "correct it")


def test_an_unexpected_error_in_a_worker_names_place_and_log_without_traceback() -> None:
    error = WorkerCallFailed(WHERE, Raised("ValueError", "builtins", "bad shape", "Traceback ..."))
    text = describe(error)
    assert text.splitlines()[0] == "error: ValueError: bad shape"
    assert "worker group 'rollout', rank 0" in text
    assert "iteration 3" in text
    assert "/logs/rollout-0.log" in text
    assert "Traceback" not in text


def test_a_lost_worker_shows_the_end_of_its_log() -> None:
    text = describe(WorkerLost(WHERE, "its process was killed by signal 9 (SIGKILL)", ended=-9))
    assert text.startswith("error: Worker group 'rollout'")
    assert "  | line" in text


def test_a_full_store_is_a_sentence() -> None:
    text = describe(PoolFull(errno.ENOSPC, "10 bytes do not fit: enlarge the shared memory"))
    assert text == "error: 10 bytes do not fit: enlarge the shared memory"


def test_notes_follow() -> None:
    error = RuntimeError("broken")
    error.add_note("All logs of the run are in runs/x/logs.")
    assert describe(error).splitlines() == [
        "error: RuntimeError: broken",
        "Run the command again with --debug for the traceback.",
        "All logs of the run are in runs/x/logs.",
    ]


def test_tracebacks_inside_a_message_are_cut_out() -> None:
    message = (
        "16 of 16 episodes failed. The first:\n"
        'exception.\nTraceback (most recent call last):\n  File "moody.py", line 9, in step\n'
        '    raise RuntimeError("not today")\nRuntimeError: not today\nRepair it.'
    )
    error = WorkerCallFailed(WHERE, Raised.of(RolloutFailed(message)))
    assert describe(error).splitlines() == [
        "error: 16 of 16 episodes failed. The first:",
        "exception.",
        "RuntimeError: not today",
        "Repair it.",
        "Run the command again with --debug for the traceback.",
    ]


def test_a_missing_file_is_named() -> None:
    assert "No such file or directory: /gone" in describe(
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone")
    )


def test_exits_pass_through_and_ctrl_c_is_130() -> None:
    with pytest.raises(typer.Exit) as first, reported(debug=False):
        raise typer.Exit(7)
    assert first.value.exit_code == 7
    with pytest.raises(typer.Exit) as second, reported(debug=False):
        raise KeyboardInterrupt
    assert second.value.exit_code == 130
