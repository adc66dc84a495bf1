"""The displays, fed with the events that a run sends."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from earl_core.config import RunConfig, load_config
from flows.cli import playing
from flows.cli.curve import HEIGHT, WIDTH, Series, draw
from flows.cli.display import LiveDisplay, PlainDisplay, make_display
from flows.cli.errors import next_commands
from flows.cli.playing import find_board
from flows.cli.tables import duration, make_console, rows_table
from tests.cli.conftest import CONFIG, ROOT

Event = tuple[str, int, dict[str, Any]]

METRICS = {
    "rollout/return/mean": -0.25,
    "rollout/outcome/win": 0.25,
    "rollout/outcome/illegal": 0.5,
    "rollout/context/mean": 51.0,
    "rollout/context/max": 76.0,
    "rollout/tokens_per_second": 2047.0,
    "update/tokens_per_second": 9152.0,
    "rollout/stage_seconds": 4.0,
    "update/stage_seconds": 2.5,
}
EVALUATION = {
    "return/mean": 0.1,
    **{
        f"outcome/win/{part}": value
        for part, value in zip(("share", "low", "high"), (0.5, 0.4, 0.6), strict=True)
    },
}
ITERATION: list[Event] = [
    ("select", 0, {"stage_started": True}),
    ("update", 0, {"starting": "update"}),
    ("select", 0, {"metrics": {"stage_seconds": 0.1}}),
    ("rollout", 0, {"stage_started": True}),
    ("rollout", 0, {"starting": "rollout"}),
    (
        "rollout",
        0,
        {"rank": 0, "episodes_done": 12, "episodes": 64, "tokens_per_second": 840.0, "return": 0.3},
    ),
]
FINISHED: Event = ("iteration", 0, {"finished": True, "metrics": METRICS})
EVALUATED: Event = ("evaluation", 1, {"finished": True, "metrics": EVALUATION})


def live(iterations: int, done: list[dict[str, Any]] | None = None) -> LiveDisplay:
    return LiveDisplay(Console(file=io.StringIO()), iterations, done or [])


def rendered(display: LiveDisplay, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(display.screen())
    return console.export_text()


def test_the_live_screen_shows_stage_numbers_and_tables() -> None:
    display = live(iterations=3)
    for event in ITERATION:
        display.listen(*event)
    text = rendered(display)
    assert "0 of 3 iterations" in text
    assert "rollout" in text
    assert "12/64 episodes, 840 tokens/s, return +0.30" in text
    display.listen(*FINISHED)
    display.listen(*EVALUATED)
    text = rendered(display)
    assert "1 of 3 iterations" in text
    for cell in ("-0.25", "25", "50", "51", "76", "2,047", "9,152", "6.5", "50 (40-60)"):
        assert cell in text


def test_a_started_worker_is_shown_until_the_stage_reports() -> None:
    display = live(iterations=1)
    for event in ITERATION[:5]:
        display.listen(*event)
    assert "rollout: starting the rollout worker" in rendered(display)
    display.listen(*ITERATION[5])
    assert "starting" not in rendered(display)


def test_stages_of_overlapping_iterations_have_a_line_each() -> None:
    display = live(iterations=20)
    display.listen("update", 12, {"stage_started": True})
    display.listen("rollout", 13, {"stage_started": True})
    display.listen("rollout", 13, {"episodes_done": 39, "episodes": 64})
    assert "12: update" in rendered(display)
    assert "13: rollout" in rendered(display)
    assert "39/64 episodes" in rendered(display)
    display.listen("update", 12, {"metrics": {}})
    assert "update" not in rendered(display)
    display.listen("rollout", 13, {"metrics": {}})
    assert "rollout" in rendered(display), "the last one stays until another begins"


def test_workers_that_take_another_layout_are_shown() -> None:
    display = live(iterations=1)
    display.listen("update", 4, {"stage_started": True})
    display.listen("update", 4, {"resharding": "update"})
    assert "update: resharding the update" in rendered(display)
    display.listen("update", 4, {"samples_done": 1, "samples": 8})
    assert "resharding" not in rendered(display)


NEWS: list[tuple[Event, str]] = [
    (
        ("update", 3, {"switched": "update: TP 1, microbatch 8192 -> 4096: it is faster"}),
        "iteration 3: update: TP 1, microbatch 8192 -> 4096: it is faster",
    ),
    (
        ("update", 3, {"repeated": "update: ran out of memory; the stage is repeated"}),
        "iteration 3: update: ran out of memory; the stage is repeated",
    ),
    (
        ("rollout", 3, {"switched": "rollout: TP 1, context 4096 -> 8192"}),
        "iteration 3: rollout: TP 1, context 4096 -> 8192",
    ),
]


def test_layouts_that_switch_and_stages_that_are_repeated_are_lines_that_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with PlainDisplay() as plain:
        for event, _ in NEWS:
            plain.listen(*event)
    assert capsys.readouterr().out.splitlines() == [line for _, line in NEWS]

    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with LiveDisplay(console, 5) as display:
        display.listen("update", 3, {"stage_started": True})
        for event, _ in NEWS:
            display.listen(*event)
        # The stage goes on being shown.
        assert "update" in rendered(display).splitlines()[1]
    for _, line in NEWS:
        assert line in output.getvalue()


CUT = {**METRICS, "rollout/outcome/draw": 0.125, "rollout/finish/max_turns": 0.375}


@pytest.mark.parametrize("width", range(40, 201, 8))
def test_the_screen_fits_every_width_and_drops_columns_from_the_right(width: int) -> None:
    display = live(50, [{"iteration": k, **CUT} for k in range(3)])
    display.listen(*EVALUATED)
    display.listen(*ITERATION[-1])
    lines = rendered(display, width).splitlines()
    assert max(map(len, lines)) <= width
    whole = ["iteration", "return", "win %", "draw %", "illegal %", "turn limit %"]
    whole += ["context", "max", "rollout tok/s", "update tok/s", "seconds"]
    shown = re.split("  +", next(line for line in lines if "iteration  return" in line).strip())
    assert shown == whole[: len(shown)]
    assert len(shown) >= 3
    assert len(shown) == len(whole) or width < 120
    assert sum(bool(re.match(r" *\d +-0.25 +25", line)) for line in lines) == 3


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_nothing_of_other_tables_is_lost_in_a_narrow_terminal(width: int) -> None:
    rows = [{"stage": "update", "label": "a b c", "seconds": "12.5", "why": "word " * 9 + "end"}]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(rows_table(rows))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("word") == 9
    assert all(part in text for part in ("update", "12.5", "end"))


RESIZED = """
import sys
from rich.console import Console
from flows.cli.display import LiveDisplay
from tests.cli.test_display import CUT, ITERATION
with LiveDisplay(Console(), 50, [{"iteration": k, **CUT} for k in range(3)]) as display:
    display.listen(*ITERATION[-1])
    sys.stdin.readline()
