"""Makes the pictures of pages in `docs/images` anew, from one run and running services.

    earl up; earl train tictactoe_tiny --set iterations=12; earl report tictactoe_tiny
    python docs/site/pictures.py runs/tictactoe_tiny

Chromium takes them. Look at each before it is committed.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from earl_core.system.service import Service, read_services

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
IMAGES = Path(__file__).resolve().parents[1] / "images"
SIZE = {"width": 1400, "height": 900}
PATIENCE_MS = 60_000


def main() -> None:
    """Take all pictures of the run that is named on the command line."""
    run = Path(sys.argv[1]).resolve()
    services = read_services(run.parent)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        prefect(browser, services["prefect"], run.name)
        mlflow(browser, services["mlflow"], run.name)
        report(browser, run / "report.html")
        browser.close()


def keep(page: Page, name: str) -> None:
    """Save the page once what moves on it has come to rest."""
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / f"{name}.png")


def opened(browser: Browser, script: str = "", **options: object) -> Page:
    """A page of the pictures' size; the script runs before any of its own."""
    context = browser.new_context(viewport=SIZE, **options)  # type: ignore[arg-type]
    if script:
        context.add_init_script(script)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    return page


def prefect(browser: Browser, service: Service, run: str) -> None:
    """The form, the run's newest iteration and two of its artifacts."""
    site = service.url.removesuffix("/api")
    word = base64.b64encode(f"{service.user}:{service.password}".encode()).decode()
    page = opened(browser, f"localStorage.setItem('prefect-password', '{word}')")
    page.goto(f"{site}/deployments")
    page.get_by_role("link", name="iteration", exact=True).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    page.get_by_text("The directory of a run").wait_for()
    keep(page, "prefect_form")
    page.goto(f"{site}/runs")
    page.get_by_role("link", name=f"{run} ").first.click()
    page.get_by_text("Job Variables").wait_for()
    keep(page, "prefect_flow_run")
    flow_run = page.url
    for kind, name in (("curve", "prefect_artifact_curve"), ("episodes", "prefect_episodes")):
        page.goto(flow_run)
        page.locator(".p-tab", has_text="Artifacts").click()
        page.locator("a[href*='/artifacts/artifact/']", has_text=f"-{kind}").first.click()
        page.get_by_text("Show raw data").wait_for()
        keep(page, name)
    page.context.close()


def mlflow(browser: Browser, service: Service, run: str) -> None:
    """The run's charts and a trace."""
    login = {"username": service.user, "password": service.password}
    page = opened(browser, http_credentials=login)
    # Helpers of MLflow's that lie over the page, each of which a person closes once.
    for name in ("Got it", "Close"):
        button = page.get_by_role("button", name=name, exact=True)
        page.add_locator_handler(button.first, lambda found: found.click(), times=4)
    page.goto(f"{service.url}/#/experiments")
    page.get_by_role("link", name="earl", exact=True).first.click()
    page.get_by_text("Model training").first.click()
    page.get_by_role("link", name=run, exact=True).first.click()
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_role("heading", name="win_rate", exact=True).wait_for()
    keep(page, "mlflow_charts")
    page.get_by_role("tab", name="Traces").click()
    page.get_by_role("cell", name="tr-").first.click()
    page.get_by_text("turn 1").first.wait_for()
    keep(page, "mlflow_trace")
    page.context.close()


def report(browser: Browser, file: Path) -> None:
    """The first screen of a run's report."""
    page = opened(browser)
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", state="attached")
    keep(page, "report")
    page.context.close()


if __name__ == "__main__":
    main()
