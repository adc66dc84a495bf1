"""What `auto` becomes: by instructions, by timed products, by all hosts, by how a run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.host import LocalHost
from earl_core.config import RunConfig, dump_config, load_config, parse_config
from earl_core.config.load import recipe_names
from earl_core.control import device_figures
from earl_core.control.device_figures import with_cores
from earl_core.control.precision import decide, resolved
from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.run import RunDirectory
from earl_core.run.record import settings_of
from earl_core.selector.choice.explain import PlannedLoad, ask
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster, device_of
from earl_core.selector.model.roofline import Load, Roofline
from earl_core.system.hardware import HostResources, bf16_instructions, processor_name

SLOW = 20.0
AUTO = ["rollout.dtype=auto", "update.precision=auto"]


@pytest.fixture(autouse=True)
def slow_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cores that nobody measured before; those that must be measured are 20 times slower in bf16.
    The hosts that were."""
    asked: list[str] = []

    def measured(hosts: list[LocalHost], device: str) -> DeviceFigures:
        asked.extend(host.name for host in hosts)
        rates = {"flops": 1e9, "float32_flops": SLOW * 1e9, "memory_bandwidth": 1e10}
        links = {"link_bandwidth": 1e9, "host_bandwidth": 1e9}
        return DeviceFigures(name=device, memory_bytes=2**30, **rates, **links)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(device_figures, "_measured", measured)
    return asked


def host(name: str = "here", **site: Any) -> LocalHost:
    given = {"cores": (0, 1), "processor": "AMD EPYC", "memory_bytes": 2**34, **site}
    return LocalHost(name, resources=HostResources(**given))


def gpus(name: str, capability: float = 0.0) -> dict[str, Any]:
    return {"gpus": 1, "gpu_name": name, "gpu_capability": capability, "gpu_memory_bytes": 2**34}


def of(config: RunConfig) -> tuple[str, str]:
    return config.rollout.dtype, config.update.precision


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["flags : fpu avx2 avx512f avx512_bf16 amx_bf16"] * 2, "AMX"),
        (["flags\t\t: fpu avx512f avx512_bf16 amx_tile"], "AVX-512 BF16"),
        (["flags : fpu avx2 avx512f avx512vl avx512_vnni"], ""),
        (["flags : fpu avx2 avx_vnni"], ""),
        (["Features : fp asimd asimdhp i8mm bf16"], "Arm's BF16 instructions"),
        (["Features : fp asimd asimdhp"], ""),
        # Small cores beside large ones.
        (["Features : fp asimd bf16", "Features : fp asimd"], ""),
        (["flags : fpu notavx512_bf16 avx512_bf16x"], ""),
        (["isa : rv64imafdc"], ""),
        ([], ""),
    ],
)
def test_what_processors_say_of_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], found: str
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("\n".join(["model name : A core", *lines, "bugs : x"]))
    assert processor_name(tmp_path) == "A core"
    assert bf16_instructions(tmp_path) == found
    # Kept from them, torch may be slow all the same.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert bf16_instructions(tmp_path) == ""
    assert bf16_instructions(tmp_path / "nowhere") == ""


