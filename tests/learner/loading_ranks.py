"""What `test_loading` does in ranks: load a model, and say what that took."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from earl_core.config.model import ModelConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.learner.loading import load_policy
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.parallel_model import ParallelModel
from earl_core.selector.model.catalogue import MODELS
from earl_core.tensors.safetensors_layout import plan_layout
from earl_core.tensors.slices import local_box, local_part
from earl_core.weights.load import parameters_of
from tests.learner.cuts import mesh_of
from tools.shapes import Shape

PRIME = 1021

FILE_ELEMENTS = 2**31
"""Of one file, as Hugging Face splits models; Linux maps no file that is larger than the memory."""


def write_model(directory: Path, shape: ModelShape, numbered: bool) -> None:
    """A bf16 Llama. numbered: each element says where it stands, modulo `PRIME`; else the files
    are holes, which read as zeros and take no room."""
    directory.mkdir()
    llama = replace(Shape.of("", shape), kind="llama", tied=False)
    config = llama.config(shape.max_positions)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, parameter in parameters_of(directory).items():
        if sum(each.numel() for each in files[-1].values()) + parameter.numel() > FILE_ELEMENTS:
            files.append({})
        files[-1][name] = parameter
    names = [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        _write_file(directory / name, tensors, numbered)
    index = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], numbered: bool) -> None:
    layout = plan_layout(
        {name: (torch.bfloat16, tuple(each.shape)) for name, each in tensors.items()},
        {"format": "pt"},
    )
    with path.open("wb") as file:
        file.write(layout.prefix)
        file.truncate(layout.total_bytes)
        for name, place in layout.places.items() if numbered else ():
            file.seek(place.start)
            values = expected(torch.arange(tensors[name].numel()))
            file.write(values.view(torch.uint8).numpy().tobytes())


def expected(places: torch.Tensor) -> torch.Tensor:
    """What stands at these places of a numbered tensor, bf16."""
    return places.remainder(PRIME).to(torch.bfloat16)


class Anonymous:
    """The most anonymous memory of this process inside the context, beyond that before, bytes:
    what a look every few milliseconds sees. Pages of mapped files, which the kernel may drop, are
    not in it.
    """

    def __enter__(self) -> Anonymous:
        gc.collect()
        self._before = self.most = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        self.most -= self._before

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def took(parallel: ParallelModel, memory: Anonymous) -> dict[str, Any]:
    """Bytes of the parts, and of memory at the peak."""
    return {
        "parts": sum(local_part(each).nbytes for each in parallel.model.parameters()),
        "anonymous": memory.most,
    }


def load_sharded(scratch: Path) -> dict[str, Any]:
    """Load a rank's parts, check some of them, and say what it took."""
    torch.set_num_threads(1)
    mesh = create_mesh(mesh_of(1, int(os.environ["WORLD_SIZE"]), 1, 1))
    with Anonymous() as memory:
        parallel = load_policy(ModelConfig(path=str(scratch.parent / "model")), mesh, mixed=True)
    found = took(parallel, memory)
    for parameter in parallel.model.parameters():
        box, part = local_box(parameter), local_part(parameter)
        width = parameter.numel() // parameter.shape[0]
        first = box.offset[0] * width
        assert part.dtype == torch.float32
        assert torch.equal(
            part.view(-1), expected(torch.arange(first, first + part.numel())).float()
        )
    rotary = parallel.model.model.rotary_emb.inv_freq
    assert float(rotary[0]) == 1.0
    assert 0 < float(rotary[-1]) < 1e-3
    mesh.close()
    return found


def load_the_largest(scratch: Path) -> dict[str, Any]:
    """Rank 77 of 128 that are not there loads its part of a model of 72 B parameters."""
    torch.set_num_threads(1)
    write_model(scratch / "model", MODELS["qwen2.5-72b"], numbered=False)
    dist.init_process_group("fake", rank=77, world_size=128)
    mesh = UpdateMesh(mesh_of(1, 128, 1, 1), 77, torch.device("cpu"))
    mesh._connect()
    with Anonymous() as memory:
        parallel = load_policy(ModelConfig(path=str(scratch / "model")), mesh, mixed=True)
    return took(parallel, memory)
