"""Real runs of the command line: train, evaluate, play, resume, Ctrl-C, SIGKILL."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AuthenticationError, OpenAI

from earl_core.run.record import read_lines
from earl_core.run.run_stores import list_stores
from earl_core.system.files import FileLock
from tests.cli.conftest import CONFIG, Earl
from tests.listeners import Listener, check

Done = subprocess.CompletedProcess[str]


def test_train_shows_plan_progress_curve_and_what_next(earl: Earl, finished_run: Done) -> None:
    shown = finished_run.stdout
    assert re.search(r"episodes per iteration +16 +4 prompts x group of 4", shown)
    for line in (
        "starting the rollout worker",
        "iteration 0: update started",
        "iteration 1: return ",
        "evaluation after 2 iterations: return ",
        "Learning curve of done",
        "metrics, plans, episodes in MLflow   earl up",
        "earl play done",
        "earl resume done --set iterations=4",
    ):
        assert line in shown
    assert finished_run.stderr == ""
    metrics = (earl.directory / "runs" / "done" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in metrics] == [0, 1]


def test_nothing_stays_in_shared_memory(earl: Earl, finished_run: Done) -> None:
    done = earl.directory / "runs" / "done"
    assert [s for s in list_stores(earl.shared_memory) if s.run_directory == done] == []
    assert list((done / "prefect_results").glob("*")) == [], "a checkpoint covers all stages"


def test_a_run_with_two_ranks_listens_where_only_it_may_connect(
    finished_run: Done, heard: dict[Listener, str]
) -> None:
    check(heard, "torch", "other")


def test_evaluate_repeats_the_evaluation_of_the_run(earl: Earl, finished_run: Done) -> None:
    shown = earl.run("evaluate", "done")
    assert shown.returncode == 0, shown.stderr
    assert "the checkpoint of iteration 1 (policy version 2): 8 held-out games" in shown.stdout
    sealed = earl.directory / "runs" / "done" / "iterations" / "000002" / "evaluation.json"
    outcomes = json.loads(sealed.read_text())["outputs"]["outcomes"]
    for name, parts in outcomes.items():
        low, high = (f"{parts[part]:.1%}" for part in ("low", "high"))
        row = rf"{name} +{parts['count']} +{parts['share']:.1%} +{low} - {high}"
        assert re.search(row, shown.stdout), shown.stdout


def test_evaluate_the_initial_model_with_other_settings(earl: Earl, finished_run: Done) -> None:
    shown = earl.run(
        "evaluate", "runs/done", "--checkpoint", "initial", "--episodes", "4",
        "--temperature", "0", "--set", "environment.options.opponent=perfect",
        "--set", "evaluation.suites=[{label: easy, name: tic_tac_toe, options: {style: compact}, "
        "prompts: 2, attempts: 2, passing_return: -2}]",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "the initial model (policy version 0): 4 held-out games" in shown.stdout
    # A share of all, of two prompts: the interval says how little that is.
    assert re.search(r"easy +4 +0 +[-+.\d]+ ± [.\d]+ +100\.0% \(34\.2% - 100\.0%\)", shown.stdout)


def test_watch_games_without_a_terminal(earl: Earl, finished_run: Done) -> None:
    shown = earl.run("play", "done", "--games", "2", "--seed", "5")
    assert shown.returncode == 0, shown.stderr
    assert "agent: " in shown.stdout
    assert "2 games played: " in shown.stdout


def test_a_person_plays_against_it(earl: Earl, finished_run: Done) -> None:
    shown = earl.run("play", "done", "--me", "--games", "1", "--seed", "5", text="a[/x]b\n")
    assert shown.returncode == 0, shown.stderr
    assert "You are O and move second." in shown.stdout
    # Either the agent lost by an illegal first move, or the person's turn came; this is no move.
    assert "1 game played" in shown.stdout or "'a[/x]b' is not one of" in shown.stdout


def test_a_served_run_answers_openais_clients_that_know_the_key(
    earl: Earl, finished_run: Done
) -> None:
    _serves(earl, "done", "done/serve.key")


@pytest.mark.slow
def test_a_served_model_answers_openais_clients_that_know_the_key(
    earl: Earl, tiny_model: Path
) -> None:
    settings = ("--set", "rollout.engine=torch", "--set", "rollout.threads=1")
    _serves(earl, str(tiny_model), f"{tiny_model.name}.key", *settings)


def _serves(earl: Earl, served: str, key_file: str, *settings: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = earl.run("serve", served, "--port", port)
        assert refused.returncode == 2
        assert "choose another with --port" in refused.stderr
    process = earl.start("serve", served, "--port", port, *settings)
    text, children = _read_until(process, "Ctrl-C ends it")
    assert f"base_url: http://127.0.0.1:{port}/v1" in text
    key = earl.directory / "runs" / key_file
    assert key.stat().st_mode & 0o777 == 0o600
    address = {"base_url": f"http://127.0.0.1:{port}/v1", "max_retries": 8}
    with OpenAI(**address, api_key=key.read_text()) as api:  # type: ignore[arg-type]
        said: list[Any] = [{"role": "user", "content": "123|456|789"}]
        for _ in range(3):
            reply = api.chat.completions.create(model="", messages=said, max_tokens=4)
            said += [reply.choices[0].message.model_dump(include={"role", "content"})]
            said += [{"role": "user", "content": "123|456|789"}]
    with (
        OpenAI(**address, api_key="x") as stranger,  # type: ignore[arg-type]
        pytest.raises(AuthenticationError),
    ):
        stranger.models.list()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=180)[0]
    assert "Traceback" not in rest
    assert process.returncode == 0
    _assert_gone(children)


def test_ctrl_c_says_how_to_continue_and_resume_continues(
    earl: Earl, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However late the signal is, the iteration has not ended.
    gate = earl.directory / "gate"
    gate.touch()
    monkeypatch.setitem(earl.environment, "EARL_FAULT", "update.step0@0=wait")
    monkeypatch.setitem(earl.environment, "EARL_FAULT_GATE", str(gate))
    settings = earl.settings(iterations="500", evaluation__every="0")
    process = earl.start("train", str(CONFIG), "--name", "long", *settings)
    text, children = _read_until(process, "iteration 0: advantage started")
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=180)[0]
    gate.unlink()
    assert process.returncode == 130, text + rest
    assert "Stopped. Continue with: earl resume long" in rest
    assert "Traceback" not in rest
    assert "error" not in rest
    _assert_gone(children)
    long = (earl.directory / "runs" / "long").resolve()
    kept = [s for s in list_stores(earl.shared_memory) if s.run_directory == long]
    assert len(kept) == 1, "what was computed waits for the resume"

    again = earl.run("resume", "long", "--set", "iterations=1", "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    (line,) = map(json.loads, again.stdout.splitlines())
    assert (line["kind"], line["iteration"]) == ("iteration", 0)
    assert line["return"] == line["metrics"]["rollout/return/mean"]
    played = [
        each["event"] for each in read_lines(long / "ledger.jsonl") if each["stage"] == "rollout"
    ]
    assert played.count("started") == 1, "what was finished is not repeated"


@pytest.fixture
def model(tiny_model: Path) -> dict[str, str]:
    """Settings of a model that is there, for runs in a directory of their own."""
    return {"model__path": str(tiny_model), "model__builder": "null"}


@pytest.mark.slow
def test_nothing_survives_sigkill(fresh_earl: Earl, model: dict[str, str]) -> None:
    settings = fresh_earl.settings(iterations="500", evaluation__every="0", **model)
    process = fresh_earl.start("train", str(CONFIG), "--name", "killed", *settings)
    _, children = _read_until(process, "iteration 0: rollout started")
    assert any(map(_is_prefect, children)), children
    process.kill()
    process.communicate(timeout=180)
    _assert_gone(children)


@pytest.mark.slow
def test_a_lost_prefect_server_ends_the_run_with_one_sentence(
    fresh_earl: Earl, model: dict[str, str]
) -> None:
    settings = fresh_earl.settings(iterations="500", evaluation__every="0", **model)
    process = fresh_earl.start("train", str(CONFIG), "--name", "alone", *settings)
    _, children = _read_until(process, "iteration 0: rollout started")
    for child in filter(_is_prefect, children):
        child.kill()
    rest = process.communicate(timeout=180)[0]
    assert process.returncode == 1, rest
    assert "error: the Prefect server at https://127.0.0.1:" in rest
    assert "Continue with: earl resume runs/alone" in rest or "earl resume alone" in rest
    _assert_gone(children)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_before_the_first_worker(fresh_earl: Earl, number: signal.Signals) -> None:
    home = fresh_earl.directory / "runs" / "prefect"
    home.mkdir(parents=True)
    # However late the signal is, the server has not started: it waits for this.
    with FileLock(home / "starting.lock"):
        process = fresh_earl.start("train", str(CONFIG), *fresh_earl.settings())
        _, children = _read_until(process, "starting Prefect")
        process.send_signal(number)
        rest = process.communicate(timeout=180)[0]
    assert process.returncode == 128 + number
    assert "Stopped before the run began." in rest
    _assert_gone(children)


def test_a_failed_run_is_reported_once_and_can_be_resumed(earl: Earl, finished_run: Done) -> None:
    module = Path(earl.directory) / "moody.py"
    module.write_text(_MOODY)
    settings = earl.settings(
        environment__name="moody:Moody", environment__options="{}", evaluation__every="0"
    )
    failed = earl.run("train", str(CONFIG), "--name", "moody", *settings)
    assert failed.returncode == 1
    assert failed.stderr.count("error: ") == 1, failed.stderr
    assert "Traceback" not in failed.stderr + failed.stdout
    assert "RuntimeError: not today" in failed.stderr
    assert "runs/moody/logs" in failed.stderr
    assert "earl resume moody" in failed.stderr
    listed = json.loads(earl.run("runs", "--json").stdout)
    (moody,) = (run for run in listed if run["name"] == "moody")
    assert (moody["state"], moody["iterations_done"], moody["iterations"]) == ("failed", 0, 2)


_MOODY = """
from earl_core.environments.base import StepResult


class Moody:
    def reset(self, prompt, seed):
        return [{"role": "user", "content": "123|456|789"}]

    def step(self, text):
        raise RuntimeError("not today")

    def close(self):
        pass
"""


def _read_until(process: subprocess.Popen[str], words: str) -> tuple[str, list[psutil.Process]]:
    """What the process printed until then, and its descendants at that moment."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text, psutil.Process(process.pid).children(recursive=True)
    pytest.fail(f"it ended without {words!r}: {text}")


def _is_prefect(process: psutil.Process) -> bool:
    try:
        return "flows.server" in " ".join(process.cmdline())
    except psutil.Error:  # a short-lived one that is gone, or not yet reaped
        return False


def _assert_gone(processes: list[psutil.Process], seconds: float = 180.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert alive == []
