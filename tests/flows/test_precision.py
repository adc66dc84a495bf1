"""`auto` in whole runs: on this machine as it is, and in runs that began on others."""

from __future__ import annotations

import yaml

from earl_core.run.record import read_record
from earl_core.system.hardware import bf16_instructions
from tests.flows.runs import Runs

AUTO = ["rollout.dtype=auto", "update.precision=auto", "iterations=1"]
BF16 = ["rollout.dtype=bfloat16", "update.precision=bf16", "iterations=1"]


def test_auto_is_decided_once_and_kept(runs: Runs) -> None:
    """One run begins with `auto`; one that began in bf16, as every run did once, goes on with it in
    the middle of an iteration."""
    old = ["name=old", *BF16]
    endings = runs.train_here(
        {"overrides": ["name=new", *AUTO], "fault": "rollout.after@0=raise"},
        {"overrides": old, "fault": "reward.after@0=raise"},
        {"overrides": ["name=old", *AUTO]},
    )
    assert ["injected failure" in str(each) for each in endings] == [True, True, False]
    assert endings[2] is None
    began = read_record(runs.run("new"))["precision"]
    if bf16_instructions():
        assert (began["auto"], began["bf16_factor"]) == ("bf16", 0.0)
    else:
        assert (began["auto"] == "fp32") == (began["bf16_factor"] > 1)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[began["auto"]]
    for name, engine, trainer in (("new", dtype, began["auto"]), ("old", "bfloat16", "bf16")):
        written = yaml.safe_load((runs.run(name) / "config.yaml").read_text())
        assert (written["rollout"]["dtype"], written["update"]["precision"]) == (engine, trainer)
        assert read_record(runs.run(name))["settings"]["rollout"]["dtype"] == engine
    # Nothing that was sealed in bf16 was done again, and nothing was mixed with it.
    sealed = runs.executed("sealed", "old")
    assert sorted(sealed) == sorted(set(sealed))
    said = runs.output_path(0).read_text()
    assert f"rollout.dtype {dtype}, update.precision {began['auto']}: " in said
    assert "rollout.dtype bfloat16, update.precision bf16: as the run began" in said
    if began["auto"] == "fp32":
        assert f"{began['bf16_factor']:.3g}"[:3] in began["why"]
        assert "are bf16, which is slow here: bf16 products take" in said
