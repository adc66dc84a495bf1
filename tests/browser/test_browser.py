"""What people do in Prefect, MLflow and the report, done in a real browser, in this order."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser

from earl_core.system.service import Service
from tests.browser.conftest import CHROMIUM, PAGE_SECONDS, RUN_SECONDS, Site, until
from tests.cli.conftest import Earl
from tests.flows.server import ask_patiently

CANCEL_SECONDS = 180.0
"""Within which a cancelled flow run's workers are gone, also beside another test; Prefect itself
kills after 30."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="Debian's Chromium reads the pages"),
]


def test_the_deployments_are_listed_and_a_schedule_is_added(site: Site) -> None:
    site.page.get_by_text("Deployments", exact=True).click()
    for name in ("train", "iteration", "evaluate", "profile"):
        site.page.get_by_role("link", name=name, exact=True).first.wait_for()
    # It is due while the next tests run.
    site.add_schedule("evaluate")
    site.open_deployment("evaluate")
    site.page.get_by_text("Every minute").first.wait_for()


def test_an_iteration_is_submitted_by_its_form_and_its_artifacts_are_read(site: Site) -> None:
    def choose_run() -> None:
        site.page.get_by_role("button", name=str(site.run), exact=True).focus()
        site.page.keyboard.press("ArrowDown")
        site.page.locator(".p-select-option", has_text=str(site.run)).first.click()

    site.submit("iteration", choose_run)
    site.wait_for("Completed")
    flow_run = site.flow_run
    site.artifact("plan", "Plan of iteration 1")
    site.open_flow_run(flow_run)
    images = site.artifact("curve").locator("img")

    def widths() -> list[int]:
        return images.evaluate_all("images => images.map(each => each.naturalWidth)")

    until(lambda: len(widths()) == 2 and min(widths()) > 0, PAGE_SECONDS, widths)
    site.open_flow_run(flow_run)
    site.artifact("episodes", "A good episode")
    site.open_flow_run(flow_run)
    link = site.artifact("mlflow").get_by_role("link", name="The run in MLflow")
    assert "/#/experiments/" in (link.get_attribute("href") or "")


def test_a_killed_iteration_says_how_it_goes_on_and_is_retried(site: Site) -> None:
    site.submit("iteration")
    site.wait_for("Failed")
    site.tab("Logs")
    sentence = f'Continue with: earl resume {site.run}")'
    until(lambda: sentence in site.told(), PAGE_SECONDS, site.told)
    assert "was killed by signal 9" in site.told()
    assert "Traceback" not in site.told()
    # The runner and the worker report the process's end; a retry before that would be crashed.
    until(
        lambda: site.told().count("unhandled exception or assertion error") > 1,
        PAGE_SECONDS,
        site.told,
    )
    # Both may still be about to.
    assert any(_retried(site) == "Completed" for _ in range(3)), site.told()
    site.tab("Task Runs")
    until(lambda: site.told().count("Cached") >= 4, PAGE_SECONDS, site.told)
    assert f"{site.run.name} 2" in site.told()


def _retried(site: Site) -> str:
    """The state that the flow run ends in once Retry is pressed."""
    time.sleep(3)
    site.confirm("Retry", "Retry")
    ends = ("Completed", "Failed", "Crashed")
    return until(lambda: site.state() in ends and site.state(), RUN_SECONDS, site.told)


def test_the_schedule_has_fired(site: Site) -> None:
    chosen = {"flows": {"name": {"any_": ["evaluate"]}}, "sort": "EXPECTED_START_TIME_ASC"}
    states = {"flow_runs": {"state": {"name": {"any_": ["Completed"]}}}}
    found = until(
        lambda: ask_patiently(site.access, "flow_runs/filter", {**chosen, **states}),
        RUN_SECONDS,
        lambda: ask_patiently(site.access, "flow_runs/filter", chosen),
    )
    # It would go on beside the tests that follow.
    for schedule in site.schedules("evaluate"):
        assert schedule["schedule"]["cron"] == "* * * * *"
        schedules = f"deployments/{schedule['deployment_id']}/schedules/{schedule['id']}"
        site.access.ask(schedules, method="DELETE")
    site.open_flow_run(found[0]["id"])
    site.wait_for("Completed")
    assert "auto-scheduled" in found[0]["tags"]
    site.artifact("evaluation")


def _workers(run: Path) -> list[psutil.Process]:
    """Live worker processes of the run's training."""
    logs = str(run / "logs")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "earl_core.cluster" in " ".join(process.info["cmdline"] or ()):
            try:
                found += [process] if any(logs in f.path for f in process.open_files()) else []
            except psutil.Error:
                continue
    return found


def test_a_cancelled_iteration_ends_and_resume_completes_the_run(site: Site, here: Earl) -> None:
    site.submit("iteration")
    until((site.faults / "update.step0@3").exists, RUN_SECONDS, site.told)
    assert _workers(site.run)
    site.page.reload()
    site.wait_for("Running")
    site.confirm("Cancel", "Confirm")
    until(lambda: not _workers(site.run), CANCEL_SECONDS, lambda: _workers(site.run))
    site.wait_for("Cancelled")
    done = here.run("resume", site.run.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site.run / "checkpoints" / "000003" / "STABLE").exists()


def test_mlflow_shows_charts_and_a_trace(
    browser: Browser, services: dict[str, Service], site: Site
) -> None:
    server = services["mlflow"]
    login = {"username": server.user, "password": server.password}
    context = browser.new_context(
        http_credentials=login, viewport={"width": 1400, "height": 1000}, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(PAGE_SECONDS * 1000)
    # Helpers of MLflow's that lie over the page, each of which a person closes once.
    for name in ("Got it", "Close"):
        button = page.get_by_role("button", name=name, exact=True)
        page.add_locator_handler(button.first, lambda found: found.click(), times=4)
    page.goto(f"{server.url}/#/experiments")
    page.get_by_role("link", name="earl", exact=True).first.click()
    page.get_by_text("Model training").first.click()
    page.get_by_role("link", name=site.run.name, exact=True).first.click()
    page.get_by_role("tab", name="Model metrics").click()
    for chart in ("return", "tokens_per_episode", "tokens_per_second", "turns_per_episode"):
        page.get_by_role("heading", name=chart, exact=True).wait_for()
    page.locator(".main-svg").first.wait_for()
    page.get_by_role("tab", name="Traces").click()
    page.get_by_role("cell", name="tr-").first.click()
    page.get_by_text("turn 1").first.wait_for()
    page.get_by_text("generation").first.wait_for()
    context.close()


def test_the_report_opens_from_disk(browser: Browser, here: Earl, site: Site) -> None:
    made = here.run("report", site.run.name)
    assert made.returncode == 0, made.stderr
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((site.run / "report.html").as_uri())
    page.wait_for_selector("body[data-ready]", state="attached", timeout=PAGE_SECONDS * 1000)
    assert "4 of 4 iterations are finished" in page.locator("#standing").inner_text()
    assert page.locator("#rows tbody tr").count() > 0
    context.close()
