"""Order of the stages in one iteration, as the table of stages has it, whoever runs the stages.

A stage that runs out of memory, or overflows the engines' context, has `select` choose again; one
that lost ranks is tried again as it was. Finished stages stay finished, and the stage is repeated
from its sealed inputs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from earl_core.control.consequences import heed
from earl_core.control.device_moves import follow, needs_barrier
from earl_core.control.failure_diagnosis import RanksLost, StageInfeasible, require_another
from earl_core.control.prompt_waves import divided, more
from earl_core.control.run_controller import RunController, Verdict
from earl_core.control.stage_execution import judge, observe
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import (
    EVALUATION,
    ROWS,
    STAGES,
    TRAINING,
    WEIGHTS,
    Stage,
    in_wave,
    rounds,
    rows_of,
    taking_part,
)
from earl_core.dispatch import Manifest
from earl_core.guard.caution import caution_in_key
from earl_core.run.replay import new_rows
from earl_core.selector.choice.prediction import NoFeasiblePlan
from flows.overlap import PLACED, Overlap
from tasks.publish import input_weights
from tasks.select import select_inputs
from tasks.stage import StageRef, resolve

Result = TypeVar("Result")
Work = Callable[[], Awaitable[Any]]


class StageRunner(Protocol):
    """A way to run the stages of one iteration: as tasks of Prefect, or as plain calls."""

    async def perform(
        self, stage: str, wave: int, verdict: Verdict, read: Sequence[Manifest]
    ) -> StageRef:
        """Run the stage's task, or have it find that it is finished. wave: of prompts, 0: it is of
        none. read: what it is given."""

    async def aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call what takes its time."""

    async def together(self, works: Sequence[Work]) -> None:
        """Do all of them, side by side where that can be."""


