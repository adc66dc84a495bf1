"""The model that is trained, and the builder that makes it when it is not there yet."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import ConfigDict, Field, field_validator, model_validator

from earl_core.deployment.shapes import AdapterShape
from earl_core.system.settings import Options, Place, Settings

# `models/` is where recipes and documentation keep directories.
_HUB_NAME = re.compile(r"(?!models/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB = "earl_core.models.hub:build"


class AdapterConfig(Settings):
    """Low-rank pairs that are trained in place of the model's matrices (LoRA, arXiv 2106.09685).

    A matrix `W` [out, in] computes as `W + alpha / rank * B A`, where `A` is [rank, in] and `B`
    [out, rank]; `W` is frozen.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    rank: int = Field(default=16, ge=1, le=512, description="Rows of A, columns of B.")
    alpha: float = Field(
        default=32.0, gt=0, description="The product of the pair is scaled by alpha / rank."
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Matrices that get a pair: ends of their names, such as `q_proj`, or "
        "`all-linear` for those of all decoder layers. The head and the embedding have none.",
    )
    source: Place | None = Field(
        default=None,
        alias="from",
        description="A directory in PEFT's format with the pairs to begin from, of which the run "
        "directory gets a copy; by default A is random and B is 0, which is the model itself.",
    )

    @property
    def shape(self) -> AdapterShape:
        """The numbers that decide memory and work."""
        targets = () if isinstance(self.targets, str) else tuple(self.targets)
        return AdapterShape(rank=self.rank, targets=targets)

    @property
    def source_digest(self) -> str:
        """xxh3_128 over the files in `from`, in hex; empty where there are none."""
        files = sorted(Path(self.source).glob("adapter_*")) if self.source else []
        return _digest_of(tuple((each, each.stat().st_mtime_ns) for each in files))


@cache
def _digest_of(files: tuple[tuple[Path, int], ...]) -> str:
    state = xxhash.xxh3_128()
    for path, _ in files:
        state.update(f"{path.name}|{path.stat().st_size}|".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                state.update(piece)
    return state.hexdigest() if files else ""


class ModelConfig(Settings):
    """The initial policy: any causal language model that transformers loads."""

    model_config = ConfigDict(serialize_by_alias=True)

    path: Place = Field(
        default="",
        description="A Hugging Face model directory (weights, config and tokenizer), relative to "
        "the working directory. Where there is none and no builder, `org/name` names a model of "
        "the hub, downloaded once; ./org/name is always a directory. Needed unless `from` is "
        "given.",
    )
    ancestor: Place | None = Field(
        default=None,
        alias="from",
        description="Weights to begin with in place of those of `path`: a run (its directory, or "
        "its name in runs_directory), a model directory, or `org/name` of the hub. `RUN@12` is the "
        "run's checkpoint of iteration 12, `RUN@best` the one evaluated best, `RUN` the last. The "
        "run directory gets a copy.",
    )
    builder: str | None = Field(
        default=None,
        description="`package.module:function` that makes the model when `path` does not exist; "
        "called as function(directory, **builder_options) in a worker process. One that has a "
        "parameter `environments` gets those of the run, as a list of their settings.",
    )
    builder_options: Options = Field(
        default_factory=dict,
        description="Keyword arguments of the builder; references (env:NAME, file:PATH) are "
        "replaced. By default none.",
    )
    chat_template: str | None = Field(
        default=None, description="A Jinja file that replaces the tokenizer's chat template."
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="Train low-rank pairs beside a frozen model; by default none."
    )
    float32_head: bool = Field(
        default=False,
        description="Compute the logits in float32 in engine, trainer and reference while the "
        "rest computes in bf16; no effect where all of it is float32.",
    )
    freeze_routers: bool = Field(
        default=False,
        description="Keep the routers of a mixture of experts as they are: they get no gradient "
        "and no optimizer state, and everything else is trained.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model directory."
    )

    @model_validator(mode="after")
    def _somewhere(self) -> ModelConfig:
        if not self.path and self.ancestor is None:
            raise ValueError(
                "path is missing: name a model directory, or a run to begin from as model.from"
            )
        return self

    def at(self, path: str | Path) -> ModelConfig:
        """These settings of a model that lies in another directory."""
        unmade = {"builder": None, "builder_options": dict[str, object]()}
        return self.model_copy(update={"path": str(path), "ancestor": None, **unmade})

    def whole(self, path: str | Path) -> ModelConfig:
        """These settings of a model that lies in another directory, of which nothing is frozen."""
        return self.at(path).model_copy(update={"adapter": None, "freeze_routers": False})

    def beginning_with(self, pairs: Path) -> ModelConfig:
        """These settings with the pairs of another directory, where there is an adapter."""
        if self.adapter is None:
            return self
        adapter = self.adapter.model_copy(update={"source": str(pairs)})
        return self.model_copy(update={"adapter": adapter})

    @property
    def made(self) -> ModelConfig:
        """The model that has to be made or downloaded where it is missing: a model of the hub to
        begin from is downloaded as if `path` named it."""
        return self if self.ancestor is None else self.at(self.ancestor)

    @property
    def shown(self) -> str:
        """The model's name for people."""
        return self.path if self.ancestor is None else self.ancestor

    @property
    def from_hub(self) -> bool:
        """True when the model hub is asked where `path` does not exist."""
        return self.builder is None and _HUB_NAME.fullmatch(self.path) is not None

    @property
    def maker(self) -> str | None:
        """`package.module:function` that makes the model when `path` does not exist; None: none."""
        return _HUB if self.from_hub else self.builder

    @field_validator("builder")
    @classmethod
    def _import_path(cls, value: str | None) -> str | None:
        if value is not None and value.count(":") != 1:
            raise ValueError(
                f"model.builder must look like `package.module:function`, not {value!r}"
            )
        return value
