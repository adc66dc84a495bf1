"""Runs that begin with the weights of another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.config.services import DispatchConfig
from earl_core.control.ancestor import beginning, find_ancestor
from earl_core.control.policy_player import find_checkpoint
from earl_core.control.teachers import find_teachers
from earl_core.pretrained.adapter_checks import noted_base
from earl_core.pretrained.weight_digest import stored_digest
from earl_core.run.episodes import read_samples
from earl_core.run.model_card import model_card
from earl_core.run.record import (
    RunDamaged,
    lineage,
    lineage_names,
    read_record,
    stored_config,
)
from earl_core.run.rehearsal import rehearse
from flows.cli.training import preflight
from flows.cli.training import train as train_command
from tests.flows.runs import KILLED, Runs
from tests.learnt import SMALLEST_CHANGE, largest_change, weights_in

pytestmark = pytest.mark.timeout(1500)
"""Whichever test comes first waits for the whole story."""

PENALTY = "algorithm.kl={placement: loss, coefficient: 0.5, reference: teacher@1, until: 3}"
BEGUN = ("model.from=teacher@0", "seed=3", PENALTY)


@pytest.fixture(scope="module")
def story(module_runs: Runs, undisturbed: Callable[..., Runs]) -> Runs:
    """Two runs that began with the same checkpoint of a third, `teacher`, and learn from another
    one of it: `whole`, and `killed`, which was killed while it copied and in an update, and went on
    when the third was gone."""
    runs = module_runs
    teacher = runs.run("teacher")
    shutil.copytree(undisturbed().run(), teacher)
    assert runs.train_here({"overrides": [*BEGUN, "name=whole"]}) == [None]
    runs.train(*BEGUN, "name=killed", fault="ancestor.copied@0=kill", expect=KILLED)
    runs.train(*BEGUN, "name=killed", fault="update.before@1=kill", expect=KILLED)
    teacher.rename(runs.directory / "elsewhere")
    replace(runs, config=runs.run("killed") / "config.yaml", started=[]).train()
    (runs.directory / "elsewhere").rename(teacher)
    return runs


def configured(runs: Runs, *overrides: str) -> RunConfig:
    return load_config(runs.config, [*overrides])


def test_a_killed_run_goes_on_without_its_ancestor_to_the_same_bits(story: Runs) -> None:
    for name in ("whole", "killed"):
        assert story.weights(1, name) == story.weights(1, "whole")
        norms = [line["update/grad_norm"] for line in story.metrics(name)]
        assert len(norms) == 2
        assert min(norms) > 0
    began, ended = (weights_in(story.policy(0, "teacher")), weights_in(story.policy(1, "whole")))
    assert largest_change(began, ended) > SMALLEST_CHANGE
    assert largest_change(weights_in(story.model), began) > SMALLEST_CHANGE


@pytest.mark.slow
def test_environment_mesh_and_settings_are_the_runs_own(story: Runs) -> None:
    game = {"name": "tests.rollout.environments:SomeGames", "options": {"paying": [0], "of": 1}}
    story.train(
        "name=other",
        "iterations=1",
        "seed=9",
        "model.from=teacher@0",
        "model.adapter={rank: 4}",
        f"environment={json.dumps(game)}",
        "stages.update={tensor_parallel: 2}",
        "algorithm.kl={placement: none, coefficient: 0}",
        "algorithm.policy_loss=cispo",
    )
    (line,) = story.metrics("other")
    assert line["update/grad_norm"] > 0
    assert line["selector/update/tensor_parallel"] == 2
    given, pairs = story.policy(0, "teacher"), story.policy(0, "other")
    assert noted_base(pairs) == stored_digest(given) != stored_digest(story.model)
    assert read_record(story.run("other"))["ancestor"]["policy_version"] == 1


def test_policy_version_0_is_the_ancestors(story: Runs) -> None:
    config = stored_config(story.run("whole"))
    initial = find_checkpoint(story.run("whole"), config, "initial")
    given = story.policy(0, "teacher")
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (initial.policy / file).read_bytes() == (given / file).read_bytes()
    # The reference is the ancestor: before the first step nothing has diverged from it.
    first = json.loads((story.run("whole") / "iterations/000000/update.json").read_text())
    assert first["policy_version"] == initial.version == 0


def test_a_copy_of_another_content_is_not_begun_with(story: Runs, tmp_path: Path) -> None:
    """Of equal size, too. The run's own stays as it is: its bytes are those of the ancestor."""
    config = stored_config(story.run("whole"))
    run = tmp_path / "whole"
    shutil.copytree(story.run("whole") / "ancestor", run / "ancestor")
    moved = config.model_copy(update={"runs_directory": str(tmp_path)})
    assert find_checkpoint(run, moved, "initial").version == 0
    weights = run / "ancestor" / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunDamaged, match="is not what the run began with: put it back as it was"):
        find_checkpoint(run, moved, "initial")