class StageGraph:
    """The stages of one iteration of a run, and what they sealed; of waves of prompts, too.
    beside_publish: done meanwhile, for neither needs the other. overlap: what they wait for of
    iterations that run beside."""

    def __init__(
        self,
        controller: RunController,
        iteration: int,
        runner: StageRunner,
        beside_publish: Work | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.controller, self.iteration = controller, iteration
        self._imitates = controller.config.imitates(iteration)
        self.manifests: dict[str, Manifest] = {}
        self._in_waves = controller.config.rollout.filters_groups
        self._runner, self._beside_publish, self._overlap = runner, beside_publish, overlap

    async def whole(self) -> dict[str, Manifest]:
        """Run every stage that is not finished; their sealed manifests. Raises as `heed` does where
        the guard has decided otherwise."""
        await self._until_done(self._rounds)
        return self.manifests

    async def evaluation(self) -> Manifest:
        """Evaluate the weights that the iteration starts from; what that sealed."""
        await self._until_done(partial(self.run, EVALUATION))
        return self.manifests[EVALUATION.name]

    async def _rounds(self) -> None:
        for stages in rounds(taking_part(self.controller.config, self._imitates)):
            works = self._works(stages)
            if self._beside_publish is not None and STAGES["publish"] in stages:
                works.append(self._beside_publish)
            await self._runner.together(works)
            if STAGES["reward"] in stages:
                sealed = self.manifests
                self.controller.episodes.begin(new_rows(rows_of(sealed)), sealed["reward"])
            if STAGES["advantage"] in stages:
                await self._runner.aside(heed, self.controller.run, self.manifests["advantage"])

    def _works(self, stages: Sequence[Stage]) -> list[Work]:
        """Works that may be done side by side: a round's stages, those in turn whose roles have a
        model of the learner's, which would take each other's devices."""
        turns = [stage for stage in stages if stage.role in TRAINING]

        async def in_turn() -> None:
            for stage in turns:
                await self.run(stage)

        others: list[Work] = [partial(self.run, stage) for stage in stages if stage not in turns]
        return [*others, in_turn] if turns else others

    async def _until_done(self, work: Work) -> None:
        """Choose a plan and do `work` under it; again as often as a stage is infeasible and there
        is another candidate to try, or lost ranks and may be repeated.

        Raises what the stage raised when the same stage deployment comes back, `NoFeasiblePlan`
        when none is left. Each such error rules out a candidate, or doubles the engines' context,
        and losses are counted, so this comes to an end.
        """
        infeasible = None
        while True:
            await self.choose(infeasible)
            await self._take_devices()
            await self._runner.aside(self.controller.start_ahead, self.plan)
            try:
                await work()
                return
            except StageInfeasible as error:
                infeasible = error
                if any(name in self.manifests for name in ROWS):
                    # What is done already tells the next choice more.
                    await self._runner.aside(observe, self.controller, self.manifests)
            except RanksLost:
                infeasible = None

    async def choose(self, infeasible: StageInfeasible | None = None) -> None:
        """Seal a plan; another one than that under which a stage was infeasible."""
        await self._ready(STAGES["select"])
        inputs = select_inputs(self.controller, self.iteration)
        try:
            await self._perform("select", inputs, [])
        except NoFeasiblePlan as nothing:
            raise nothing from infeasible
        if infeasible is not None:
            require_another(infeasible, self.plan)

    async def _take_devices(self) -> None:
        """Have the worker groups follow the plan, once what works under another one is done."""
        if self._overlap is not None:
            barrier = await self._runner.aside(needs_barrier, self.controller, self.plan)
            await self._overlap.before_devices(self.iteration, barrier)
        await self._runner.aside(follow, self.controller, self.plan)
        if self._overlap is not None:
            await self._overlap.passed(self.iteration, PLACED)

    @property
    def plan(self) -> DeploymentPlan:
        """The iteration's, as it was sealed."""
        return DeploymentPlan.model_validate(self.manifests["select"].outputs["plan"])

    async def run(self, stage: Stage) -> None:
        """Run a stage and wait for it. One that was done under another plan is not run again."""
        if stage.name in self.manifests:
            return
        if self._in_waves and stage.name in ("rollout", "reward"):
            await self._run_in_waves(stage)
            return
        await self._ready(stage)
        sources = stage.sources(self.controller.config, self._imitates)
        read = {name: self.manifests[name] for name in sources if name != WEIGHTS}
        digests = [
            (read[name] if name in read else await self._weights(stage)).data_digest()
            for name in sources
        ]
        digests += caution_in_key(stage.name, read.values())
        if stage.learnt_by and self.iteration:
            learnt = self.controller.run.manifest(self.iteration - 1, stage.learnt_by)
            digests.append(learnt.data_digest())
        await self._perform(stage.name, digests, list(read.values()))

    async def _run_in_waves(self, stage: Stage) -> None:
        """Play and score as many waves of prompts as it takes, and put their parts together."""
        sealed: list[Manifest] = []
        while more(self.controller.config, sealed):
            wave = len(sealed) // 2 + 1
            for name in ("rollout", "reward"):
                sealed.append(await self._run_wave(name, wave, sealed))
        rollout = self.controller.config.rollout
        read = sealed if stage.name == "rollout" else divided(sealed)[1]
        # Which groups are trained on depends on nothing else.
        how = [] if stage.name == "reward" else [rollout.alike_groups]
        await self._perform(stage.name, [*_digests(read), *how], read)

    async def _run_wave(self, stage: str, wave: int, earlier: Sequence[Manifest]) -> Manifest:
        name = in_wave(stage, wave)
        if name not in self.manifests:
            weights = []
            if stage == "rollout":
                if wave == 1:
                    await self._ready(STAGES[stage])
                weights.append((await self._weights(STAGES[stage])).data_digest())
            await self._perform(stage, [*weights, *_digests(earlier)], earlier, wave)
        return self.manifests[name]

    async def _ready(self, stage: Stage) -> None:
        if self._overlap is not None:
            await self._overlap.before(self.iteration, stage)

    async def _weights(self, stage: Stage) -> Manifest:
        given = self.controller, self.plan["update"], self.iteration, stage.name
        return await self._runner.aside(input_weights, *given)

    async def _perform(
        self, stage: str, digests: Sequence[str], read: Sequence[Manifest], wave: int = 0
    ) -> None:
        name = in_wave(stage, wave)
        verdict = await self._runner.aside(judge, self.controller, self.iteration, name, digests)
        plan = [] if stage == "select" else [self.manifests["select"]]
        sealed = await self._runner.perform(stage, wave, verdict, [*plan, *read])
        self.manifests[name] = resolve(self.controller, sealed)
        if self._overlap is not None and not wave:
            await self._overlap.passed(self.iteration, STAGES.get(stage, EVALUATION))


def _digests(manifests: Sequence[Manifest]) -> list[str]:
    return [manifest.data_digest() for manifest in manifests]
