"""The run controller: this process's hold on a run: its directory, worker groups and tracker.

Prefect tasks get small JSON references only; what lives across them (worker processes, the
tracker's queue) is looked up here by run directory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from earl_core.cluster.host import Cluster
from earl_core.cluster.host_view import software
from earl_core.config import ConfigError, RunConfig
from earl_core.control.ancestor import find_ancestor, held_ancestor, keep_adapter, keep_ancestor
from earl_core.control.device_figures import figures_for
from earl_core.control.engine_turns import EngineTurns
from earl_core.control.group_stream import GroupStream
from earl_core.control.hardware import open_cluster, with_network
from earl_core.control.host_peers import fetch_bandwidth, served
from earl_core.control.learner_handle import LearnerHandle
from earl_core.control.learnt_profile import LearntProfile, RunHistory
from earl_core.control.live import find, live
from earl_core.control.preflight import (
    Preflight,
    check_shared_memory,
    fitting_model,
    preflight,
    surely,
    warn_of_turns,
)
from earl_core.control.prompt_waves import check_numbers, taken_before
from earl_core.control.resume_point import check_states, resume_point
from earl_core.control.row_draws import RowDraws
from earl_core.control.selector_policy import settled
from earl_core.control.teachers import (
    check_teachers,
    held_teachers,
    keep_teachers,
    reference_shapes,
)
from earl_core.control.worker_groups import Progress, WorkerGroups, quiet
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import EVALUATION, PLACED, TRAINED, taking_part
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import unmeasured_gates
from earl_core.run.episodes import EpisodeKeeper
from earl_core.run.past_lengths import PastLengths
from earl_core.run.record import SOFTWARE
from earl_core.run.recovery import complete_return, take_newest_whole
from earl_core.run.retention import kept_weights
from earl_core.run.run_stores import sweep_unneeded
from earl_core.run.staleness import note_change
from earl_core.run.told_progress import ToldProgress
from earl_core.system.errors import EarlError
from earl_core.system.memory import give_back_free_memory

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""The end of a run, in the tracker's words."""


class HostsChanged(EarlError):
    """Hosts of the run were lost, or it can have more, at an iteration: what goes on has to open it
    again."""

    def __init__(self, message: str, iteration: int) -> None:
        super().__init__(message)
        self.iteration = iteration


class BranchBegun(EarlError):
    """The run goes back: what goes on has to open it again."""


class RunTracker(Protocol):
    """Display of the run to people elsewhere; it returns at once and never raises."""

    def changed(self) -> None:
        """The run directory has something new to show."""
        ...

    def close(self, status: Status = "FINISHED") -> None: ...


MakeTracker = Callable[[RunDirectory, Hardware], RunTracker]


@dataclass(frozen=True)
class Verdict:
    """The key that the stage's sealed manifest must carry, and that manifest if it need not run."""

    key: str
    known: Manifest | None


