"""A session: one live controller's hold on a run: its directory, worker groups and tracker.

Prefect tasks get small JSON references only; what lives across them (worker processes, the
tracker's queue) is looked up here by run directory.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from earl_core.cluster.local import LocalWorkerGroup
from earl_core.config import ConfigError, RunConfig
from earl_core.config.layout import check_layout
from earl_core.dispatch import PoolFull
from earl_core.memory_release import give_back_free_memory
from earl_core.run import RunDirectory
from earl_core.run.recovery import take_newest_whole
from earl_core.run.shards import sweep_unneeded
from earl_core.selector import Hardware, ModelShape, StageDeployment
from tasks.ahead import start_as_before
from tasks.groups import Progress, WorkerGroups
from tasks.hardware import read_hardware, read_model_shape
from tasks.observed import LearntProfile, Observed
from tasks.preparing import check_start, surely
from tasks.tracking import Status, Tracker


class StateLost(RuntimeError):
    """The live training state is not the one this iteration starts from."""


class Session:
    """Opened by `open_session`; close it to stop the workers and unlock the run."""

    def __init__(self, run: RunDirectory, listener: Progress | None = None) -> None:
        self.run = run
        self.config: RunConfig = run.config
        self.listener: Progress = listener or (lambda stage, iteration, progress: None)
        self._finished_here = -1
        self.losses: Counter[int] = Counter()
        self.single_iteration = False
        self.observed = Observed(run)
        self.profile: LearntProfile | None = None
        self._learner: tuple[LocalWorkerGroup | None, int] = None, 0
        self.hardware: Hardware = read_hardware()
        self.groups = WorkerGroups(run, self.hardware, self.listener, self.next_iteration)
        self.stop_requested = self.groups.stop_requested
        # Whoever handles a signal finds it while its first workers start, too.
        _sessions[_name(run.path)] = self
        self._prepare_model()
        self.model: ModelShape = read_model_shape(Path(self.config.model.path))
        check_layout(self.config, self.model, self.hardware)
        self._check_shared_memory()
        start_as_before(self.groups, run, self.next_iteration())
        run.store_config()
        self.tracker = Tracker(run, self.hardware)

    def _prepare_model(self) -> None:
        path = Path(self.config.model.path)
        if not (path / "config.json").is_file():
            what = "downloading" if self.config.model.from_hub else "building"
            self.listener("model", 0, {what: str(path)})
            deployment = StageDeployment(stage="model", threads=self.hardware.cpu_cores)
            surely(
                lambda: self.groups.call(deployment, "model", "build", self.next_iteration()),
                self.config.deadlines.repeats,
                self.stop_requested.is_set,
            )
            self.groups.retire("model", 0)

    def _check_shared_memory(self) -> None:
        """Two versions of the weights lie in shared memory while one replaces the other."""
        files = Path(self.config.model.path).glob("*.safetensors")
        needed = 2 * sum(file.stat().st_size for file in files)
        try:
            self.run.store.reserve(needed)
        except PoolFull as error:
            raise ConfigError(f"two versions of the model's weights must fit: {error}") from error

    def next_iteration(self) -> int:
        """The iteration after the last one finished here, or covered by a checkpoint."""
        return max(self._finished_here, self.run.last_stable()) + 1

    def finish_iteration(self, iteration: int) -> None:
        """Remember that this session finished an iteration, with or without a checkpoint."""
        self._finished_here = iteration
        # Else the controller's memory grows by what each iteration's records took for a moment.
        give_back_free_memory()

    def go_back(self) -> None:
        """Forget what this session finished after the last checkpoint: it is done again."""
        self._finished_here = -1

    @property
    def live_version(self) -> int | None:
        """Policy version that the live learner holds; None when there is none."""
        group, version = self._learner
        return version if group is not None and group is self.groups.live("update") else None

    @live_version.setter
    def live_version(self, version: int) -> None:
        self._learner = self.groups.live("update"), version

    def interrupt(self) -> None:
        """Stop every worker group now, from any thread; calls under way raise."""
        self.groups.interrupt()

    def close(self, status: Status = "FINISHED") -> None:
        """Stop the workers, flush the tracker, unlock the run. Never raises for a tracker."""
        try:
            groups = getattr(self, "groups", None)
            if groups is not None:
                groups.close()
        finally:
            tracker = getattr(self, "tracker", None)
            if tracker is not None:
                tracker.close(status)
            self.run.close()


_sessions: dict[str, Session] = {}


def open_session(config: RunConfig, listener: Progress | None = None) -> Session:
    """Open the run of this configuration and register its session in this process.

    Nothing is written before what can be checked without it was.
    """
    check_start(config)
    take_newest_whole(Path(config.runs_directory) / config.name)
    run = RunDirectory.open(config)
    sweep_unneeded(Path(config.dispatch.directory), config.dispatch)
    session = Session.__new__(Session)
    try:
        session.__init__(run, listener)  # type: ignore[misc]
    except BaseException:
        close_session(session, failed=True)
        raise
    return session


def close_session(session: Session, failed: bool = False) -> None:
    """Close and forget a session; the tracker is told how it ended."""
    _sessions.pop(_name(session.run.path), None)
    # One that could not be opened may not have come that far.
    stop_requested = getattr(session, "stop_requested", None)
    interrupted = stop_requested is not None and stop_requested.is_set()
    event = "interrupted" if interrupted else "failed" if failed else "ended"
    session.run.note(session.next_iteration(), "run", event)
    session.close("KILLED" if interrupted else "FAILED" if failed else "FINISHED")


def find_session(run_directory: str | Path) -> Session | None:
    """This process's open session on the run, if any."""
    return _sessions.get(_name(run_directory))


def open_sessions() -> list[Session]:
    """Every open session of this process, for whoever handles a signal."""
    return list(_sessions.values())


def get_session(run_directory: str | Path) -> Session:
    """This process's open session on the run."""
    session = find_session(run_directory)
    if session is None:
        raise RuntimeError(
            f"no session on {run_directory} is open in this process: stages run inside the "
            "`iteration` or `train` flow, not by themselves"
        )
    return session


def _name(path: str | Path) -> str:
    return str(Path(path).resolve())
