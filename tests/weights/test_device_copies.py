"""Copies between a device and the host, with host tensors for the device's."""

from __future__ import annotations

import pytest
import torch
import xxhash

from earl_core.tensors import device_copies
from earl_core.tensors.device_copies import Download, bytes_on_host, upload
from earl_core.tensors.hashing import tensor_hash


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
