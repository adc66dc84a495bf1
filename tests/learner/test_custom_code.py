"""A model directory that brings its own code: trained, published, played and saved, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from earl_core.config import ConfigError
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.manifest import WeightsManifest
from tests.engines.driver import Driver
from tests.learner.helpers import build_model, save_model
from tests.learner.recorded import Recorded

_CODE = '''
from transformers import LlamaConfig, LlamaForCausalLM


class MirrorConfig(LlamaConfig):
    model_type = "earl_test_mirror"

    def __init__(self, mirrored=True, **kwargs):
        self.mirrored = mirrored
        super().__init__(**kwargs)


class MirrorForCausalLM(LlamaForCausalLM):
    """A Llama whose hidden states are turned round: nobody else's code computes it rightly."""

    config_class = MirrorConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, given, output: -output)
'''


def _custom(directory: Path) -> Path:
    save_model(build_model("llama"), directory)
    (directory / "modeling_mirror.py").write_text(_CODE)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "model_type": "earl_test_mirror",
        "architectures": ["MirrorForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_mirror.MirrorConfig",
            "AutoModelForCausalLM": "modeling_mirror.MirrorForCausalLM",
        },
    }
    path.write_text(json.dumps(config))
    return directory


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded.make(tmp_path)
    _custom(tmp_path / "model")
    made.config["model"]["trust_remote_code"] = True
    yield made
    made.close()


def _logprobs(directory: Path, manifest: WeightsManifest) -> list[float]:
    """Of one sampled answer, by an engine that took the manifest's weights."""
    engine = TorchEngine(directory, policy_version=None, trust_remote_code=True)
    driver = Driver(engine, directory)
    driver.run(engine.start())
    try:
        driver.run(engine.play_under(manifest))
        return driver.answer([3, 4, 5], max_tokens=8).logprobs
    finally:
        driver.close()


def test_its_policy_is_trained_published_played_and_saved(
    recorded: Recorded, tmp_path: Path
) -> None:
    worker, context = recorded.alone()
    context.iteration = 0
    saved = tmp_path / "checkpoints" / "000000"
    worker.update(recorded.references(0), str(saved), {})
    directory = tmp_path / "model"
    published = WeightsManifest.model_validate(
        worker.publish(str(recorded.store.directory), 1, "float32")
    )
    # The engine refuses weights of another configuration: both have read the same.
    played = _logprobs(directory, published)
    # What is saved is a directory like the one it came from, its code included.
    policy = saved / "policy"
    assert (policy / "modeling_mirror.py").is_file()
    again = _logprobs(policy, manifest_from_directory(policy, 1, trust_remote_code=True))
    np.testing.assert_allclose(played, again, atol=1e-6)
    initial = _logprobs(directory, manifest_from_directory(directory, 0, trust_remote_code=True))
    assert played != initial
    assert len(played) == 8


def test_without_being_asked_its_code_is_not_run(tmp_path: Path) -> None:
    made = Recorded.make(tmp_path)
    _custom(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"set model\.trust_remote_code"):
        made.alone()
    made.close()
