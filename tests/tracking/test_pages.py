"""Pages for Prefect: nothing that a model wrote leaves its block; the curve is a drawing."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tasks import train_pages
from tasks.reports.curve_report import curve_page
from tasks.reports.episode_report import episodes_page, fenced
from tasks.tracking.run_note import mlflow_page

HOSTILE = "```\n# heading\n![x](http://evil.example/a.png)\n<img src=x onerror=alert(1)>\n````\nend"


def episode(reward: float | None, answer: str = "5", outcome: str = "win") -> dict[str, Any]:
    turn = {"observation": "board", "answer": answer, "reward": 0.5, "tokens": 2}
    return {
        "episode_id": 7,
        "prompt_id": 1,
        "environment": "tic_tac_toe",
        "finish_reason": "done",
        "outcome": outcome,
        "reward": reward,
        "turns": [turn],
        "closing": "you won",
    }


def outside(page: str) -> str:
    """What is left of a page without its blocks of code, as CommonMark ends them."""
    left, fence = [], ""
    for line in page.splitlines():
        found = re.match("(`{3,})", line)
        if fence:
            if found and line.strip("`") == "" and len(found[1]) >= len(fence):
                fence = ""
        elif found:
            fence = found[1]
        else:
            left.append(line)
    assert not fence
    return "\n".join(left)


def test_foreign_text_stays_in_its_block() -> None:
    assert outside(fenced(HOSTILE)) == ""
    page = episodes_page(3, [episode(1.0, HOSTILE, outcome="`win`\n\n# no <b>")])
    assert HOSTILE.splitlines()[1] in page
    for sign in ("evil", "onerror", "\n# "):
        assert sign not in outside(page)


def test_the_best_and_the_worst_episode_are_shown() -> None:
    page = episodes_page(3, [episode(0.2, "b"), episode(-1.0, "c"), episode(None), episode(1.0)])
    good, bad = page.split("## A good episode")[1].split("## A bad episode")
    assert "reward `+1`" in good
    assert "reward `none`" in bad
    assert "## A bad" not in episodes_page(3, [episode(1.0), episode(1.0)])


def test_a_long_message_is_wrapped_and_loses_its_middle() -> None:
    text = fenced("x" * 9000)
    assert "5,000 characters" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_curve_is_a_small_drawing() -> None:
    lines = [
        {
            "iteration": number,
            "reward/mean": number / 3000,
            "rollout/outcome/win": 0.5,
            "rollout/outcome/<b>&": 0.5,
            "rollout/stage_seconds": 2.0,
        }
        for number in range(3000)
    ]
    page = curve_page("run", lines, [{"iteration": 0, "return/mean": 0.1}])
    drawings = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert len(drawings) == 2
    for drawing in drawings:
        root = ElementTree.fromstring(base64.b64decode(drawing))
        assert any(part.tag.endswith("polyline") for part in root)
    assert len(page) < 60_000
    assert "| 2999 | +1.000 |" in page
    # However many outcomes there are, the legend stays inside.
    many = {f"rollout/outcome/{number}": 0.1 for number in range(9)}
    page = curve_page("run", [{"iteration": number, **many} for number in range(2)], [])
    for drawing in re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page):
        root = ElementTree.fromstring(base64.b64decode(drawing))
        assert min(float(part.get("x", "0")) for part in root) >= 0
    # Without a number there is nothing to draw, and no error.
    assert "polyline" not in curve_page("run", [{"iteration": 0}], [])


def test_the_run_is_linked_where_mlflow_has_a_server() -> None:
    known = {"run_id": "a1", "experiment_id": "4"}
    served = {"tracking": {**known, "uri": "http://127.0.0.1:5000/"}}
    assert mlflow_page(served) == "http://127.0.0.1:5000/#/experiments/4/runs/a1/model-metrics"
    assert mlflow_page({"tracking": {**known, "uri": "sqlite:///mlflow.db"}}) is None
    assert mlflow_page({}) is None


def test_a_training_links_mlflow_once_and_goes_on_where_pages_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[str, str]] = []
    texts = iter(["one", "two", "three"])

    async def link(where: str, text: str, key: str, description: str) -> None:
        made.append((key, where))

    async def page(text: str, key: str, description: str) -> UUID:
        if text == "one":
            raise OSError("the server is gone")
        made.append((key, text))
        return UUID(int=1)

    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def update_artifact(self, identity: UUID, changed: Any) -> None:
            made.append((str(identity.int), changed.data))

    record = {"tracking": {"run_id": "a1", "experiment_id": "4", "uri": "http://127.0.0.1:5000"}}
    run = SimpleNamespace(record=record, plan=lambda _: None, metrics=lambda: [])
    controller: Any = SimpleNamespace(
        run=run, config=SimpleNamespace(name="x"), next_iteration=lambda: 1
    )
    monkeypatch.setattr(train_pages, "acreate_link_artifact", link)
    monkeypatch.setattr(train_pages, "acreate_markdown_artifact", page)
    monkeypatch.setattr(train_pages, "get_client", Client)
    monkeypatch.setattr(train_pages, "run_pages", lambda *_: {"curve": (next(texts), "c")})

    async def training() -> None:
        pages = train_pages.TrainPages(controller)
        for _ in range(3):
            pages.changed()
        await pages.settle()

    with caplog.at_level(logging.WARNING):
        asyncio.run(training())
    assert "the run goes on, with old pages in Prefect: the server is gone" in caplog.text
    curves = "http://127.0.0.1:5000/#/experiments/4/runs/a1/model-metrics"
    assert made == [("x-curve", "two"), ("x-mlflow", curves), ("1", "three")]
