"""`earl up` with a worker whose faults are known, one run, one browser: for all tests here."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, Request, Response, sync_playwright

from earl_core.system.service import Service, read_services
from flows.server import Access, access_of
from tests.cli.conftest import CONFIG, Earl
from tests.flows.conftest import free_port
from tests.flows.server import ask_patiently
from tests.shared import in_memory

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FAULTS = "update.step0@2=kill;update.step0@3=hang"
"""Iteration 2 loses its update, iteration 3 never ends; each of them once."""

RUN_SECONDS = 400.0
PAGE_SECONDS = 180.0
_ACTS = ("/schedules", "/create_flow_run", "/set_state")
_LET_CLICKS_THROUGH = """addEventListener("DOMContentLoaded", () => {
  const style = document.createElement("style");
  style.textContent = "#prefect-design-toast-app * { pointer-events: none !important }";
  document.head.append(style);
})"""
_ENDS = {"Completed", "Failed", "Crashed", "Cancelled"}


def until(true: Callable[[], Any], seconds: float, told: Callable[[], object]) -> Any:
    """What the question answers, once that is something; fails after these seconds."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)
    return found


class Site:
    """Prefect's pages, as a person uses them."""

    def __init__(self, page: Page, access: Access, run: Path, faults: Path) -> None:
        self.page, self.access, self.run, self.faults = page, access, run, faults
        self.url = access.site
        self.lost: list[str] = []
        page.on("response", self._answered)
        page.on("requestfailed", self._failed)

    def press(self, act: Callable[[], object], seen: Callable[[], Any]) -> Any:
        """Act until the effect is seen, and what it is. A person acts again whose request was
        lost: the pages say so in a corner and do not ask again."""
        for _ in range(2):
            self.lost.clear()
            act()
            deadline = time.monotonic() + RUN_SECONDS
            while not (found := seen()) and not self.lost and time.monotonic() < deadline:
                self.page.wait_for_timeout(200)  # the page's events arrive meanwhile
            if found:
                return found
        act()
        return until(seen, RUN_SECONDS, self.told)

    def _answered(self, response: Response) -> None:
        if not response.ok:
            self._failed(response.request)

    def _failed(self, request: Request) -> None:
        if request.method == "POST" and request.url.endswith(_ACTS):
            self.lost.append(request.url)

    def log_in(self) -> None:
        self.page.goto(self.url)
        self.page.locator("input").first.fill(self.access.auth or "")
        self.page.keyboard.press("Enter")
        self.page.get_by_text("Active Work Pools").wait_for()

    def open_deployment(self, name: str) -> None:
        self.page.goto(f"{self.url}/deployments")
        self.page.get_by_role("link", name=name, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).wait_for()

    def schedules(self, deployment: str) -> list[dict[str, Any]]:
        """As the server has them."""
        return ask_patiently(self.access, f"deployments/name/{deployment}/{deployment}")[
            "schedules"
        ]

    def add_schedule(self, deployment: str) -> None:
        """By the page of the deployment: every minute."""

        def save() -> None:
            self.open_deployment(deployment)
            self.page.get_by_role("button", name="Schedule", exact=True).click()
            dialogue = self.page.locator(".p-modal")
            dialogue.get_by_role("button", name="Cron").click()
            dialogue.get_by_text("Every minute").wait_for()
            dialogue.get_by_role("button", name="Save").click()
            # The dialogue says the same words, and leaving the page would end a request on its way.
            dialogue.wait_for(state="detached")

        self.press(save, lambda: self.schedules(deployment))

    def open_form(self, deployment: str) -> None:
        self.open_deployment(deployment)
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_text("Custom run").click()
        self.page.get_by_text("The directory of a run").wait_for()

    def submit(self, deployment: str, fill: Callable[[], object] = lambda: None) -> None:
        """Open the form of a deployment, fill and submit it, and open the page of its flow run."""
        known = self._submitted()

        def submitted() -> None:
            self.open_form(deployment)
            fill()
            self.page.get_by_role("button", name="Submit").click()

        (identity,) = self.press(submitted, lambda: self._submitted() - known)
        self.open_flow_run(identity)

    def _submitted(self) -> set[str]:
        """The ids of all flow runs of the deployment `iteration`; each is renamed as it begins."""
        chosen = {"deployments": {"name": {"any_": ["iteration"]}}}
        return {each["id"] for each in ask_patiently(self.access, "flow_runs/filter", chosen)}

    def open_flow_run(self, identity: str) -> None:
        self.page.goto(f"{self.url}/runs/flow-run/{identity}")
        self.page.get_by_text("Job Variables").wait_for()

    @property
    def flow_run(self) -> str:
        """The id of the flow run whose page is open."""
        return self.page.url.partition("/flow-run/")[2].partition("?")[0]

    def state(self) -> str:
        """As the page of a flow run says."""
        return (self.page.locator(".state-badge").first.text_content() or "").strip()

    def wait_for(self, state: str, seconds: float = RUN_SECONDS) -> None:
        """Until the page of a flow run says so; it renews itself."""
        until(lambda: self.state() in {state, *_ENDS} and self.state(), seconds, self.told)
        assert self.state() == state, self.told()

    def told(self) -> str:
        return self.page.locator("body").inner_text()

    def tab(self, name: str) -> None:
        self.page.locator(".p-tab", has_text=re.compile(f"^{name}$")).click()

    def confirm(self, button: str, word: str) -> None:
        """Press a button of the flow run's page, and the one in the dialogue that asks again, until
        the flow run leaves its state."""
        before = self.state()
        dialogue = self.page.locator(".p-modal")

        def answer() -> None:
            if not dialogue.is_visible():
                self.page.get_by_role("button", name=button, exact=True).click()
            dialogue.get_by_role("button", name=word, exact=True).click()

        # Leaving the page before the dialogue is gone would end a request on its way.
        self.press(answer, lambda: not dialogue.is_visible() and self.state() not in (before, ""))

    def artifact(self, kind: str, shows: str = "") -> Locator:
        """Open an artifact of the flow run at hand, until its text shows this; the page's main
        part. Prefect draws the text, which may come in a second request, after its own words."""
        self.tab("Artifacts")
        card = self.page.locator(
            "a[href*='/artifacts/artifact/']", has_text=f"{self.run.name}-{kind}"
        )
        card.first.click()
        self.page.get_by_text("Show raw data").wait_for()
        main = self.page.locator(".app-router-view, body").first
        until(lambda: shows in main.inner_text(), PAGE_SECONDS, main.inner_text)
        return main


