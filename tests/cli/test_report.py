"""`earl report` in a real browser: a real run, hostile episodes, a run without an iteration."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from earl_core.config import parse_config
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.models.tiny import character_tokenizer
from earl_core.run import RunDirectory
from earl_core.run.episodes import write_episodes
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode, Sample, VersionSpan
from flows.cli.report import report
from tests.cli.conftest import Earl
from tests.kept import seal_episodes

Done = subprocess.CompletedProcess[str]

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SECRET, FORGOTTEN = "swordfish99", "marlin-4711"
HOSTILE = (
    "<script>document.title='x'</script>",
    "</script><script>document.title='x'</script>",
    "<img src=http://127.0.0.1:9/x onerror=\"document.title='x'\">",
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="the page is read in Debian's Chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Reader:
    """A page that is opened without a network, and what it asked for and complained of."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready]", state="attached")
        self.own = file.as_uri()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def draw_all(self) -> None:
        """Scroll over all charts, and wait until they are drawn."""
        for plot in self.page.locator(".plot").all():
            plot.scroll_into_view_if_needed()
            plot.locator(".main-svg").first.wait_for(state="attached")

    def read(self, episode: int) -> None:
        """Open an episode of the list."""
        self.page.get_by_role("button", name=str(episode), exact=True).click()
        self.page.wait_for_function(
            "(number) => document.querySelector('#dialogue h3')?.textContent === number",
            arg=f"Episode {episode}",
        )

    def close(self) -> None:
        """Nothing was asked for but the page, nothing went wrong, nothing is wider than it."""
        wider = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        self.context.close()
        assert self.asked == [self.own]
        assert self.said == []
        assert wider <= 0


@pytest.mark.slow
def test_a_real_run_is_read(
    earl: Earl, finished_run: Done, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    made = earl.run("report", "done", "--output", str(file))
    assert made.returncode == 0, made.stderr
    assert "32 episodes" in made.stdout
    run = earl.directory / "runs" / "done"
    kept = pq.read_table(run / "iterations" / "000001" / "episodes.parquet").to_pylist()

    reader = Reader(browser, file, viewport={"width": 1400, "height": 900})
    assert reader.text("#standing") == "The run is finished: 2 of 2 iterations are finished."
    # Nothing was scrolled to: a print and a picture of the page have all charts.
    whole = Image.open(io.BytesIO(reader.page.screenshot(full_page=True))).convert("RGB")
    for plot in reader.page.locator(".plot").all():
        box = plot.bounding_box()
        part = whole.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))
        tints = {tint for _, tint in part.getcolors(1 << 24) if max(tint) - min(tint) > 60}
        assert tints, plot.get_attribute("aria-label")
    reader.draw_all()
    titles = reader.texts("figure h3")
    wanted = ("Return", "Outcomes of held-out episodes", "Context", "Stages", "Speed")
    assert {*wanted, "Memory of update", "Mismatch of rollout and update"} <= {*titles}
    assert all(reader.texts("#charts .ytitle")), "every axis says its unit"
    assert "as configured" in reader.text("#spans")
    assert {"engine 0", "2 update ranks"} <= {*reader.texts("#strip .ytick")}
    assert "2 update ranks" in reader.text("#waits"), "they wait for the second rollout"
    assert "iterations: 2" in reader.text("#settings")
    assert "earl train" in reader.text("#commands")

    assert reader.text("#count") == "32 of 32 episodes"
    reader.page.get_by_role("spinbutton", name="iteration, from").fill("1")
    assert reader.text("#count") == "16 of 32 episodes"
    outcome = kept[0]["outcome"]
    reader.page.get_by_role("combobox", name="outcome").select_option(f"={outcome}")
    same = [row for row in kept if row["outcome"] == outcome]
    assert reader.text("#count") == f"{len(same)} of 32 episodes"
    reader.page.get_by_role("button", name="Clear").click()
    reader.page.get_by_role("button", name="reward", exact=True).click()
    rewards = [float(text) for text in reader.texts("#rows tbody td:nth-child(5)")]
    assert rewards == sorted(rewards)

    reader.page.get_by_role("spinbutton", name="iteration, from").fill("1")
    reader.read(kept[0]["episode_id"])
    assert reader.texts("#dialogue .model pre") == kept[0]["texts"][1::2]
    reader.page.get_by_role("radio", name="Tokens").click()
    reader.page.wait_for_selector("#dialogue .token")
    assert len(reader.texts("#dialogue .token")) == len(kept[0]["tokens"])
    assert len(reader.texts("#dialogue .trained")) == sum(kept[0]["loss_mask"])
    first = kept[0]["rollout_logprobs"][kept[0]["loss_mask"].index(1)]
    shown = reader.page.locator("#dialogue .trained").first.get_attribute("title") or ""
    assert f"log-prob {round(first, 2):g} " in shown
    reader.close()

    narrow = Reader(browser, file, viewport={"width": 390, "height": 800}, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert narrow.page.evaluate(background) != "rgb(255, 255, 255)"
    narrow.draw_all()
    narrow.close()


def config(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "run",
        "iterations": 3,
        "runs_directory": str(directory / "runs"),
        "model": {"path": str(directory / "model")},
        "environment": {"name": "tic_tac_toe"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4, "max_turns": 5},
        "dispatch": {"directory": str(directory / "shards")},
        **changes,
    }


def played(number: int, label: str, said: str, tokenizer: Any) -> Episode:
    """An episode of one turn in which the model says this."""
    sample = Sample()
    given, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("go", said))
    sample.begin_turn(given, "go")
    sample.answer(answer, [-0.5] * len(answer), [VersionSpan(0, 0, len(answer))], said)
    sample.texts.append("good")
    outcome = {"outcome": "<b>win</b>"}
    return Episode(number, 0, 0, [sample], "done", outcome, environment=label)


