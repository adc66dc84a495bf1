"""The devices of these tests: the CPU in `make test`, one NVIDIA GPU in `make test-gpu`.

What is tested is the same on both, so that a test which never met a GPU is known to work. Where a
GPU must be seen, torch must see it, too: else the learner under test would work on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """What is computed on the CPU is small: a second thread would only wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that a learner made now works on."""
    there = torch.cuda.is_available()
    if request.param == "cuda" and not there:
        pytest.skip("torch sees no GPU")
    if request.param == "cpu" and there:
        pytest.skip("a GPU is not hidden: the learner would not work on the CPU")
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, of a test that has no meaning without one."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda")
