"""What an iteration's choice leaves for people: numbers for MLflow, a page for Prefect."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_metric_name

from earl_core.deployment.plan import DeploymentPlan, StagePrediction
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import Observation
from tasks.reports.chart import selector_chart
from tasks.reports.plan_report import plan_page
from tasks.reports.run_page.charts import sections
from tasks.reports.selector_metrics import load_metrics, selector_metrics
from tasks.tracking.metric_catalogue import stored_name
from tasks.tracking.mlflow_client import Numbers
from tests.selector.examples import given
from tests.tracking.conftest import Runs, history

GIB = 2.0**30
ROLLOUT = StageDeployment(stage="rollout", max_model_len=4096, max_running_requests=64)
UPDATE = StageDeployment(stage="update", threads=2, max_tokens_per_microbatch=8192)
LEAN = UPDATE._replace(activation_checkpointing="full")
PREDICTED = StagePrediction(
    seconds=12.0, tokens_per_second=100.0, peak_bytes=3 * GIB, budget_bytes=8 * GIB, measured=0.7
)


def plan(update: StageDeployment = UPDATE, **fields: Any) -> DeploymentPlan:
    return DeploymentPlan(
        iteration=4,
        stages={"rollout": ROLLOUT, "update": update},
        reasons={"rollout": "as it was", "update": "because"},
        **fields,
    )


def manifest(stage: str, **metrics: float) -> Manifest:
    return Manifest(
        run="first",
        iteration=4,
        stage=stage,
        key="0" * 16,
        policy_version=4,
        metrics={"stage_seconds": 11.0, **metrics},
    )


_DRAWN = ("rollout", "update")

MANIFESTS = {
    "select": manifest("select"),
    "rollout": manifest("rollout", seconds=6.0, peak_bytes=GIB, tokens_per_second=50.0),
    "update": manifest("update", seconds=10.0, peak_bytes=2 * GIB),
}
SEEN = [
    Observation(iteration=4, stage="update", kind="out_of_memory", deployment=UPDATE),
    Observation(iteration=4, stage="update", kind="switched", deployment=LEAN, seconds=2.5),
    Observation(
        iteration=4, stage="update", kind="measured", deployment=LEAN, seconds=8.0,
        tokens_per_second=120.0, peak_bytes=2 * GIB,
    ),
]  # fmt: skip


def test_predicted_and_measured_stand_side_by_side() -> None:
    chosen = plan(LEAN, predictions={"update": PREDICTED}, attempt=1)
    found = selector_metrics(chosen, plan(), MANIFESTS, SEEN, gpus=0)
    assert found["selector/attempts"] == 2
    assert found["selector/switches"] == 1
    update = {n.removeprefix("selector/update/"): v for n, v in found.items() if "/update/" in n}
    assert update["predicted_seconds"] == 12.0
    assert update["predicted_over_measured_seconds"] == 1.2
    assert update["predicted_peak_bytes"] == 3 * GIB
    assert update["measured_peak_bytes"] == 2 * GIB
    assert update["predicted_over_measured_peak_bytes"] == 1.5
    assert update["switch_seconds"] == 2.5
    assert update["switched"] == 1
    assert update["out_of_memory"] == 1
    assert update["max_tokens_per_microbatch"] == 8192
    assert update["activation_checkpointing"] == 2
    # Nothing was predicted or observed of the rollout; its manifest knows what it took.
    assert found["selector/rollout/measured_peak_bytes"] == GIB
    assert found["selector/rollout/max_model_len"] == 4096
    assert found["selector/rollout/max_running_requests"] == 64
    assert found["selector/rollout/switched"] == 0
    assert "selector/rollout/predicted_seconds" not in found
    assert "selector/rollout/shard" not in found
    # MLflow makes a section of what stands before a name's last slash, and takes all names.
    assert Numbers(4, found, 0.0).finite().keys() == found.keys()
    assert {name.rpartition("/")[0] for name in found} == {
        "selector",
        "selector/rollout",
        "selector/update",
    }


def test_peaks_of_cpu_ranks_count_together_as_predictions_do() -> None:
    two = UPDATE._replace(replicas=2)
    measured = SEEN[-1].model_copy(update={"deployment": two})
    name = "selector/update/measured_peak_bytes"
    assert selector_metrics(plan(two), None, MANIFESTS, [measured], gpus=0)[name] == 4 * GIB
    assert selector_metrics(plan(two), None, MANIFESTS, [measured], gpus=2)[name] == 2 * GIB


def test_a_longer_context_is_no_switch() -> None:
    longer = plan().model_copy(
        update={
            "stages": {
                "rollout": ROLLOUT._replace(max_model_len=8192),
                "update": UPDATE,
            }
        }
    )
    assert selector_metrics(longer, plan(), MANIFESTS, [], gpus=0)["selector/switches"] == 0
    assert selector_metrics(plan(), None, MANIFESTS, [], gpus=0)["selector/switches"] == 0


SVG = "{http://www.w3.org/2000/svg}"


def _lines_of(panel: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of a drawing's lines, in the units of its axes."""
    texts = [text for text in panel.iter(f"{SVG}text") if re.fullmatch(r"[-\d.]+", text.text or "")]
    across = [
        (float(t.attrib["x"]), float(t.text)) for t in texts if t.get("text-anchor") == "middle"
    ]
    up = [(float(t.attrib["y"]) - 4, float(t.text)) for t in texts if t.get("text-anchor") == "end"]

    def value(place: float, axis: list[tuple[float, float]]) -> float:
        (start, low), (end, high) = axis[0], axis[-1]
        return low + (place - start) / (end - start) * (high - low)

    return [
        [
            (value(float(x), across), value(float(y), up))
            for x, y in (point.split(",") for point in line.attrib["points"].split())
        ]
        for line in panel.iter(f"{SVG}polyline")
    ]