@pytest.fixture(scope="module")
def here() -> Iterator[Earl]:
    """`earl` in a directory of its own, without a server."""
    with in_memory("browser") as place:
        (place / "here").mkdir()
        yield Earl(place / "here", place / "shards")


@pytest.fixture(scope="module")
def services(here: Earl) -> Iterator[dict[str, Service]]:
    """What `earl up` started, with faults in what its worker runs."""
    faulty = Earl(here.directory, here.shared_memory)
    (here.directory / "faults").mkdir()
    faulty.environment["EARL_FAULT"] = FAULTS
    faulty.environment["EARL_FAULT_ONCE"] = str(here.directory / "faults")
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    done = faulty.run("up", *ports)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield read_services(here.directory / "runs")
    finally:
        here.run("down")


@pytest.fixture(scope="module")
def run(here: Earl, services: dict[str, Service]) -> Path:
    """A run with one iteration done by the command line, of four by its configuration."""
    settings = here.settings(iterations="1", evaluation__every="0", deadlines__repeats="0")
    done = here.run("train", str(CONFIG), "--name", "seen", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    path = here.directory / "runs" / "seen"
    config = path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "iterations": 4}))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(browser: Browser, services: dict[str, Service], here: Earl, run: Path) -> Site:
    """Prefect's pages, logged in."""
    # Without a GPU an animation takes half a core for as long as it is shown.
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
    page.set_default_timeout(PAGE_SECONDS * 1000)
    # Messages in a corner lie over buttons until somebody closes them.
    page.add_init_script(_LET_CLICKS_THROUGH)
    site = Site(page, access_of(services["prefect"]), run, here.directory / "faults")
    site.log_in()
    return site