def test_the_record_and_the_card_name_all_ancestors(story: Runs) -> None:
    record = read_record(story.run("whole"))
    (found,) = lineage(record)
    teacher = read_record(story.run("teacher"))
    assert (found["name"], found["iteration"], found["policy_version"]) == ("teacher", 0, 1)
    assert found["uid"] == teacher["uid"]
    assert len(found["digest"]) == 32
    child = find_ancestor(configured(story, "name=child", "model.from=whole"))
    assert child is not None
    assert lineage_names({"ancestor": child.record}) == ["whole@1", "teacher@0"]
    card = model_card(stored_config(story.run("whole")), 2, "it", [], [], lineage(record))
    assert "## Ancestors" in card
    assert found["digest"] in card
    assert f"`teacher`, which goes back to `{story.model}`" in card


@pytest.mark.parametrize(
    ("text", "checkpoint"),
    [
        ("teacher", "000001"),
        ("teacher@1", "000001"),
        ("{runs}/teacher@0", "000000"),
        ("{runs}/teacher/checkpoints/000000", "000000"),
        ("{runs}/teacher/checkpoints/000000/policy", "000000"),
    ],
)
def test_a_run_is_named_by_its_name_its_directory_or_a_checkpoint(
    story: Runs, text: str, checkpoint: str
) -> None:
    text = text.format(runs=story.directory / "runs")
    config = beginning(configured(story, "name=child", f"model.from={text}"))
    where = story.run("teacher") / "checkpoints" / checkpoint / "policy"
    assert Path(config.model.path).resolve() == where.resolve()


def test_a_model_directory_is_an_ancestor_too(story: Runs) -> None:
    found = find_ancestor(configured(story, "name=child", f"model.from={story.model}"))
    assert found is not None
    assert found.directory == story.model
    assert found.record["ancestors"] == []
    assert found.marker is None