def test_the_picture_has_both_lines_of_every_stage_and_marks_switches(runs: Runs) -> None:
    lines = []
    for iteration in range(4):
        chosen = plan(LEAN if iteration > 1 else UPDATE, predictions={"update": PREDICTED})
        before = plan(LEAN if iteration > 2 else UPDATE)
        numbers = selector_metrics(chosen, before, MANIFESTS, SEEN, gpus=1)
        took = {f"{stage}/seconds": MANIFESTS[stage].metrics["seconds"] for stage in _DRAWN}
        lines.append({"iteration": iteration, "time": 1.0, **numbers, **took})
    drawn = selector_chart(lines)
    assert drawn is not None
    panels = list(ElementTree.fromstring(drawn).iter(f"{SVG}svg"))[1:]
    assert [panel.findtext(f"{SVG}text") for panel in panels] == [
        "rollout: seconds",
        "rollout: peak, GiB",
        "update: seconds",
        "update: peak, GiB",
    ]
    names = [{text.text for text in panel.iter(f"{SVG}text")} for panel in panels]
    assert ["measured" in found for found in names] == [True, False, True, True]
    assert ["predicted" in found for found in names] == [False, False, True, True]
    shown = [_lines_of(panel) for panel in panels]
    values = [[6.0], [], [10.0, 12.0], [2.0, 3.0]]
    for drawn_lines, constant in zip(shown, values, strict=True):
        for points, value in zip(drawn_lines, constant, strict=True):
            assert [x for x, _ in points] == pytest.approx([1, 2, 3, 4], abs=0.01)
            assert [y for _, y in points] == pytest.approx([value] * 4, abs=0.02)
    upright = [
        [line.get("x1") for line in panel.iter(f"{SVG}line") if line.get("stroke") == "#888"]
        for panel in panels
    ]
    assert [len(found) for found in upright] == [0, 0, 1, 1]
    assert selector_chart([]) is selector_chart([{"iteration": 0, "x": 1.0}]) is None

    run = runs.run()
    tracker = runs.tracker(run)
    for line in lines[:3]:
        iteration = int(line["iteration"])
        numbers = {k: v for k, v in line.items() if k not in ("iteration", "time")}
        run.append_metrics(iteration, numbers)
        tracker.changed()
    tracker.close()
    assert tracker.dropped == 0
    client = MlflowClient(tracking_uri=tracker.uri)
    charts = client.list_artifacts(tracker.run_id, "charts")
    assert [chart.path for chart in charts] == ["charts/predicted_and_measured.svg"]
    svg = next((runs.path / "runs" / "mlartifacts").rglob("*.svg"))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    ratios = history(tracker.uri, tracker.run_id, "7_plan/update_seconds_predicted_over_measured")
    assert ratios == dict.fromkeys(range(3), 1.2)


def test_share_and_trend_of_the_load() -> None:
    rollout = {
        "context/mean": 400.0,
        "turns/mean": 4.0,
        "tokens_per_turn": 20.0,
    }
    found = load_metrics(rollout, [100.0, 200.0, 300.0])
    assert found["rollout/generated_share"] == 0.2
    assert found["rollout/context/trend"] == pytest.approx(100.0)
    assert "rollout/context/trend" not in load_metrics(rollout, [])
    assert load_metrics({}, []) == {}


