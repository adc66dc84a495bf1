"""`selector.policy: auto`: who lays a run out, and why; kept from its begin on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earl_core.config import RunConfig, load_config, parse_config
from earl_core.control.machine_profile import profile_of
from earl_core.control.selector_policy import Settled, reason_in, settled
from earl_core.deployment.shapes import AdapterShape, Hardware, ModelShape
from earl_core.run import RunDirectory
from earl_core.selector.choice.explain import plan_rows
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, write_table
from tests.config.test_config import with_

CORES = Hardware(cpu_cores=4, memory_bytes=64 * 2**30)
GPUS = cluster("h100-80gb", 1, 8)
MODEL = MODELS["qwen2.5-7b"]
STALE = {"schedule": {"staleness": 1}, "algorithm": {"importance_correction": {}}, "iterations": 4}
EXACT = {"rollout__dtype": "float32", "update": {"precision": "fp32", "threads": 2}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run and no profile of this directory is read."""
    monkeypatch.chdir(tmp_path)


def config(**changes: Any) -> RunConfig:
    return parse_config(with_(**{"rollout__dtype": "bfloat16", **changes}))


def chosen(
    run: RunConfig, hardware: Hardware = GPUS, model: ModelShape | None = MODEL
) -> tuple[str, str]:
    found = settled(run, hardware, model)
    return found.config.selector.policy, found.why


def measured(run: RunConfig, *keys: str) -> Path:
    """A profile of the run's model on these cores; its file."""
    directory, mark, _ = profile_of(run, CORES, MODELS["smollm2-135m"])
    place = {"context": 500.0, "requests": 32.0, "tokens_per_second": 100.0}
    points = tuple(ProfilePoint(key=key, **place) for key in keys)
    return write_table(directory, mark, ProfileTable(points=points))


def test_several_devices_are_laid_out_and_one_is_not() -> None:
    assert chosen(config()) == ("live_tokens", "there are 8 GPUs to lay the stages out on")
    assert chosen(config(), cluster("h100-80gb", 4, 8))[0] == "live_tokens"
    assert chosen(config(), cluster("h100-80gb", 1, 1)) == (
        "fixed",
        "there is one device, and so nothing to choose",
    )
    # A name stays, and nobody says anything of it.
    for policy in ("fixed", "average_context", "live_tokens"):
        assert chosen(config(selector={"policy": policy})) == (policy, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"update": {"deterministic": True}}, "asks for equal bits"),
        ({"rollout__engine": "torch", "rollout__threads": 2, **EXACT}, "is to give equal bits"),
        ({"stages": {"rollout": {"tensor_parallel": 2}}}, "`stages` names the layout"),
        ({"stages": {"update": {"shard": 4}}}, "`stages` names the layout"),
        ({"stages": {"changes": [{"iteration": 1, "update": {}}]}}, "`stages` names the layout"),
        ({"stages": {"placement": "separate"}}, "stages.placement is `separate`"),
    ],
)
def test_what_the_run_file_asks_for_goes_before(changes: dict[str, Any], words: str) -> None:
    policy, why = chosen(config(**changes))
    assert (policy, words in why) == ("fixed", True), why


def test_a_placement_that_can_be_laid_out_is(tmp_path: Path) -> None:
    assert chosen(config(stages={"placement": "colocated"}))[0] == "live_tokens"
    apart = config(stages={"placement": "separate"}, **STALE)
    assert chosen(apart)[0] == "live_tokens"
    assert settled(config(**STALE), GPUS, MODEL).config.divides
    # Bits that depend on the layout are asked for by fp32 with both threads alone.
    loose = {"rollout__engine": "torch", **EXACT}
    assert chosen(config(**loose))[0] == "live_tokens"


def test_what_does_not_fit_is_started_as_configured() -> None:
    policy, why = chosen(config(), cluster("h100-80gb", 1, 2), MODELS["qwen2.5-72b"])
    assert policy == "fixed"
    assert "infeasible: no stage deployment of the" in why
    # Some teachers and adapters are no obstacle.
    pairs = MODEL.with_adapter(AdapterShape(rank=8, targets=("q_proj",)))
    assert chosen(config(), model=pairs)[0] == "live_tokens"
    kl = {"algorithm": {"kl": {"placement": "loss", "coefficient": 0.1}}}
    found = settled(config(**kl), GPUS, MODEL, (MODELS["qwen2.5-14b"],))
    assert found.config.selector.policy == "live_tokens"


