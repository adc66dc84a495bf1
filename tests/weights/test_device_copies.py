"""Copies between a device and the host, with host tensors for the device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from earl_core.tensors import device_copies, joint_file
from earl_core.tensors.device_copies import Download, bytes_on_host, upload
from earl_core.tensors.hashing import TensorHashes, tensor_hash
from earl_core.weights.publish import publish


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "BUCKET_BYTES", 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300,), (40, 9), (2, 500), (5, 3, 70)])
def test_a_download_is_the_tensor_in_another_dtype(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = torch.randn(shape)
    target, other = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    download = Download()
    download.copy(target, source)
    download.so_far()()
    assert torch.equal(target, source.to(dtype))
    download.copy(other, source)
    download.finish()
    assert torch.equal(other, source.to(dtype))


def test_what_is_no_range_of_the_file_arrives_too_and_nothing_beside_it() -> None:
    """A part that tensor parallelism has cut along the second dimension."""
    whole, source = torch.full((60, 90), 7.0, dtype=torch.bfloat16), torch.randn(60, 30)
    download = Download()
    download.copy(whole[:, 30:60], source)
    download.finish()
    assert torch.equal(whole[:, 30:60], source.to(torch.bfloat16))
    assert (whole[:, :30] == 7).all()
    assert (whole[:, 60:] == 7).all()


def test_an_upload_converts() -> None:
    sources = [torch.randn(9, 5, dtype=torch.bfloat16), torch.randn(4)]
    targets = [torch.empty(9, 5), torch.empty(4)]
    upload(zip(targets, sources, strict=True))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.float())


@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_a_devices_bytes_are_hashed_as_the_hosts_are(size: int) -> None:
    tensor = torch.randn(size)
    state = xxhash.xxh3_128()
    for piece in bytes_on_host(tensor):
        assert piece.numel() <= 256
        state.update(piece.numpy().data)
    assert state.hexdigest() == tensor_hash(tensor)
    assert tensor_hash(tensor) == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())


@pytest.mark.parametrize("threads", [1, 8])
def test_a_publication_by_a_device_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Each tensor is hashed, once, when it is there, whatever computes meanwhile."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n}": torch.randn(n, 70, generator=generator) for n in range(1, 12)}
    weights |= {"none": torch.empty(0), "count": torch.tensor(3)}
    alone = publish(weights, tmp_path / "host", 1, "bfloat16")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(joint_file, "on_host", lambda tensor: False)
    waited: list[str] = []
    start = TensorHashes.start

    def counted(self: TensorHashes, name: str, tensor: torch.Tensor, ready: Any = None) -> None:
        if ready is not None:
            waited.append(name)
        start(self, name, tensor, ready)

    monkeypatch.setattr(TensorHashes, "start", counted)
    there = publish(weights, tmp_path / "device", 1, "bfloat16")
    assert there.digest == alone.digest
    assert sorted(waited) == sorted(weights.keys() - {"none"})
    assert Path(there.files[0].path).read_bytes() == Path(alone.files[0].path).read_bytes()


@pytest.mark.parametrize("threads", [1, 8])
def test_a_tensor_is_hashed_once_it_is_ready(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    late, early = torch.zeros(500), torch.ones(3)
    with TensorHashes() as hashes:
        hashes.start("late", late, lambda: late.copy_(torch.arange(500.0)))
        hashes.start("early", early)
        assert "late" in hashes
        found = hashes.results()
    assert found == {"late": tensor_hash(torch.arange(500.0)), "early": tensor_hash(early)}
