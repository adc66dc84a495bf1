"""Running out of memory in a microbatch is one error, whichever allocator refused."""

from __future__ import annotations

import psutil
import pytest
import torch

from earl_core.learner import memory
from earl_core.system.memory import OutOfMemory, give_back_free_memory, give_back_pages
from earl_core.tensors.device_copies import host_memory


def refuse_on_the_cpu() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def refuse_in_python() -> None:
    bytearray(2**60)


def refuse_on_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")


@pytest.mark.parametrize(
    ("refuse", "asked"),
    [
        (refuse_on_the_cpu, 2**50),
        (refuse_in_python, None),
        (refuse_on_cuda, 3 * 2**29),
    ],
)
def test_every_allocators_refusal_names_the_microbatch(refuse: object, asked: int | None) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"microbatch 3 of 5 of 'update', 1,024 tok") as got,
        memory.microbatch("update", 0, 3, 5, 1024),
    ):
        refuse()  # type: ignore[operator]
    assert got.value.payload == {
        "stage": "update",
        "microbatch": 3,
        "microbatches": 5,
        "tokens": 1024,
        "bytes_asked": asked,
    }


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="inconsistent"), memory.microbatch("update", 0, 1, 1, 1):
        torch.ones(2) @ torch.ones(3)
    with pytest.raises(ValueError, match="other"), memory.microbatch("update", 0, 1, 1, 1):
        raise ValueError("other")


def test_the_fault_point_is_one_of_these_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EARL_FAULT", "update.microbatch3@7:1=memory")
    monkeypatch.setenv("RANK", "1")
    with memory.microbatch("update", 7, 2, 5, 10), memory.microbatch("update", 6, 3, 5, 10):
        pass
    with pytest.raises(OutOfMemory) as caught, memory.microbatch("update", 7, 3, 5, 10):
        pass
    assert caught.value.payload["bytes_asked"] == 2**40
    monkeypatch.setenv("RANK", "0")
    with memory.microbatch("update", 7, 3, 5, 10):
        pass


def test_what_serves_a_stage_fails_as_that_stage() -> None:
    """`score` serves the reference, or the update before its first step; the rest has no name."""
    with pytest.raises(OutOfMemory) as scored, memory.guarded("reference"):  # noqa: SIM117
        with memory.microbatch("score", -1, 2, 3, 64):
            refuse_on_the_cpu()
    assert scored.value.payload == {
        "stage": "reference",
        "microbatch": 2,
        "microbatches": 3,
        "tokens": 64,
        "bytes_asked": 2**50,
    }

    @memory.guarded("publish")
    def publish() -> None:
        refuse_in_python()

    for _ in range(2):
        with pytest.raises(OutOfMemory, match="'publish', outside of its micro") as caught:
            publish()
        assert caught.value.payload == {"stage": "publish", "bytes_asked": None}
    with pytest.raises(ValueError, match="other"), memory.guarded("update"):
        raise ValueError("other")


def test_free_memory_goes_back_to_the_host() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    # Pieces too small for mappings of their own, with one in use behind them.
    blocks = [bytearray(2**16) for _ in range(2**11)]
    kept = bytearray(2**16)
    full = resident()
    blocks.clear()
    give_back_free_memory()
    assert full - resident() > 100 * 2**20
    assert len(kept) == 2**16


def test_pages_that_are_given_back_read_zeros() -> None:
    tensor = torch.ones(2**25)
    full, size = psutil.Process().memory_info().rss, tensor.nbytes - 1000
    given = give_back_pages(tensor.data_ptr() + 500, size)
    assert size - 2 * 4096 < given <= size
    assert full - psutil.Process().memory_info().rss > 0.9 * given
    assert tensor[:100].min() == tensor[-100:].min() == 1
    assert tensor[2**12 : -(2**12)].max() == 0
    tensor[2**20] = 3.0
    assert tensor.sum() > 3.0


def test_parked_tensors_come_back_as_they_were_and_shared_ones_stay_shared() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    views = [whole[1], whole.t()]
    alone = torch.full((5,), 2.0, dtype=torch.bfloat16)
    expected = [tensor.clone() for tensor in (whole, *views, alone)]
    assert memory.Parking().give([whole, *views, alone]) == 0  # there is nothing on a CUDA device
    parking = memory.Parking("cpu")
    assert parking.give([whole, *views, alone]) == 12 * 4 + 5 * 2
    assert whole.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
    parking.take()
    parking.take()
    for tensor, wanted in zip((whole, *views, alone), expected, strict=True):
        assert torch.equal(tensor, wanted)
    whole[1, 2] = 99.0
    assert views[0][2] == views[1][2, 1] == 99.0


def test_parking_keeps_its_host_memory_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than one host memory, and several in one, as often as they are handed over."""
    monkeypatch.setattr(memory, "_PARKED_BYTES", 64)
    made: list[torch.Tensor] = []

    def counted(size: int, device: torch.device) -> torch.Tensor:
        made.append(host_memory(size, device))
        return made[-1]

    def refused(size: int, device: torch.device) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(memory, "host_memory", counted)
    tensors = [torch.empty(count) for count in (1, 40, 3, 17, 16)]
    parking = memory.Parking("cpu")
    for number in range(3):
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
        expected = [tensor.clone() for tensor in tensors]
        assert parking.give(tensors[:2]) == 4 * 41
        assert parking.give(tensors) == 4 * 77
        assert parking.kept_bytes == 64 * 5
        parking.take()
        parking.take()
        assert all(map(torch.equal, tensors, expected)), number
    assert len(made) == 5
    # A rank that holds less after its mesh has changed keeps no more than that.
    assert parking.give(tensors[:1]) == 4
    parking.take()
    assert parking.kept_bytes == 64
    # What found no host memory is where it was, and stays there.
    expected = [tensor.clone() for tensor in tensors]
    monkeypatch.setattr(memory, "host_memory", refused)
    with pytest.raises(MemoryError):
        parking.give(tensors)
    parking.take()
    assert all(map(torch.equal, tensors, expected))
