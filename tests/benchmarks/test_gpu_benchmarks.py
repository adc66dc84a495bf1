"""The GPU benchmarks where only the packages of a bare GPU machine are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.selector_live_table import LiveTable

ROOT = Path(__file__).resolve().parents[2]

THERE = (
    "torch", "transformers", "accelerate", "pyarrow", "numpy", "psutil", "pydantic", "xxhash",
)  # fmt: skip
"""And what these require."""

BARE = """
import importlib, json, runpy, sys
from importlib.machinery import PathFinder

refused = set(json.loads(sys.argv.pop(1)))

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in refused else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
for name in json.loads(sys.argv.pop(1)):
    importlib.import_module(name)
runpy.run_module("benchmarks.gpu.selector_single", run_name="__main__", alter_sys=True)
"""


def refused() -> list[str]:
    """Top-level modules that are installed here for something else."""
    there: set[str] = set()
    asked = list(THERE)
    while asked:
        name = canonicalize_name(asked.pop())
        if name not in there:
            there.add(name)
            needs = map(Requirement, distribution(name).requires or ())
            asked += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return [
        module
        for module, owners in packages_distributions().items()
        if not there & set(map(canonicalize_name, owners))
        and module not in ("benchmarks", "earl_core")
    ]


@pytest.mark.campaign
def test_they_load_and_the_selectors_runs_and_saves(tmp_path: Path) -> None:
    names = [f"benchmarks.gpu.{each.stem}" for each in (ROOT / "benchmarks/gpu").glob("[a-z]*.py")]
    assert {"prefect", "mlflow"} <= set(refused())
    files = {name: tmp_path / f"{name}.json" for name in ("raw", "json")}
    asked = [f"--{name}={file}" for name, file in files.items()]
    # No second is left: each context still has both sets.
    asked += ["--smoke", "--repetitions=3", "--seconds=0"]
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(refused()), json.dumps(names), *asked],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stage update, layout" in done.stdout
    written = json.loads(files["json"].read_text())
    assert written["headline"]["live_tokens_out_of_memory"] == 0
    assert all(len(cell.a) == len(cell.b) == 1 for cell in LiveTable.read(files["raw"]).cells)
