"""Pages of the flow run of a whole training in Prefect: one of each, kept up to date.

The pages of an iteration belong to the iteration's flow run and stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from earl_core.control.run_controller import RunController
from earl_core.secrets import shareable
from tasks.report import artifact_name, run_pages
from tasks.tracking.run_note import mlflow_page

logger = logging.getLogger(__name__)


class TrainPages:
    """Made within the flow run whose pages they are. Pages that cannot be made or stored stop no
    training; none is waited for but at the end."""

    def __init__(self, controller: RunController) -> None:
        self._controller = controller
        self._known: dict[str, UUID] = {}
        self._linked = False
        self._work: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """The run has something new: bring the pages up to date beside what follows."""
        before = self._work
        self._work = asyncio.create_task(self._after(before))

    async def settle(self) -> None:
        """Wait until they are."""
        if self._work is not None:
            await self._work

    async def _after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            await self._write()
        except Exception as error:
            logger.warning("the run goes on, with old pages in Prefect: %s", error)

    async def _write(self) -> None:
        run, name = self._controller.run, artifact_name(self._controller.config.name)
        iteration = self._controller.next_iteration() - 1
        pages = await asyncio.to_thread(self._pages, iteration)
        for kind, (page, description) in pages.items():
            text = shareable(page)
            if kind in self._known:
                async with get_client() as client:
                    changed = ArtifactUpdate(data=text, description=description)
                    await client.update_artifact(self._known[kind], changed)
            else:
                made = await acreate_markdown_artifact(
                    text, key=f"{name}-{kind}", description=description
                )
                self._known[kind] = UUID(str(made))
        link = mlflow_page(run.record)
        if link is not None and not self._linked:
            described = "Its metrics, evaluations, checkpoints and traces"
            key = f"{name}-mlflow"
            await acreate_link_artifact(link, "The run in MLflow", key=key, description=described)
            self._linked = True

    def _pages(self, iteration: int) -> dict[str, tuple[str, str]]:
        run = self._controller.run
        return run_pages(self._controller, iteration, run.plan(iteration), run.metrics())
