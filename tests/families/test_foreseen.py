"""What is known of a model by its `config.json` alone, family by family: whether it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from earl_core.config.engine_models import check_trained, check_tried
from earl_core.deployment.shapes import ModelShape
from earl_core.system.errors import ConfigError
from tests.families.registry import FAMILIES, SHAPE

RECORD = Path(__file__).parents[2] / "docs/site/families.json"


def config_of(name: str) -> Any:
    family = FAMILIES[name]
    made = getattr(transformers, f"{family.config or name}Config")
    return made(**{**SHAPE, **family.own})


def refused(raw: dict[str, Any], engine: str) -> bool:
    try:
        model = ModelShape.from_config(raw)
        check_trained(model)
        check_tried(model, engine)
    except (ConfigError, ValueError):
        return True
    return False


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_refused_when_it_was_tried_is_refused_by_its_configuration(name: str) -> None:
    tried = json.loads(RECORD.read_text())["families"][FAMILIES[name].title]
    raw = config_of(name).to_dict()
    untrained = tried["packing"].startswith("refused")
    assert refused(raw, "torch") == (
        untrained or tried["torch engine"].startswith("refused: the torch engine cannot run")
    )
    if untrained:
        assert refused(raw, "vllm")
        # Released files leave out what the family does by default.
        assert refused({key: raw[key] for key in raw if key != "layer_types"}, "vllm")
    elif tried.get("vLLM") == "yes":
        assert not refused(raw, "vllm")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_output_layer_is_tied_where_the_family_ties_it(name: str) -> None:
    """Older files say nothing of what is the family's own."""
    config = config_of(name)
    usual = type(config)().get_text_config().tie_word_embeddings
    raw = config.to_dict()
    for part in (raw, raw.get("text_config") or {}):
        part.pop("tie_word_embeddings", None)
    try:
        shape = ModelShape.from_config(raw)
    except ValueError:
        return  # refused as it is
    assert shape.tied_embeddings == usual