@pytest.fixture
def run(runs: Runs) -> RunDirectory:
    return runs.run(tracking={"enabled": False})


def seal(run: RunDirectory, item: SelectionInput) -> DeploymentPlan:
    path = Path(run.stage_path(item.iteration, "selection").with_suffix(".input"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(item.model_dump_json())
    return select(item)


@pytest.mark.parametrize("policy", ["fixed", "average_context", "live_tokens"])
def test_the_page_shows_the_plan_and_what_it_was_chosen_among(
    run: RunDirectory, policy: str
) -> None:
    chosen = seal(run, given(32768.0, gpus=8, hosts=2, selector={"policy": policy}))
    page = plan_page(run, chosen, None, [])
    assert f"policy {policy}" in page
    for part in ("### rollout:", "### update:", "chosen", "ruled out", "### Not offered"):
        assert part in page
    for reason in chosen.reasons.values():
        assert reason in page
    for section in page.split("### ")[1:]:
        assert len([line for line in section.splitlines() if line.startswith("|")]) <= 2 + 24
    header, ruler, *rows = [
        line for line in page.split("### ")[1].splitlines() if line.startswith("|")
    ]
    assert header.startswith("| candidate | seconds |")
    assert ruler.count("|") == header.count("|")
    assert len(rows) <= 12
    assert {row.count("|") for row in rows} == {header.count("|")}
    # Another reader of the same sealed input makes the same page.
    assert plan_page(run, chosen, None, []) == page


def test_the_page_tells_of_switches_and_of_what_did_not_fit(run: RunDirectory) -> None:
    chosen = seal(run, given(8192.0))
    before = chosen.model_copy(
        update={"stages": {**chosen.stages, "update": UPDATE}, "iteration": 4}
    )
    failed = Observation(
        iteration=5, stage="update", kind="out_of_memory", deployment=UPDATE, peak_bytes=GIB
    )
    page = plan_page(run, chosen.model_copy(update={"attempt": 1}), before, [failed])
    assert "- update: TP" in page
    assert "ran out of memory at 1.0 GiB" in page
    assert "chosen 2 times" in page


def test_a_page_without_candidates_says_why(run: RunDirectory) -> None:
    chosen = seal(run, given(8192.0, selector={"policy": "fixed"}))
    assert "cannot be shown" not in plan_page(run, chosen, None, [])
    later = chosen.model_copy(update={"iteration": 6})
    assert "cannot be shown" in plan_page(run, later, None, [])


def test_mlflow_takes_whatever_environments_and_rewards_call_their_metrics() -> None:
    told = (
        "outcome/", "a//b", "../c", "a/./d", "e?/ü", "/f", "acc@1", "acc#1", "acc_1", "acc\n1",
        "a/_/b", "a/../b", "acc\ud800", "x" * 250, "x" * 251, "x" * 252, "p%", "p_", "p$",
    )  # fmt: skip
    assert stored_name("acc_1") == "acc_1"
    stored = Numbers(0, dict.fromkeys(told, 1.0), 0.0).finite()
    assert len(stored) == len(told)
    for name in stored:
        _validate_metric_name(name)


def test_a_chart_shows_zero_where_no_episode_had_an_outcome() -> None:
    lines = [
        {"iteration": 0, "rollout/outcome/win": 0.5, "rollout/outcome/draw": 0.5},
        {"iteration": 1, "rollout/outcome/win": 1.0},
        {"iteration": 2, "rollout/outcome/win": 0.9, "rollout/outcome/draw": 0.1},
    ]
    held_out = [
        {"iteration": 0, "outcome/win/share": 1.0},
        {"iteration": 2, "outcome/loss/share": 1.0},
    ]
    records: Any = SimpleNamespace(iterations=lines, evaluations=held_out)
    charts = {each["title"]: each for each in sections(records)[0]["charts"]}
    shown = {each["name"]: each["y"] for each in charts["Outcomes in training"]["series"]}
    assert shown == {"win": [50.0, 100.0, 90.0], "draw": [50.0, 0.0, 10.0]}
    shown = {each["name"]: each["y"] for each in charts["Outcomes of held-out episodes"]["series"]}
    assert shown == {"win": [100.0, 0.0], "loss": [0.0, 100.0]}
