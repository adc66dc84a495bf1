"""The harness that all benchmarks share, and what they compute without running anything."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rollout import Recording
from earl_core.run.record import Journal, read_lines
from earl_core.system.processes import inspect
from tools.harness import Report, parser, publish
from tools.iterations import covered, read_iterations
from tools.process_tree import CommandFailed, MeasuredCommand


def report() -> Report:
    made = Report("overhead", "Orchestration share")
    made.rows = [
        {"what": "ours", "seconds": 0.5, "share": 0.0123456},
        {"what": "limit", "seconds": 0.0},
    ]
    made.headline["orchestration_share"] = 0.0123456
    made.notes.append("Measured for the test.")
    return made


def options(tmp_path: Path) -> argparse.Namespace:
    files = ["--json", str(tmp_path / "a/r.json"), "--markdown", str(tmp_path / "a/r.md")]
    return parser("test").parse_args(["--quick", *files])


def test_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(report(), options(tmp_path))
    printed = capsys.readouterr().out
    assert "orchestration_share: 0.0123" in printed
    written = json.loads((tmp_path / "a/r.json").read_text())
    assert written["headline"] == {"orchestration_share": 0.0123456}
    assert written["rows"] == report().rows
    assert written["machine"]["cores"] >= 1
    assert written["command"]
    page = (tmp_path / "a/r.md").read_text()
    assert "| limit | 0 |  |" in page
    assert written["command"] in page


def test_broken_numbers_are_refused(tmp_path: Path) -> None:
    made = report()
    made.headline["orchestration_share"] = float("nan")
    with pytest.raises(ValueError, match="orchestration_share is nan"):
        publish(made, options(tmp_path))


def test_stages_side_by_side_count_once() -> None:
    assert covered([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0)], (0.0, 10.0)) == 4.0
    assert covered([(-5.0, 1.0), (9.0, 20.0)], (0.0, 10.0)) == 2.0
    assert covered([], (0.0, 1.0)) == 0.0


def _run(path: Path, attempts: tuple[int, int, int]) -> None:
    """Three iterations of 10 s: 4 s rollout, beside it 2 s reward, 3 s update; 5 s evaluation
    between the second and the third."""
    ledger: list[dict[str, Any]] = []
    metrics = []
    for number in range(3):
        begin = 100.0 + 10 * number + (5 if number == 2 else 0)
        if number == 2:
            for event, time in (("started", begin - 5), ("sealed", begin)):
                ledger.append(_entry(attempts[number], number, "evaluation", event, time))
        for stage, start in (("rollout", 1.0), ("reward", 2.0), ("update", 6.0)):
            ledger.append(_entry(attempts[number], number, stage, "started", begin + start))
        metrics.append(
            {
                "iteration": number,
                "time": begin + 10,
                "rollout/stage_seconds": 4.0,
                "reward/stage_seconds": 2.0,
                "update/stage_seconds": 3.0,
                "rollout/episodes": 8.0,
                "rollout/context/mean": 100.0,
            }
        )
    path.mkdir()
    for name, lines in (("ledger", ledger), ("metrics", metrics)):
        journal = Journal(path / f"{name}.jsonl")
        for line in lines:
            journal.append(line)
    assert len(read_lines(path / "metrics.jsonl")) == 3


def _entry(attempt: int, iteration: int, stage: str, event: str, time: float) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "iteration": iteration,
        "stage": stage,
        "event": event,
        "time": time,
    }


def test_iteration_times_come_from_the_records(tmp_path: Path) -> None:
    _run(tmp_path / "run", (1, 1, 1))
    second, third = read_iterations(tmp_path / "run")
    assert (second.number, third.number) == (1, 2)
    for item in (second, third):
        assert item.wall == pytest.approx(10.0)
        assert item.inside == pytest.approx(7.0)
        assert item.share == pytest.approx(0.3)
        assert item.tokens == 800.0


def test_resumed_iterations_are_left_out(tmp_path: Path) -> None:
    _run(tmp_path / "run", (1, 1, 2))
    assert [item.number for item in read_iterations(tmp_path / "run")] == [1]


def test_context_tokens_count_every_token_once() -> None:
    extending = [([1, 2, 3], 1), ([1, 2, 3, 9, 4, 5], 2)]
    rewriting = [([1, 2, 3], 1), ([7, 8], 1)]
    recording = Recording([extending, rewriting])
    assert recording.context_tokens == 8 + 4 + 3
    assert (recording.requests, recording.generated_tokens) == (4, 5)
    assert Recording.from_json(json.loads(json.dumps(recording.as_json()))) == recording


def test_measured_command_sees_children_and_reports_failures(tmp_path: Path) -> None:
    child = "x = bytearray(80 << 20); import time; time.sleep(2)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with MeasuredCommand([sys.executable, "-c", code], tmp_path / "log") as command:
        command.wait(60)
    assert command.peak_bytes > 80 << 20
    failing = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"]
    with (
        MeasuredCommand(failing, tmp_path / "log2") as command,
        pytest.raises(CommandFailed, match=r"exit code 3(.|\n)*what went wrong"),
    ):
        command.wait(60)


def test_cached_and_plain_passes_of_the_peer_agree() -> None:
    """The peer's key-value cache must not change what it samples, or the comparison is void."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.trl_rollout import Forward

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    games = [SimpleNamespace(tokens=[5, 6, 7]), SimpleNamespace(tokens=[8, 9, 10, 11, 12])]
    cached, plain = (Forward(model, use_cache)._passes for use_cache in (True, False))
    with torch.inference_mode():
        torch.testing.assert_close(cached.logits(games), plain.logits(games))
        games[0].tokens += [1, 2, 3, 4]
        games[1].tokens += [13, 14]
        torch.testing.assert_close(cached.logits(games), plain.logits(games))
        games[1].tokens += [15, 16]
        left = games[1:]  # the other game is over
        torch.testing.assert_close(cached.logits(left), plain.logits(left))


_BENCHMARK = """
import os, subprocess, sys, time
from pathlib import Path
from tools.endings import end_with_us
from tools.process_tree import MeasuredCommand
end_with_us()
# What the command leaves is nobody's child, in a session of its own.
leaving = "setsid sleep 600 & echo $! >> pids; exec sleep 600"
plain = subprocess.Popen(["sh", "-c", leaving], start_new_session=True)
with MeasuredCommand(["sh", "-c", leaving], Path("log"), environment={"A": "b"}) as measured:
    Path("own").write_text(f"{plain.pid} {measured.process.pid}")
    time.sleep(600)
"""


def test_what_a_benchmark_starts_ends_with_it(tmp_path: Path) -> None:
    """After SIGTERM, Ctrl-C and SIGKILL; three benchmarks side by side."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("EARL_BENCHMARK", None)
    started: dict[int, subprocess.Popen[bytes]] = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        place = tmp_path / str(int(number))
        place.mkdir()
        (place / "pids").touch()
        command = [sys.executable, "-c", _BENCHMARK]
        started[number] = subprocess.Popen(command, cwd=place, env=environment)
    deadline, pids = time.monotonic() + 90, []
    for number, process in started.items():
        place = tmp_path / str(int(number))
        while not (place / "own").is_file() or len((place / "pids").read_text().split()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids += [int(pid) for name in ("own", "pids") for pid in (place / name).read_text().split()]
        assert all(inspect(pid) for pid in pids[-4:])
        process.send_signal(number)
    for process in started.values():
        process.wait(90)
    while any(inspect(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(pids) == 12