def sealed(run: RunDirectory, iteration: int, stage: str, **content: Any) -> None:
    run.seal(
        Manifest(
            run=run.uid, iteration=iteration, stage=stage, key="", policy_version=iteration,
            **content,
        )
    )  # fmt: skip


def plan(iteration: int, size: int) -> dict[str, Any]:
    update = StageDeployment("update")._replace(max_tokens_per_microbatch=size)
    chosen = DeploymentPlan(
        iteration=iteration, stages={"update": update}, reasons={"update": "<i>it fits</i>"}
    )
    return {"plan": chosen.model_dump(mode="json")}


def test_all_that_was_said_is_text(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = "".join(HOSTILE) + CALL + SECRET + FORGOTTEN + "gowas"
    tokenizer = character_tokenizer(letters)
    tokenizer.save_pretrained(tmp_path / "model")
    several = [
        {"label": "shop", "name": "tic_tac_toe", "tools": ["calculator"]},
        {"label": "game", "name": "tic_tac_toe"},
    ]
    changes = {"environment": None, "environments": several}
    run = RunDirectory.open(parse_config(config(tmp_path, **changes)))
    run.store_config()
    said = [*HOSTILE, CALL, f"it is {SECRET}", f"it was {FORGOTTEN}"]
    monkeypatch.setenv("EARL_OLD_PASSWORD", FORGOTTEN)
    episodes = [
        played(number, ("shop", "game")[number % 2], text, tokenizer)
        for number, text in enumerate(said)
    ]
    write_episodes(run.episodes_path(0), run.stores, *seal_episodes(run, 0, [episodes]))
    for iteration in range(2):
        sealed(run, iteration, "select", outputs=plan(iteration, 8192 >> iteration))
    sealed(run, 1, "rollout", outputs={"failures": {"environment_error: <u>gone</u>": 3}})
    suite = {"suite/hard/pass_at_1": 0.5, "suite/hard/pass_at_1/low": 0.4}
    sealed(run, 1, "evaluation", metrics={**suite, "suite/hard/pass_at_1/high": 0.6})
    of = {f"rollout/of/{label}/return/mean": 0.5 for label in ("shop", "game")}
    run.append_metrics(0, {"rollout/return/mean": 0.1, **of})
    # Learnt after the run has kept them.
    monkeypatch.setenv("EARL_TEST_PASSWORD", SECRET)
    monkeypatch.delenv("EARL_OLD_PASSWORD")
    file = tmp_path / "page.html"
    report(str(run.path), str(tmp_path), file, 100)
    run.finish()
    run.close()
    assert SECRET not in file.read_text()

    reader = Reader(browser, file)
    assert reader.text("#standing") == "The run is going on: 1 of 3 iterations is finished."
    assert {"Suite hard", "Return by environment"} <= {*reader.texts("figure h3")}
    assert "<u>gone</u>" in reader.text("#reasons")
    assert "microbatch 8192 -> 4096: <i>it fits</i>" in reader.text("#spans")
    assert reader.texts("#rows tbody tr:first-child td:nth-child(3)") == ["shop"]
    hidden = {4: "it is (hidden)", 5: "it was (hidden)"}
    for number, text in {**dict(enumerate(HOSTILE)), **hidden}.items():
        reader.read(number)
        assert reader.texts("#dialogue .model pre") == [text]
        reader.page.get_by_role("radio", name="Tokens").click()
        if number in hidden:
            reader.page.get_by_text("are left out: they hold a secret").wait_for()
        else:
            reader.page.wait_for_selector("#dialogue .token")
            assert "".join(reader.texts("#dialogue .trained")) == text
        reader.page.get_by_role("radio", name="Text").click()
        reader.page.wait_for_selector("#dialogue .model")
    reader.read(3)
    assert reader.texts("#dialogue .call") == [CALL]
    assert reader.page.title() == "Run run"
    assert reader.page.locator("#dialogue img, #dialogue script").count() == 0
    reader.close()


def test_a_page_replaces_files_alone(tmp_path: Path) -> None:
    run = RunDirectory.open(parse_config(config(tmp_path)))
    run.store_config()
    run.close()
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="it is no file"):
        report("run", str(tmp_path / "runs"), pipe, 100)
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "page.html")
    report("run", str(tmp_path / "runs"), link, 100)
    assert link.is_symlink()
    assert "</html>" in link.read_text()


def test_a_run_without_an_iteration_says_so(browser: Browser, tmp_path: Path) -> None:
    run = RunDirectory.open(parse_config(config(tmp_path)))
    run.store_config()
    run.note(0, "run", "failed")
    run.close()
    report("run", str(tmp_path / "runs"), None, 100)
    reader = Reader(browser, run.path / "report.html")
    assert reader.text("#standing") == (
        "The run has failed: 0 of 3 iterations are finished. It continues with `earl resume "
        f"{run.path}`. "
        "There are no curves yet: they begin with the first finished one."
    )
    assert "The run has kept no episodes" in reader.text("#notes")
    assert reader.page.locator("#reading").is_hidden()
    assert "failed" in reader.text("#events")
    reader.close()