"""


def test_the_screen_survives_a_window_that_becomes_narrower() -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    child = pexpect.spawn(
        sys.executable,
        ["-c", RESIZED],
        env={**kept, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        dimensions=(30, 130),
        encoding="utf-8",
        timeout=60,
    )
    try:
        child.expect("update tok/s")
        child.setwinsize(30, 60)
        child.expect(re.escape("\x1b[2J"))
        child.sendline("")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    after = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", child.before)
    assert "iteration  return  win %" in after
    assert "update tok/s" not in after
    assert max(len(line) for line in re.split(r"[\r\n]+", after)) <= 60


def test_json_lines_and_silence(capsys: pytest.CaptureFixture[str]) -> None:
    for show in ("json", "quiet"):
        with make_display(Console(file=io.StringIO()), show) as display:
            for event in [*ITERATION, FINISHED, EVALUATED]:
                display.listen(*event)
            display.say("starting Prefect")
            logging.getLogger("earl_core.anything").warning("the tracker is away")
        told = capsys.readouterr()
        assert told.err == "warning: the tracker is away\n"
        if show == "quiet":
            assert told.out == ""
            continue
        first, second = map(json.loads, told.out.splitlines())
        assert (first["kind"], first["iteration"], first["return"]) == ("iteration", 0, -0.25)
        assert first["outcomes"] == {"win": 0.25, "illegal": 0.5}
        assert first["metrics"]["rollout/context/max"] == 76.0
        assert (second["kind"], second["iteration"], second["return"]) == ("evaluation", 1, 0.1)


def test_outcomes_are_the_environments_own_and_limits_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"rollout/outcome/correct": 0.5, "rollout/finish/max_turns": 0.25}
    with PlainDisplay() as plain:
        plain.listen("iteration", 0, {"finished": True, "metrics": metrics})
    out = capsys.readouterr().out
    assert "correct 50 %, 25 % ended by the turn limit" in out
    assert "illegal" not in out


def test_only_the_last_iterations_are_shown_and_a_repeated_one_once() -> None:
    display = live(50, [{"iteration": k, **METRICS} for k in range(20)])
    display.listen("iteration", 19, {"finished": True, "metrics": METRICS})
    text = rendered(display)
    shown = [int(line.split()[0]) for line in text.splitlines() if re.match(r" *\d+ +-0.25", line)]
    assert shown == list(range(12, 20))
    assert "20 of 50 iterations" in text


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay() as display:
        for event in [*ITERATION, FINISHED, EVALUATED]:
            display.listen(*event)
        # Half of the way is told, once.
        for done in (40, 50, 64):
            display.listen("rollout", 1, {"episodes_done": done, "episodes": 64})
        logging.getLogger("earl_core.anything").warning("the tracker is away")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "iteration 0: select started",
        "starting the update worker",
        "iteration 0: rollout started",
        "starting the rollout worker",
        "iteration 0: return -0.250, win 25 %, illegal 50 %, context 51, max 76, rollout 2,047 "
        "tokens/s, update 9,152 tokens/s, 6.5 s",
        "evaluation after 1 iteration: return +0.100, win 50 (40-60) %",
        "iteration 1: rollout 40/64 episodes",
        "warning: the tracker is away",
    ]


def test_huge_returns_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {**METRICS, "rollout/return/mean": -1.23456e300}
    display = live(iterations=1)
    display.listen("rollout", 0, {"episodes_done": 1, "episodes": 2, "return": 2e6})
    assert "return +2e+06" in rendered(display)
    display.listen("iteration", 0, {"finished": True, "metrics": metrics})
    display.listen("evaluation", 1, {"finished": True, "metrics": {"return/mean": 123456.0}})
    assert "-1.235e+300" in rendered(display)
    assert "+123456.00" in rendered(display)
    with PlainDisplay() as plain:
        plain.listen("iteration", 0, {"finished": True, "metrics": metrics})
    assert "return -1.235e+300," in capsys.readouterr().out


def test_what_to_try_next_looks_where_the_shards_are() -> None:
    assert "earl shards list" in commands(load_config(CONFIG))
    elsewhere = load_config(CONFIG, ["dispatch.directory=/dev/shm/my shards"])
    assert "earl shards list --directory '/dev/shm/my shards'" in commands(elsewhere)


def commands(config: RunConfig) -> list[str]:
    return [command for _, command in next_commands(Path("runs/demo"), config)]


def test_brackets_and_colons_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "runs [bold]/[/old] :key:"
    make_console().print(text)
    make_console().print(rows_table([{"run": text}]))
    assert capsys.readouterr().out.count(text) == 2


def test_a_pipe_gets_plain_lines() -> None:
    assert isinstance(make_display(Console(file=io.StringIO()), "live"), PlainDisplay)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_display(terminal, "plain"), PlainDisplay)
    assert isinstance(make_display(terminal, "live"), LiveDisplay)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e6, 1e6)), min_size=1, max_size=80))
def test_a_curve_has_its_size_and_every_extreme(points: list[tuple[float, float]]) -> None:
    chart = draw([Series("return", "o", tuple(points))])
    lines = chart.splitlines()
    assert len(lines) == HEIGHT + 3
    plot = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[:HEIGHT]]
    assert all(len(row) <= WIDTH for row in plot)
    if max(y for _, y in points) > min(y for _, y in points):
        assert "o" in plot[0]
        assert "o" in plot[-1]


def test_no_points_no_curve() -> None:
    assert draw([Series("return", "o", ())]) == ""


def test_durations() -> None:
    assert [duration(s) for s in (45, 185, 7800)] == ["45 s", "3 min 05 s", "2 h 10 min"]


@pytest.mark.parametrize(
    ("text", "first_row"),
    [
        ("X2O|4X6|789", ["X", "2", "O"]),
        ("!X2O|4X6|789", ["X", "2", "O"]),
        ("X plays 5.\n1 2 3\n4 X 6\n7 8 9\nYou are O. Your move?", ["1", "2", "3"]),
        ("1234567|..X....|.OX....", list("1234567")),
        ("How many apples are there?", None),
        ("a | b", None),
    ],
)
def test_boards_are_found_in_what_the_model_sees(text: str, first_row: list[str] | None) -> None:
    rows = find_board(text)
    assert (rows[0] if rows else None) == first_row


def test_what_is_played_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Player:
        def play_one(self, *_: object) -> dict[str, object]:
            turn = {"observation": "\x1b]0;title\x07look", "answer": "\x1b[2Jgone", "reward": 1.0}
            return {"turns": [turn], "closing": "\x9b1mbye", "outcome": "w\x1bn", "return": 1.0}

    assert playing._watch(Player(), make_console(), (0, 0), None, "") == "w\x1bn"
    printed = capsys.readouterr().out
    assert "look" in printed
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