class RunController:
    """Opened by `open_controller`; close it to stop the workers and unlock the run."""

    model: ModelShape
    reference_models: tuple[ModelShape, ...]
    tracker: RunTracker

    def __init__(
        self,
        run: RunDirectory,
        cluster: Cluster,
        found: Preflight,
        listener: Progress = quiet,
        here: bool = False,
    ) -> None:
        hosts = found.hosts
        self._cluster = cluster
        self.run = run
        self.config: RunConfig = run.config
        self.listener: Progress = ToldProgress(run.path, listener)
        self._finished_here = -1
        self.losses: Counter[int] = Counter()
        self.stepless: set[int] = set()
        self.guard_faults: set[tuple[str, str]] = set()
        self.verdicts: dict[tuple[int, str], Verdict] = {}
        self.single_iteration = False
        self.observed = RunHistory(run)
        self.episodes = EpisodeKeeper(run)
        self.past_lengths = PastLengths(run.path, run.config.tracking.keep_episodes_bytes)
        self.profile: LearntProfile | None = None
        self._held, self._registered = ExitStack(), ExitStack()
        self._held.callback(cluster.close)
        self._held.callback(run.close)
        self._model = found.model
        peers = served(run, hosts, self._held)
        hardware = figures_for(run.config.selector, found.hardware, hosts)
        self.hardware = with_network(hardware, hosts, fetch_bandwidth(run, peers))
        where, told = (run.config, run.path, run.logs, self.hardware), self.listener
        self.groups = WorkerGroups(
            *where, told, self.next_iteration, hosts, peers, here, run.note, run.branches
        )
        self.learners = {role: LearnerHandle(role, run, self.groups) for role in TRAINED}
        self.followed: DeploymentPlan | None = None
        self.turns = EngineTurns()
        self.rows = RowDraws(run, found.prompt_counts)
        self.ranges = found.ranges
        self.stream = GroupStream(run, self.groups, self.listener, self.rows)
        self.stop_requested = self.groups.stop_requested
        # Whoever handles a signal finds it while its first workers start, too.
        self._registered.enter_context(live(str(run.path.resolve()), self))
        self._status: Status = "FINISHED"

    def prepare(self, track: MakeTracker) -> None:
        """Make the model, check that it fits, start the workers of the last plan and the tracker.

        Raises `ConfigError`, and the error of a worker that makes the model.
        """
        self.model = self._model or self._made_model()
        self.reference_models = reference_shapes(self.config)
        self._settle_policy()
        warn_of_turns(self.config)
        check_shared_memory(self.config, self.run.stores)
        check_numbers(self.run)
        if (stable := self.run.last_stable()) >= 0:
            check_states(self.run.checkpoint_path(stable), self.config, stable + 1)
        self._check_demonstrations(self.next_iteration())
        # Should another plan be chosen, a stage rebuilds its group.
        if (sealed := self.run.plan(self.next_iteration())) is not None:
            self.groups.move(sealed.division or self.config.stages.division)
            self.start_ahead(sealed)
        note_change(self.run)
        self._check_gates()
        self.run.store_config()
        told = {SOFTWARE: software(self.hardware.cpu_cores)}
        self.run.note(self.next_iteration(), "run", "begins", **told)
        self.tracker = track(self.run, self.hardware)
        self._held.callback(lambda: self.tracker.close(self._status))

    def _settle_policy(self) -> None:
        """Decide what `auto` is where that had to wait for the model, before anything is chosen."""
        policy = settled(self.config, self.hardware, self.model, self.reference_models)
        policy.tell(lambda text: self.listener("select", 0, {"chosen": text}))
        policy.keep(self.run)
        self.config = self.run.config = policy.config

    def demonstrations(self, method: str, iteration: int, **arguments: Any) -> dict[str, Any]:
        """Ask the worker of the demonstrations, which is one rank whatever the plan."""
        alone = StageDeployment("demonstrate", threads=1)
        (result,) = self.groups.call(alone, "demonstrations", method, iteration, **arguments)
        return result

    def _check_demonstrations(self, first: int) -> None:
        if self.config.imitates(first):
            taken = taken_before(self.run, first).demonstrations
            surely(
                lambda: self.demonstrations("check", first, first=first, taken=taken),
                self.config.deadlines.repeats,
                self.stop_requested.is_set,
            )

    def _check_gates(self) -> None:
        shut = unmeasured_gates(self.run.evaluations(), self.config.gates)
        if shut and self.run.last_stable() >= 0:
            logger.warning(
                "there is no evaluation of the first policy in the gated suites %s, so no "
                "checkpoint is the best one: put it back, or leave `gate` out",
                ", ".join(shut),
            )

    def _made_model(self) -> ModelShape:
        model = self.config.model.made
        what = "downloading" if model.from_hub else "building"
        self.listener("model", 0, {what: model.path})
        deployment = StageDeployment(stage="model", threads=self.hardware.cpu_cores)
        surely(
            lambda: self.groups.call(deployment, "model", "build", self.next_iteration()),
            self.config.deadlines.repeats,
            self.stop_requested.is_set,
        )
        self.groups.retire("model", 0)
        keep_ancestor(self.run, find_ancestor(self.config))
        check_teachers(self.config, Path(self.config.initial_model.path))
        return fitting_model(self.config, self.hardware)

    def start_ahead(self, plan: DeploymentPlan) -> None:
        """Begin to start the groups of the stages that are not sealed yet; returns at once.

        In the order of need. A seal is a hint only: a stage whose seal does not count starts its
        group itself.
        """
        if (plan.division or self.config.stages.division) != self.groups.division:
            return

        def unsealed(*stages: str) -> bool:
            paths = (self.run.stage_path(plan.iteration, stage) for stage in stages)
            return not all(path.is_file() for path in paths)

        if plan.iteration >= self.config.iterations:
            needed = {EVALUATION.role: unsealed(EVALUATION.name)}
        else:
            stages = taking_part(self.config, self.config.imitates(plan.iteration))
            doers = {stage.name: stage.done_by(self.config) for stage in stages}
            doing = {role: [name for name, by in doers.items() if by == role] for role in PLACED}
            needed = {role: unsealed(*stages) for role, stages in doing.items()}
        roles = [role for role, wanted in needed.items() if wanted and role in plan.stages]
        self.groups.start_ahead((role, plan.stages[role]) for role in roles)

    def next_iteration(self) -> int:
        """The iteration after the last one finished here, or covered by a checkpoint."""
        return resume_point(self.run, self._finished_here).iteration

    def finish_iteration(self, iteration: int) -> None:
        """Remember that this controller finished an iteration, with or without a checkpoint."""
        self._finished_here = iteration
        # Otherwise the controller's memory grows by each iteration's short-lived records.
        give_back_free_memory()

    def go_back(self) -> None:
        """Forget what this controller finished after the last checkpoint: it is done again."""
        self._finished_here = -1

    def lost_hosts(self) -> HostsChanged | None:
        """Asks every host; what to raise where some are lost."""
        lost = self._cluster.lost()
        if not lost or self.stop_requested.is_set():
            return None
        return HostsChanged(lost, self.next_iteration())

    def check_growth(self) -> None:
        """Raise `HostsChanged` when the run can have a further host, and all it did is saved."""
        if not self._cluster.can_grow():
            return
        iteration = self.next_iteration()
        if resume_point(self.run).iteration == iteration:
            raise HostsChanged("a further host has joined", iteration)

    def grows_after(self, iteration: int) -> bool:
        """Tell whether the run can have a further host, and this iteration ends with a checkpoint,
        after which that may join."""
        saved = (iteration + 1) % self.config.checkpoint.every == 0
        return saved and self._cluster.can_grow()

    def release_weights(self, iteration: int) -> None:
        """Delete the published weights that no rollout after this iteration plays, and no engine
        of a stream loads, once it has published its own."""
        versions = self.run.versions
        oldest, newest = versions.played(iteration + 1), versions.update(iteration).made
        oldest = self.stream.oldest(oldest)
        kept = kept_weights(versions.publications(), oldest, newest)
        files = [file["path"] for each in kept for file in each.outputs["weights"]["files"]]
        self.run.stores.release_others("*.safetensors", {Path(path).name for path in files})

    def interrupt(self) -> None:
        """Stop every worker group now, from any thread; calls under way raise."""
        self.groups.interrupt()

    def close(self, status: Status = "FINISHED") -> None:
        """Stop the workers, flush the tracker, unlock the run. Never raises for a tracker."""
        self._status = status
        # Nobody is to find what is about to end.
        self._registered.close()
        with self._held:
            self._held.callback(self.episodes.settle)
            self._held.callback(self.groups.close)
            self.stream.close()
        for text in self.run.redaction.told():
            logger.warning("%s", text)


