"""A learning curve in characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEIGHT = 10
WIDTH = 60


@dataclass(frozen=True)
class Series:
    """Points (x, y) drawn with one mark; later series are drawn over earlier ones."""

    name: str
    mark: str
    points: tuple[tuple[float, float], ...]


def draw(
    series: Sequence[Series],
    *,
    y_text: Callable[[float], str] = "{:.2f}".format,
    y_range: tuple[float, float] | None = None,
) -> str:
    """The series in one chart; empty text when there are no points at all. y_range: at least this
    much of the y axis is shown; the points widen it."""
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points] + list(y_range or ())
    low, high = min(ys), max(ys)
    if high == low:
        low, high = low - 0.5, high + 0.5
    first, last = min(xs), max(xs)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for one in shown:
        for x, y in one.points:
            column = round((x - first) / (last - first or 1) * (WIDTH - 1))
            row = round((high - y) / (high - low) * (HEIGHT - 1))
            grid[row][column] = one.mark
    labels = {0: high, HEIGHT // 2: high - (high - low) * (HEIGHT // 2) / (HEIGHT - 1)}
    labels[HEIGHT - 1] = low
    texts = {row: y_text(value) for row, value in labels.items()}
    margin = max(map(len, texts.values()))
    lines = [
        f"{texts.get(row, ''):>{margin}} {'┤' if row in texts else '│'}{''.join(cells).rstrip()}"
        for row, cells in enumerate(grid)
    ]
    lines.append(f"{'':>{margin}} └{'─' * WIDTH}")
    left, right = f"iterations done: {first:g}", f"{last:g}"
    lines.append(f"{'':>{margin}}  {left}{right:>{max(1, WIDTH - len(left))}}")
    lines.append(f"{'':>{margin}}  {'   '.join(f'{one.mark} {one.name}' for one in shown)}")
    return "\n".join(lines)
