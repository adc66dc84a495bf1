"""Write docs/metrics.md from the catalogue of metrics.

`python docs/site/metrics.py` writes it; a test compares it with `page()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tasks.tracking.metric_catalogue import CATALOGUE, Metric

PAGE = Path(__file__).resolve().parents[1] / "metrics.md"

_INTRODUCTION = """# Metrics

Written by `python docs/site/metrics.py` from `tasks/tracking/metric_catalogue.py`.

Every finished iteration is a line of `metrics.jsonl` in the run directory, with all numbers. MLflow
gets those of the first tables, one chart each. It orders its sections by name, so that the run page
answers in this order: is it learning, is it healthy, what is slow, what changed. `*` stands for a
part of the name, such as an outcome or a stage. Numbers that no table names are your own, of an
environment or of a reward function, and go to MLflow under their names.

The step of a number is its iteration; of an evaluation the number of iterations before it; of the
machine the number of the sample. Names with a slash stand in backticks where MLflow is searched:
``metrics.`1_learning/return` > 0.5``.

Each evaluation is also a child run, `evaluation after 12 iterations`, with the same names, and a
line of the table `evaluation/results.json` with its 95 % intervals. Its numbers are not in
`metrics.jsonl` but, without `evaluation/`, in `iterations/000012/evaluation.json`. The artifact
`metrics.json` of a run describes the run's own numbers.
"""

_TITLES = {
    "1_learning": "Is it learning?",
    "2_outcomes": "How do episodes end?",
    "3_health": "Is it healthy?",
    "4_lengths": "How long are episodes?",
    "5_speed": "What is slow?",
    "6_memory": "Does it fit?",
    "7_plan": "What changed?",
    "evaluation": "Evaluations",
    "system": "The machine, from `system.jsonl`",
}
_OWN = "Your own metrics"
_KEPT = "Only in `metrics.jsonl`"


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    shown = [metric for metric in CATALOGUE if metric.mlflow]
    for title, metrics in groupby(shown, key=_title):
        parts.append(_table(title, ["in MLflow", "in metrics.jsonl", "unit", ""], metrics))
    kept = (metric for metric in CATALOGUE if not metric.mlflow)
    parts.append(_table(_KEPT, ["in metrics.jsonl", "unit", ""], kept))
    return "\n".join(parts)


def _title(metric: Metric) -> str:
    section = (metric.mlflow or "").partition("/")[0]
    return f"{_TITLES[section]} `{section}`" if section[0].isdigit() else _TITLES.get(section, _OWN)


def _table(title: str, columns: list[str], metrics: Iterable[Metric]) -> str:
    lines = [f"## {title}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for metric in metrics:
        names = [f"`{name}`" for name in (metric.mlflow, metric.name) if name]
        # A bar would end the cell.
        text = metric.description.replace("|", "\\|")
        lines.append(f"| {' | '.join([*names, metric.unit, text])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
