"""`earl plan`: a question about hardware nobody has here, and a past choice made again."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from earl_core.deployment.plan import DeploymentPlan, Forbidden
from earl_core.deployment.shapes import Hardware
from earl_core.dispatch import Manifest
from earl_core.dispatch.shards.manifest import write_manifest
from earl_core.run.record import Journal
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import find_devices
from earl_core.selector.profile.observations import Observation
from earl_core.system.errors import ConfigError
from flows.cli.app import app
from flows.cli.plan_arguments import find_hardware, find_model, parse_contexts
from tests.config.test_config import MINIMAL
from tests.selector.examples import given


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_contexts_from_1k_to_128k_on_128_gpus() -> None:
    code, text = run(
        "--model", "qwen2.5-72b", "--hardware", "16x8xh100-80gb", "--context", "1K,32K,128K"
    )  # fmt: skip
    assert code == 0, text
    assert "72.7 B parameters" in text
    assert "16 x 8 H100-80GB" in text
    for context in ("1,024", "32,768", "131,072"):
        assert context in text


def test_explanation_shows_candidates_and_what_speaks_against_them() -> None:
    code, text = run(
        "--explain", "--model", "llama-3.1-8b", "--hardware", "h100", "--context", "32768",
        "--responses", "128", "--reference",
    )  # fmt: skip
    assert code == 0, text
    for part in ("chosen", "ruled out", "of the KV cache", "roofline", "reference", "data sheet"):
        assert part in text


def test_memory_table_lists_the_well_known_shapes() -> None:
    code, text = run("--memory", "--hardware", "a100-80gb")
    assert code == 0, text
    for part in ("llama-3.1-70b", "smollm2-135m", "354.0", "320 KiB"):
        assert part in text


def test_a_directory_with_a_config_is_a_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**shape, "vocab_size": 100, "max_position_embeddings": 512}))
    assert find_model(str(tmp_path)).max_positions == 512
    code, text = run("--model", str(tmp_path), "--context", "256", "--responses", "4")
    assert code == 0, text
    code, text = run("--model", str(tmp_path), "--context", "1K")
    assert code == 2
    file.write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match="vocab_size"):
        find_model(str(tmp_path))


def test_without_a_model_the_largest_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--hardware", "4xh100", "--json", "--responses", "64")
    (whole,), (short,) = (json.loads(run(*asked, "--context", x)[1]) for x in ("8K", "32K"))
    assert MODELS[whole["model"]].parameters > 10e9
    assert whole["hardware"]["gpus"] == 4
    assert (whole["assumed"]["context"], whole["assumed"]["responses"]) == (8192, 64)
    assert set(whole["plan"]["stages"]) >= {"rollout", "update"}
    assert MODELS[short["model"]].max_positions >= 32768

    # This machine: a small one, so that the answer does not depend on it.
    here = Hardware(cpu_cores=2, memory_bytes=8 * 2**30)
    monkeypatch.setattr("earl_core.control.hardware.read_hardware", lambda: here)
    # How fast this machine is, and what else it does, decides otherwise.
    monkeypatch.setattr("flows.cli.plan._PATIENCE", math.inf)
    code, text = run()
    assert code == 0, text
    flat = " ".join(text.split())
    assert "on 2 CPU cores" in flat
    assert "It is the largest well-known model that fits there, with iterations of at" in flat
    assert "128 responses an iteration of 1,024 tokens each" in flat
    assert "131,072 tokens an iteration" in flat
    monkeypatch.setattr("flows.cli.plan._PATIENCE", 0.0)
    flat = " ".join(run()[1].split())
    assert "has iterations of at most an hour; this one's are the shortest: name another" in flat
    assert "It is the largest" not in flat
    code, text = run("--hardware", "8xb200", "--context", "1M")
    assert code == 2
    assert "1,048,576" in text


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("a100", "a100-80gb"),
        ("B200", "b200"),
    ],
)
def test_devices_are_known_by_the_names_of_drivers_and_people(name: str, key: str) -> None:
    assert find_devices(name)[0] == key


PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "glm-4.5-air": 106_852_251_264,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
}
"""Parameters of the published weights; biases and the norms of queries and keys are among them."""


@pytest.mark.parametrize("name", MODELS)
def test_shapes_give_the_published_numbers_of_parameters(name: str) -> None:
    assert MODELS[name].parameters == pytest.approx(PUBLISHED[name], rel=1e-4)
    assert find_model(f"org/{name.upper()}-Instruct") is MODELS[name]


def test_wrong_questions_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        find_model("gpt-9")
    for none in ("2x0xh100", "2x00xh100", "00x8xh100"):
        with pytest.raises(ConfigError, match="16x8xh100"):
            find_hardware(none)
    with pytest.raises(ConfigError, match="1K,8K,128K"):
        parse_contexts("many")
    assert parse_contexts("1K, 2048,128k") == [1024, 2048, 131072]
    assert parse_contexts("1M,0.5m,1.5K") == [2**20, 2**19, 1536]
    for none in ("0", "0.1K,", "1.5", "-1K", "1G"):
        with pytest.raises(ConfigError, match="--context"):
            parse_contexts(none)
    assert find_hardware("2x4xh200").gpus == 8
    code, _ = run("--model", "qwen2.5-72b", "--hardware", "1x1xh100", "--context", "8K")
    assert code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"hidden_size": 2}, "share a hidden size of only 2"),
        ({"hidden_size": True}, "none of hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        (None, "no keys"),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    text = json.dumps([] if change is None else {**shape, **change})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo@1 --set seed=1", "--set changes nothing"),
        ("demo@1 --model qwen3-8b", "--model changes nothing"),
        ("demo@1 --context 8K --explain", "--context changes nothing"),
        ("demo@1 --hardware h100", "which is as its run sealed it: leave it out"),
        ("demo@1 --memory", "RUN changes nothing of what earl plan says with --memory"),
        ("tictactoe_tiny --responses 3", "--responses changes nothing"),
        ("--hardware h100 --set seed=1", "--set changes nothing of what earl plan says with no"),
    ],
)
def test_what_would_change_nothing_is_refused(arguments: str, words: str) -> None:
    code, text = run(*arguments.split())
    assert code == ConfigError.exit_code
    assert words in " ".join(text.split())


def test_too_few_episodes_for_any_mesh_are_not_called_a_lack_of_memory() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"is on offer.* for 1 episode: some would stand idle"):
        select(given(8192.0, model="llama-3.1-8b", hosts=16, episodes=1))


def sealed_run(directory: Path, item: SelectionInput) -> Path:
    path = directory / "demo"
    folder = path / "iterations" / "000012"
    folder.mkdir(parents=True)
    (path / "config.yaml").write_text("name: demo\n")
    (folder / "selection.input").write_text(item.model_dump_json())
    manifest = Manifest(
        run="demo",
        iteration=12,
        stage="select",
        key="0" * 16,
        policy_version=12,
        outputs={"plan": select(item).model_dump(mode="json")},
    )
    write_manifest(folder / "select.json", manifest)
    return path


@pytest.mark.parametrize("policy", ["live_tokens", "fixed"])
def test_a_past_choice_is_made_again(tmp_path: Path, policy: str) -> None:
    sealed_run(tmp_path, given(8192.0, selector={"policy": policy}))
    code, text = run("--explain", "demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, text
    assert f"policy {policy}" in text
    assert "gives the same plan" in text
    assert "candidates" in text
    assert ("does not weigh these" in text) == (policy == "fixed")
    for iteration, told in ((13, "is not chosen yet"), (11, "made no choice")):
        code, text = run(f"demo@{iteration}", "--runs-directory", str(tmp_path))
        assert code == 2
        assert told in text


def test_a_choice_that_came_out_otherwise_is_shown(tmp_path: Path) -> None:
    path = sealed_run(tmp_path, given(8192.0))
    other = given(8192.0, hosts=2)
    (path / "iterations/000012/selection.input").write_text(other.model_dump_json())
    code, text = run("demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, text
    assert "another plan" in text


def test_all_attempts_of_an_iteration_and_what_they_taught(tmp_path: Path) -> None:
    first = given(8192.0)
    planned = select(first)["update"]
    forbidden = (Forbidden(deployment=planned),)
    path = sealed_run(tmp_path, first.model_copy(update={"forbidden": forbidden}))
    folder = path / "iterations/000012"
    (folder / "selection.0.input").write_text(first.model_dump_json())
    failed = Observation(
        iteration=12, stage="update", kind="out_of_memory", deployment=planned, peak_bytes=2**36
    )
    sealed = DeploymentPlan.model_validate(
        json.loads((folder / "select.json").read_text())["outputs"]["plan"]
    )
    done = Observation(
        iteration=12, stage="update", kind="measured", deployment=sealed["update"], seconds=12.5,
        peak_bytes=2**35, requests=128, context=8192, longest=16384,
    )  # fmt: skip
    elsewhere = failed.model_copy(update={"iteration": 11, "peak_bytes": 3 * 2**36})
    journal = Journal(path / "selector.jsonl")
    for item in (elsewhere, failed, done):
        journal.append(item.model_dump(mode="json"))
    with journal.path.open("a") as stream:
        stream.write('{"torn')
    code, text = run("--explain", "demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, text
    flat = " ".join(text.split())
    before, again, after = flat.partition("Attempt 2 of 2")
    assert "Attempt 1 of 2" in before
    assert again
    assert "ran out of memory at 64.0 GiB" in before
    assert "192.0 GiB" not in flat
    assert sealed["update"] != planned
    assert "Predicted and measured" in after
    assert "gives the same plan" in after
    code, short = run("demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, short
    assert "Attempt 1" not in short


def test_an_iteration_for_which_nothing_was_feasible(tmp_path: Path) -> None:
    path = sealed_run(tmp_path, given(8192.0))
    folder = path / "iterations/000012"
    (folder / "select.json").unlink()
    hopeless = given(8192.0, model="qwen2.5-72b", gpus=1)
    (folder / "selection.input").write_text(hopeless.model_dump_json())
    code, text = run("--explain", "demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, text
    assert "No plan was sealed" in text
    assert "No feasible plan" in text


def test_a_choice_that_no_plan_stands_for_yet_is_explained(tmp_path: Path) -> None:
    path = sealed_run(tmp_path, given(8192.0))
    (path / "iterations/000012/select.json").unlink()
    (path / "config.yaml").write_text(yaml.safe_dump(MINIMAL))
    code, text = run("--explain", "demo@12", "--runs-directory", str(tmp_path))
    assert code == 0, text
    assert "No plan was sealed" in text
    assert re.search(r"Who is where\n.*\n.*\nrollout +engine 0 ", text)
    assert "Nothing has moved" in text
    code, short = run("demo@12", "--runs-directory", str(tmp_path))
    assert code == 0
    assert "Who is where" not in short


def test_neither_selector_nor_command_imports_torch() -> None:
    code = (
        "import sys, earl_core.selector, earl_core.selector.choice.explain, flows.cli.past_plan\n"
        "heavy = {'torch', 'transformers', 'vllm', 'prefect', 'mlflow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