def test_a_larger_teacher_scores_what_the_policy_played(story: Runs, tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    save_larger(story.model, larger)
    overrides = (
        "name=taught",
        "iterations=1",
        "update.minibatches=1",
        "reward.environment_weight=0",
        f"algorithm.kl={{placement: loss, estimator: k2, coefficient: 1, reference: {larger}}}",
    )
    assert story.train_here({"overrides": overrides}) == [None]
    samples = read_samples(story.run("taught") / "iterations/000000/episodes.parquet").to_pylist()
    gaps = np.concatenate(
        [logprobs_of(story.model, sample) - logprobs_of(larger, sample) for sample in samples]
    )
    (line,) = story.metrics("taught")
    assert line["update/reference_kl"] == pytest.approx(np.mean(gaps**2) / 2, rel=1e-4)
    assert line["update/loss/kl"] == pytest.approx(np.mean(gaps**2) / 2, rel=1e-4)
    assert line["update/grad_norm"] > 0
    assert read_record(story.run("taught"))["references"][str(larger)]["path"] == str(larger)


@pytest.mark.campaign
def test_a_pupil_comes_to_its_teacher_without_a_reward(runs: Runs, tmp_path: Path) -> None:
    pupil = tmp_path / "pupil"
    save_larger(runs.model, pupil)
    overrides = (
        "name=pupil",
        f"model.path={pupil}",
        "iterations=16",
        "rollout.prompts_per_iteration=8",
        "update.minibatches=1",
        "update.learning_rate=5e-3",
        "reward.environment_weight=0",
        "algorithm.kl={placement: loss, estimator: k2, coefficient: 1}",
        f"algorithm.kl.reference={runs.model}",
        "checkpoint.every=16",
    )
    assert runs.train_here({"overrides": overrides}) == [None]
    lines = runs.metrics("pupil")
    assert {line["reward/mean"] for line in lines} == {0.0}
    divergences = [line["update/reference_kl"] for line in lines]
    assert divergences[-1] < divergences[0] / 5, divergences


def test_an_anchor_has_a_reference_and_a_weight_of_its_own(story: Runs, tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    save_larger(story.model, larger)
    game = {"name": "tic_tac_toe", "options": {"style": "compact"}}
    anchor = {"label": "first", "reward_weight": 0, "kl": {"reference": str(larger)}}
    anchor["kl"] |= {"coefficient": 0.5}
    overrides = (
        "name=anchored",
        "iterations=1",
        "update.minibatches=1",
        "environment=null",
        f"environments={json.dumps([{**game, 'label': 'second'}, {**game, **anchor}])}",
        "algorithm.kl={placement: loss, estimator: k2}",
    )
    assert story.train_here({"overrides": overrides}) == [None]
    samples = read_samples(story.run("anchored") / "iterations/000000/episodes.parquet").to_pylist()
    apart = {"first": [np.empty(0)], "second": [np.empty(0)]}
    for sample in samples:
        gap = logprobs_of(story.model, sample) - logprobs_of(larger, sample)
        apart[sample["environment"]].append(gap)
        assert (sample["reward"] == 0) or sample["environment"] == "second"
    assert any(sample["reward"] for sample in samples)
    first, second = (np.concatenate(apart[label]) for label in ("first", "second"))
    assert min(len(first), len(second)) > 0
    (line,) = story.metrics("anchored")
    divergence = np.sum(first**2) / 2 / (len(first) + len(second))
    assert line["update/reference_kl"] == pytest.approx(divergence, rel=1e-4)
    assert line["update/loss/kl"] == pytest.approx(0.5 * divergence, rel=1e-4)


def save_larger(model: Path, place: Path) -> None:
    """A random model of another size with the same tokenizer."""
    shutil.copytree(model, place)
    config = AutoConfig.from_pretrained(model, hidden_size=64, num_hidden_layers=3)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


def logprobs_of(model: Path, sample: dict[str, Any]) -> np.ndarray:
    """What transformers says of the trained tokens of a sample."""
    with torch.no_grad():
        tokens = torch.tensor([sample["tokens"]])
        logits = AutoModelForCausalLM.from_pretrained(model)(tokens).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return found[np.array(sample["loss_mask"][1:], dtype=bool)]


def test_a_model_of_the_hub_is_downloaded_at_the_start(story: Runs) -> None:
    config = configured(story, "name=child", "model.path=''", "model.from=org/name")
    found = find_ancestor(config)
    assert found is not None
    assert (found.record["path"], found.record["name"]) == ("org/name", "name")
    assert beginning(config).model.from_hub
    assert config.model.made.path == "org/name"
    # What looks like a run's directory is none of the hub's.
    here = configured(story, "name=child", "runs_directory=runs", "model.from=runs/nobody")
    with pytest.raises(ConfigError, match="there is no model 'runs/nobody': name a run of runs/"):
        find_ancestor(here)


def test_a_rehearsal_has_the_models_too(story: Runs, tmp_path: Path) -> None:
    config = stored_config(story.run("whole"))
    place = {"name": "again", "runs_directory": str(tmp_path)}
    wanted = config.model_copy(
        update={**place, "dispatch": DispatchConfig(directory=str(tmp_path))}
    )
    rehearse(story.run("whole"), config, 1, tmp_path / "again", wanted)
    assert find_ancestor(wanted) is None
    assert find_teachers(wanted) == {}
    models = (wanted.initial_model, *map(wanted.reference_model, wanted.references))
    assert all((Path(model.path) / "model.safetensors").is_file() for model in models)


def refused(story: Runs, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(configured(story, "name=child", *overrides), story.run("child"))
    assert not story.run("child").exists()
    return str(caught.value)


def test_what_is_not_there_is_refused_before_anything_starts(story: Runs) -> None:
    assert "there is no model 'techer'" in refused(story, "model.from=techer")
    assert "has no whole checkpoint 7" in refused(story, "model.from=teacher@7")
    assert "was evaluated: take the `last` one" in refused(story, "model.from=teacher@best")
    missing = f"{story.directory / 'runs'}/nobody"
    assert "there is no model" in refused(story, f"model.from={missing}")


def test_a_teacher_has_the_policys_vocabulary(story: Runs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(story.model, other)
    text = (other / "tokenizer.json").read_text()
    words = json.loads(text)
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    penalty = "algorithm.kl={{placement: loss, coefficient: 0.1, reference: {}}}"
    said = refused(story, penalty.format(other))
    assert "has another vocabulary than the policy" in said
    assert said.endswith("name a model with the policy's tokenizer")
    assert "there is no model 'nowhere'" in refused(story, penalty.format("nowhere"))
    shutil.copytree(story.model, tmp_path / "stray")
    (tmp_path / "stray" / "adapter_config.json").write_text("{}")
    said = refused(story, penalty.format(tmp_path / "stray"))
    assert "is a whole model, but has an adapter_config.json" in said


def test_model_settings_that_contradict_the_ancestor_are_refused(
    story: Runs, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(story.model, other)
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 3}))
    text = refused(story, "model.from=teacher", f"model.path={other}")
    assert "layers is 3 there and 2 here: leave model.path out" in text
    made = ("model.path=nowhere", "model.builder=earl_core.models.tiny:build")
    assert "model.builder makes another model" in refused(story, "model.from=teacher", *made)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    text = refused(story, "model.from=teacher", f"model.chat_template={template}")
    assert "is another one than teacher was trained with: leave it out" in text


def test_a_run_that_exists_does_not_begin_again(story: Runs) -> None:
    with pytest.raises(ConfigError, match="exists already, and --from begins a new one: choose"):
        train_command(str(story.config), ["name=whole"], "quiet", "teacher")


def test_a_model_is_needed(story: Runs) -> None:
    with pytest.raises(ConfigError, match=r"model: path is missing: name a model directory, or"):
        configured(story, "model={}")
