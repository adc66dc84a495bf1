"""Settings of all tests and of their process, the order of files, and what is left to no other."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from earl_core.secrets import redactor
from tests.shared import made_once, sweep_memory

if TYPE_CHECKING:
    from tests.learner.slice_results import Slices

# The first tensor operation of a process may take longer than Hypothesis's deadline of 200 ms. Each
# session draws other examples, so that half of its usual hundred will do.
settings.register_profile("ours", deadline=None, max_examples=50)
settings.load_profile("ours")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of `make test-gpu`, and from what they start: on a machine
    that has some, the others test the same as anywhere."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        sweep_memory()
    # Prefect's own temporary server wants no password and outlives a killed test.
    os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "false"
    # Threads that spin while they wait take the cores from those they wait for: all tests and what
    # they start have two cores, and spinning was up to half of the CPU time.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # Else each process that a test starts compiles all of our modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if config.option.markexpr == "gpu":
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with suppress(PackageNotFoundError):
        version("vllm")
        # The build for GPUs starts no engine without one: as if it were not installed.
        sys.modules["vllm"] = None  # type: ignore[assignment]


_LONGEST = (
    # Slow tests.
    *("browser/test_browser", "flows/test_vllm_layouts", "hosts/test_two_hosts"),
    *("learner/test_low_rank", "flows/test_prefect", "learner/test_worker_faults"),
    *("flows/test_gyms", "flows/test_verifiers", "flows/test_divided", "flows/test_adapters"),
    *("flows/test_verifiers_classic", "frameworks/test_frameworks", "cli/test_up"),
    *("flows/test_api", "learner/test_compiled_layers", "examples/test_examples"),
    *("flows/test_openenv", "flows/test_mixture", "docs/test_tested_pages"),
    # Fast ones, and files with both.
    *("cli/test_training", "flows/test_overlap", "flows/test_stream", "flows/test_alike_groups"),
    *("flows/test_power_loss", "flows/test_rank_faults", "flows/test_selector_runs"),
    *("flows/test_warm_start", "flows/test_resume", "flows/test_layouts"),
    *("flows/test_imitation", "environments/test_tools", "engines/test_memory_watch"),
    *("engines/test_vllm_engine", "engines/test_contract", "learner/test_memory_formula"),
    *("tracking/test_server", "rollout/test_request_fields", "learner/test_mesh_equality"),
    *("durability/test_crashes", "flows/test_episodes", "flows/test_replicas"),
)
"""Files of tests/ that take longest; begun last, one would leave the other worker without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    place = {f"tests/{name}.py": number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.location[0], len(place)))


def pytest_collection_finish() -> None:
    """A collection of garbage passes over what the imports of all files have made: objects whose
    visit took 0.4 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def safe_path_stays_with_the_engine() -> Iterator[None]:
    """A vLLM engine sets PYTHONSAFEPATH in its process, here that of all tests: programs which
    others start would not find the modules of the working directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    yield
    if before is None:
        os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(autouse=True, scope="module")
def own_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No module finds the services of people or of other modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def own_secrets() -> Iterator[None]:
    """What a module hides in its process, those after it show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redactor, "_known", redactor._known)
        patch.setattr(redactor, "_rules", dict(redactor._rules))
        yield
    redactor._changed.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For products that are too small to share."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server in this process."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model of a few thousand parameters, built in a process of its own.

    It knows what a move looks like, not which are legal: the returns of its episodes differ.
    """
    script = (
        "import pathlib, sys\n"
        "from earl_core.models.tiny import build\n"
        "build(pathlib.Path(sys.argv[1]), environments=[{'name': 'tic_tac_toe', "
        "'options': {'style': 'compact'}}], hidden=32, layers=2, warm_start_steps=20, "
        "warm_start_learning_rate=1e-2)\n"
    )

    def build(place: Path) -> None:
        command = [sys.executable, "-c", script, str(place / "tiny")]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])

    return made_once(tmp_path_factory, "models", build) / "tiny"


@pytest.fixture(scope="session")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Slices:
    """Weights and state that ranks have cut."""
    from tests.learner.slice_results import Slices

    return Slices(tmp_path_factory)
