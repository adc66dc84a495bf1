"""What a run does where the guard has decided that it is not to go on as it is.

The decision is sealed with an iteration's advantages, so it is found again however often the run is
opened before it was followed. A return is written into `run.json` while the run is open; it is done
by whoever opens the run next (`run.recovery.complete_return`), for workers and lock must be gone.
"""

from __future__ import annotations

import hashlib
import shlex

from earl_core.control.run_controller import RunController
from earl_core.dispatch import Manifest
from earl_core.guard.decision import Decision, decision_of
from earl_core.run import RunDirectory
from earl_core.run.branches import BRANCHES, Branch
from earl_core.run.record import settings_of
from earl_core.run.recovery import INITIAL, newest_whole, next_place
from earl_core.secrets import redact
from earl_core.system import fault_points
from earl_core.system.errors import EarlError
from earl_core.system.files import canonical_json

STOPPED = "stopped"
"""In run.json: the decision by which the guard has stopped the run last, and the settings then."""


class GoesBack(EarlError):
    """The iteration ends without an update, because the run goes back. decision: by which."""

    def __init__(self, iteration: int, decision: Decision) -> None:
        super().__init__(
            f"iteration {iteration} ends without an update, because the guard has the run go back: "
            f"{_found(decision)}. Open it again (earl resume), and it does"
        )
        self.iteration, self.decision = iteration, decision


class GuardStops(EarlError):
    """The guard has stopped the run."""


def heed(run: RunDirectory, advantage: Manifest) -> None:
    """Raise `GoesBack` or `GuardStops` where the decision that was sealed with these advantages
    says so. A stop that was told already counts until settings change."""
    decision, iteration = decision_of(advantage), advantage.iteration
    if decision.back_to is not None:
        raise GoesBack(iteration, decision)
    if not decision.stop:
        return
    settings = hashlib.sha256(canonical_json(settings_of(run.config))).hexdigest()
    told = run.record.get(STOPPED, {})
    if told.get("decision") == advantage.digest and told.get("settings") != settings:
        run.note(iteration, "advantage", "goes on after the guard's stop: settings have changed")
        return
    run.update_record(**{STOPPED: {"decision": advantage.digest, "settings": settings}})
    name = shlex.quote(str(run.path))
    raise GuardStops(
        f"the guard stops the run after the advantages of iteration {iteration}, before its "
        f"update: {decision.stop}",
        remedy="all that is sealed stays. Change what is wrong in the run file and go on with "
        f"`earl resume {name}`, from an earlier checkpoint with `--from N`; or go on as it is with "
        f"`earl resume {name} --set guard=warn`",
    )


def begin_return(controller: RunController, told: GoesBack) -> Branch:
    """Write down that the run goes back: to the newest whole checkpoint up to the one that was
    decided, which need not be there, or to the initial model. Raises `CheckpointError`."""
    run, decision = controller.run, told.decision
    assert decision.back_to is not None
    stable = [each for each in run.stable_iterations() if each <= decision.back_to]
    after = newest_whole(run.path, stable)[0] if stable else INITIAL
    where = f"after iteration {after}" if after >= 0 else "with the initial model"
    text = f"iteration {told.iteration}: {_found(decision)}; goes on {where}"
    if after != decision.back_to:
        text += f", because no checkpoint of iteration {decision.back_to} is there"
    branches = run.branches.further(
        after=after,
        from_iteration=told.iteration,
        kinds=[each.kind for each in decision.findings],
        text=redact(text),
        left_out=decision.left_out,
        set_aside=next_place(run.path),
    )
    run.update_record(**{BRANCHES: branches.dump()})
    branch = branches.opened[-1]
    run.note(told.iteration, "advantage", f"begins branch {branch.number}: {text}")
    fault_points.point("return.noted", told.iteration)
    return branch


def _found(decision: Decision) -> str:
    said = " ".join(f"{each.text.rstrip('.')} ({each.kind})." for each in decision.findings)
    return said.rstrip(".") or "no finding is named"