def open_controller(
    config: RunConfig, track: MakeTracker, listener: Progress = quiet, here: bool = False
) -> RunController:
    """Open the run of this configuration and register its controller in this process.

    here: all worker groups are in this process, for a debugger. Nothing is written before what can
    be checked without it was.
    """
    try:
        controller = _opened(config, listener, here)
    except ConnectionError as error:
        remedy = "see whether it runs, and start again"
        raise ConfigError(f"a host was lost at the start: {error}", remedy=remedy) from error
    try:
        controller.prepare(track)
    except BaseException as error:
        close_controller(controller, error)
        raise
    return controller


def _opened(config: RunConfig, listener: Progress, here: bool) -> RunController:
    with ExitStack() as opened:
        cluster = opened.enter_context(closing(open_cluster(config)))
        with held_ancestor(config) as ancestor, held_teachers(config) as teachers:
            found = preflight(config, cluster, ancestor, teachers)
            found.precision.tell(lambda text: listener("precision", 0, {"chosen": text}))
            complete_return(Path(config.runs_directory) / config.name)
            take_newest_whole(Path(config.runs_directory) / config.name)
            found.policy.tell(lambda text: listener("select", 0, {"chosen": text}))
            run = opened.enter_context(closing(RunDirectory.open(found.policy.config)))
            keep_ancestor(run, ancestor)
            keep_adapter(run)
            keep_teachers(run, teachers)
        found.precision.keep(run)
        found.policy.keep(run)
        sweep_unneeded(Path(config.dispatch.directory), config.dispatch)
        controller = RunController(run, cluster, found, listener, here)
        opened.pop_all()
    return controller


def close_controller(controller: RunController, failure: BaseException | None = None) -> None:
    """Close and forget a controller; the tracker is told how it ended."""
    event, status = _ending(controller, failure)
    controller.run.note(controller.next_iteration(), "run", event)
    controller.close(status)


def _ending(controller: RunController, failure: BaseException | None) -> tuple[str, Status]:
    if controller.stop_requested.is_set():
        return "interrupted", "KILLED"
    if isinstance(failure, HostsChanged | BranchBegun):
        return f"opened again: {failure}", "KILLED"
    return ("ended", "FINISHED") if failure is None else ("failed", "FAILED")


def find_controller(run_directory: str | Path) -> RunController | None:
    """Return this process's open controller on the run, if any."""
    found = find(str(Path(run_directory).resolve()))
    return found if isinstance(found, RunController) else None


def controller_of(run_directory: str | Path) -> RunController:
    """Return this process's open controller on the run."""
    controller = find_controller(run_directory)
    if controller is None:
        raise RuntimeError(
            f"no controller on {run_directory} is open in this process: stages run inside the "
            "`iteration` or `train` flow, not by themselves"
        )
    return controller