def test_cores_are_laid_out_once_engines_on_them_were_measured() -> None:
    run, small = config(), MODELS["smollm2-135m"]
    unknown = ("fixed", "engines on these cores were not measured (earl profile)")
    assert chosen(run, CORES, small) == unknown
    assert chosen(run, CORES, None) == unknown
    one, other = "rollout tp1 1x4threads", "rollout tp1 2x2threads"
    measured(run, one, "update tp1 1x4threads mb1024")
    assert chosen(run, CORES, small) == unknown
    table = measured(run, one, other)
    assert chosen(run, CORES, small) == (
        "live_tokens",
        "there are 4 cores to lay the stages out on",
    )
    threads = "the run file names the threads of engines or ranks"
    assert chosen(config(rollout__threads=2), CORES, small) == ("fixed", threads)
    table.write_bytes(table.read_bytes()[:-9])
    policy, why = chosen(run, CORES, small)
    assert policy == "fixed"
    assert "cannot be read" in why
    # GPUs have data sheets, and a profile that is damaged would end the run's first choice.
    assert chosen(run)[0] == "live_tokens"


def test_a_model_that_is_not_here_yet_is_waited_for() -> None:
    assert chosen(config(), model=None) == ("auto", "")
    one_device = cluster("h100-80gb", 1, 1)
    assert chosen(config(), one_device, None)[0] == "fixed"


def test_a_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    place = [f"runs_directory={tmp_path}", f"dispatch.directory={tmp_path / 'shm'}"]

    def here(*overrides: str) -> RunConfig:
        return load_config("tictactoe_tiny", [*place, *overrides])

    def begun(found: Settled) -> RunDirectory:
        run = RunDirectory.open(found.config)
        found.keep(run)
        run.store_config()
        run.close()
        return run

    def chosen_for(run: RunDirectory) -> None:
        (run.path / "iterations" / "000000").mkdir()
        (run.path / "iterations" / "000000" / "select.json").touch()

    run = begun(settled(here("name=new"), GPUS, MODEL))
    # A start that was refused before anything was chosen binds nobody.
    assert settled(here("name=new"), CORES, MODEL).config.selector.policy == "fixed"
    chosen_for(run)
    assert run.record["selector"]["auto"] == "live_tokens"
    assert reason_in(run) == "auto: there are 8 GPUs to lay the stages out on"
    stored = load_config(tmp_path / "new" / "config.yaml")
    assert stored.selector.policy == "live_tokens"
    # By its own file, and by the one that it began with, on a machine with nothing to choose.
    for given in (stored, here("name=new")):
        assert settled(given, CORES, MODEL).config.selector.policy == "live_tokens"
    told: list[str] = []
    again = settled(here("name=new"), CORES, MODEL)
    again.tell(told.append)
    assert told == ["selector.policy live_tokens: as the run began"]
    again.keep(run)
    assert reason_in(run).startswith("auto: there are 8 GPUs")
    # One that was made before there was `auto`.
    chosen_for(begun(Settled(here("name=old", "selector.policy=fixed"))))
    assert settled(here("name=old"), GPUS, MODEL).config.selector.policy == "fixed"
    # What lays the run out now is not what the selector began with.
    changed = here("name=new", "stages.changes=[{iteration: 3, rollout: {replicas: 1}}]")
    assert settled(changed, GPUS, MODEL).config.selector.policy == "fixed"
    # Another policy by name is a changed setting like others.
    named = here("name=new", "selector.policy=average_context")
    assert settled(named, GPUS, MODEL).config.selector.policy == "average_context"
    run = begun(Settled(named))
    assert reason_in(run) == ""


def test_the_plan_says_why() -> None:
    run = settled(config(), GPUS, MODEL).config
    item = SelectionInput.of(run, GPUS, MODEL)
    assert "policy" not in select(item).reasons
    plan = select(item.model_copy(update={"policy_reason": "auto: so"}))
    assert plan.reasons["policy"] == "auto: so"
    assert plan_rows(plan)[-1] == {
        "stage": "policy", "stage deployment": "live_tokens", "why": "auto: so"
    }  # fmt: skip
    # What is chosen does not depend on who asked for it.
    assert plan.stages == select(item).stages