@pytest.mark.parametrize(
    ("sites", "chosen", "words", "measured"),
    [
        ([{"bf16": "AMX"}], "bf16", "the processor has AMX", []),
        ([{}], "fp32", "20 times as long as float32's on the processor (AMD EPYC)", ["host-0"]),
        ([gpus("NVIDIA H100 80GB HBM3")], "bf16", "units for bf16", []),
        ([gpus("NVIDIA Unheard-Of", 8.6)], "bf16", "units for bf16", []),
        ([gpus("NVIDIA Tesla T4", 7.5)], "fp32", "20 times as long", ["host-0"]),
        ([gpus("NVIDIA Unheard-Of")], "fp32", "20 times as long", ["host-0"]),
        ([{"bf16": "AMX"}, {"bf16": "AVX-512 BF16"}], "bf16", "AMX", []),
        ([{"bf16": "AMX"}, {}], "fp32", "host-1 is unlike host-0: bf16 products", ["host-1"]),
        ([{}, {"bf16": "AMX"}, {}], "fp32", "host-0 is unlike host-1", ["host-0"]),
        # One measurement serves all that have the same processor.
        ([{}, {}, {}], "fp32", "20 times", ["host-0"]),
        ([{}, {"processor": "Xeon E5"}], "fp32", "20 times", ["host-0", "host-1"]),
    ],
)
def test_one_decision_for_all_hosts(
    slow_cores: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sites: list[dict[str, Any]],
    chosen: str,
    words: str,
    measured: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = [host(f"host-{number}", **site) for number, site in enumerate(sites)]
    found = decide(hosts)
    assert found.precision == chosen
    assert words in found.why
    assert found.factor == (SLOW if measured else 0.0)
    # Kept, it is not measured again.
    assert decide(hosts) == found
    assert slow_cores == measured


def test_engine_and_trainer_are_what_the_device_is_fast_at() -> None:
    config = load_config("tictactoe_tiny", AUTO)
    fast, slow = [host(bf16="AMX")], [host()]
    assert of(resolved(config, fast).config) == ("bfloat16", "bf16")
    found = resolved(config, slow)
    assert of(found.config) == ("float32", "fp32")
    assert found.said[0].startswith("rollout.dtype float32, update.precision fp32: bf16 products")
    assert not found.warnings
    # What is named stays; the rest follows the device.
    named = load_config("tictactoe_tiny", ["rollout.dtype=bfloat16", "update.precision=auto"])
    assert of(resolved(named, fast).config) == ("bfloat16", "bf16")
    assert of(resolved(named, slow).config) == ("bfloat16", "fp32")


def test_bf16_by_name_on_a_slow_device_is_a_warning_with_the_factor(slow_cores: list[str]) -> None:
    by_name = ["rollout.dtype=bfloat16", "update.precision=bf16"]
    (warning,) = resolved(load_config("tictactoe_tiny", by_name), [host()]).warnings
    assert "rollout.dtype and update.precision are bf16, which is slow here" in warning
    assert "20 times as long" in warning
    assert "--set rollout.dtype=float32 --set update.precision=fp32" in warning
    assert not resolved(load_config("tictactoe_tiny", by_name), [host(bf16="AMX")]).warnings
    # Who plays a policy is not warned of the trainer's.
    playing = load_config("tictactoe_tiny", ["rollout.dtype=auto", "update.precision=bf16"])
    played = resolved(playing, [host()], settings=["rollout.dtype"])
    assert (of(played.config), played.warnings) == (("float32", "bf16"), ())
    slow_cores.clear()
    # Where nothing is bf16 and nothing open, nobody looks.
    named = resolved(load_config("tictactoe_tiny"), [host("other", processor="new")])
    assert (named.decision, named.said, slow_cores) == (None, (), [])


@pytest.mark.parametrize(
    ("began", "now", "words"),
    [
        (["rollout.dtype=bfloat16", "update.precision=bf16"], ("bfloat16", "bf16"), "are bf16"),
        (["rollout.dtype=float32", "update.precision=fp32"], ("float32", "fp32"), ""),
        (
            ["rollout.dtype=float32", "update.precision=bf16"],
            ("float32", "bf16"),
            "update.precision is",
        ),
    ],
)
def test_a_run_keeps_what_it_began_with_on_another_machine(
    tmp_path: Path, began: list[str], now: tuple[str, str], words: str
) -> None:
    place = [f"runs_directory={tmp_path}", f"dispatch.directory={tmp_path / 'shm'}", "name=kept"]
    run = RunDirectory.open(load_config("tictactoe_tiny", [*place, *began]))
    # As a version before `auto` left it, too: the settings are all it has.
    run.store_config()
    assert run.record["settings"] == settings_of(run.config)
    run.close()
    config = load_config("tictactoe_tiny", [*place, *AUTO])
    for machine in (host(), host(bf16="AMX")):
        found = resolved(config, [machine], tmp_path / "kept")
        assert of(found.config) == now
        assert "as the run began" in found.said[0]
    (warning, *_) = [*resolved(config, [host()], tmp_path / "kept").warnings, ""]
    assert words in warning
    # Asked for by name, it changes, as any setting may.
    named = load_config("tictactoe_tiny", [*place, "rollout.dtype=bfloat16"])
    assert of(resolved(named, [host()], tmp_path / "kept").config) == ("bfloat16", "fp32")


def test_defaults_and_recipes_ask_no_device_for_bf16(tmp_path: Path) -> None:
    minimal = {
        "name": "run", "iterations": 1, "model": {"path": "m"},
        "environment": {"name": "tic_tac_toe"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 1},
    }  # fmt: skip
    assert of(parse_config(minimal)) == ("auto", "auto")
    assert {of(load_config(name)) for name in recipe_names()} <= {
        ("auto", "auto"),
        ("float32", "fp32"),
    }
    # What a slow machine makes of a float32 head can be read again.
    config = parse_config({**minimal, "model": {"path": "m", "float32_head": True}})
    chosen = resolved(config, [host()]).config
    (tmp_path / "config.yaml").write_text(dump_config(chosen))
    assert load_config(tmp_path / "config.yaml") == chosen
    assert of(chosen) == ("float32", "fp32")
    assert chosen.mismatch_watch == load_config(tmp_path / "config.yaml").mismatch_watch


def test_plans_for_cores_count_with_what_was_measured() -> None:
    """Eight cores that reach 8 GFLOPS together in bf16 and 160 in float32."""
    shape = MODELS["smollm2-135m"]
    hardware = with_cores(Hardware(cpu_cores=8, memory_bytes=2**35), [host()])
    assert hardware.figures is not None
    core = device_of(hardware.model_copy(update={"figures": hardware.figures.model_copy(
        update={"flops": 8e9, "float32_flops": 160e9, "memory_bandwidth": 40e9}
    )}))  # fmt: skip
    assert (core.flops_of(2), core.flops_of(4), core.memory_bandwidth) == (1e9, 20e9, 5e9)
    load = Load(episodes=4, context=512.0, longest=512.0, generated=256.0)
    mesh = StageDeployment("update", threads=8, max_tokens_per_microbatch=2048)
    attention = 2 * shape.layers * shape.query_size * 512
    operations = 3 * 4 * 512 * (2 * shape.parameters + attention)
    lines = {value: Roofline(shape, core, hardware, value) for value in (2, 4)}
    seconds = {
        value: line.training_seconds(mesh, load, epochs=1, steps=0, value=value)
        for value, line in lines.items()
    }
    assert seconds[2] - seconds[4] == pytest.approx(operations * (1 / 8e9 - 1 / 160e9))
    # One sequence is bound by reading the weights, twice as many bytes in float32; in bf16 so slow
    # cores are bound by their arithmetic.
    step = {value: line.decode_step(1, 8, 1.0, 1.0) for value, line in lines.items()}
    read = 4 * shape.parameters
    assert step[4] == pytest.approx(read / 40e9, rel=0.01)
    assert step[2] == pytest.approx(2 * shape.parameters / 8e9, rel=0.01)
    # `earl plan` asks for what the cores are fast at.
    asked = ask(shape, hardware, PlannedLoad(context=512, responses=64))
    assert (asked.rollout.dtype, asked.update.precision) == ("float32", "fp32")
    with_gpus = ask(shape, cluster("h100-80gb", 1, 8), PlannedLoad(context=512, responses=64))
    assert (with_gpus.rollout.dtype, with_gpus.update.precision) == ("bfloat16", "bf16")
