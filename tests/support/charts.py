"""One panel of a dashboard, drawn from what Prometheus answered."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dashboards.grafana import BYTES, FRACTION, REQUESTS_PER_S, SECONDS, Panel

INK, PALE, GRID = "#24292E", "#6A737D", "#E6E8EB"
COLORS = {  # Grafana's names
    "green": "#4C9A3F",
    "light-green": "#A4D79A",
    "red": "#D92B3F",
    "orange": "#FF780A",
    "dark-orange": "#A8480F",
    "dark-yellow": "#8F6F1E",
    "yellow": "#E8BE0A",
    "blue": "#3274D9",
    "purple": "#A352CC",
    "gray": "#A6ADB8",
    "transparent": "none",
}
PALETTE = ("#3274D9", "#FF780A", "#4C9A3F", "#A352CC", "#D92B3F", "#E8BE0A", "#0F8C8C", "#8A5A2B")

LEGEND: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (-0.02, -0.1),
    "fontsize": 7.5,
    "frameon": False,
    "labelcolor": PALE,
    "handlelength": 1.0,
    "columnspacing": 1.2,
    "borderaxespad": 0.2,
}


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    color: str  # one of Grafana's; empty: any
    labels: Mapping[str, str]
    times: Sequence[datetime]
    values: Sequence[float]  # NaN where there is none

    @property
    def latest(self) -> float:
        """NaN where there is none."""
        numbers = (value for value in reversed(self.values) if not math.isnan(value))
        return next(numbers, math.nan)


def draw(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    """The panel's title above, and below it what its kind makes of the series."""
    axes.set_title(panel.title, loc="left", fontsize=9.5, weight="bold", color=INK, pad=7)
    if panel.kind == "timeseries" and panel.stacking != "percent":
        axes.set_title(_unit(panel.unit), loc="right", fontsize=8, color=PALE, pad=7)
    if not any(not math.isnan(each.latest) for each in series):
        _blank(axes)
        axes.text(0.5, 0.5, "none yet", transform=axes.transAxes, ha="center", color=PALE)
        return
    if not any(each.color for each in series):
        series = sorted(series, key=lambda each: each.name)  # a replica's colour is the same in all
    {"timeseries": _lines, "stat": _number, "bargauge": _bars, "waterfall": _waterfall}[panel.kind](
        axes, panel, series
    )


def shown(value: float, unit: str) -> str:
    """As people write it; what is counted is told by `_unit`."""
    if math.isnan(value):
        return "?"
    if unit == FRACTION:
        return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"
    if unit == SECONDS:
        return f"{1000 * value:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    if unit == BYTES:
        return f"{value / 2**20:,.0f} MiB"
    return _short(value)


def _unit(unit: str) -> str:
    """What a number alone does not say."""
    return "requests/s" if unit == REQUESTS_PER_S else unit.partition(":")[2]


def _short(value: float) -> str:
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _lines(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    _frame(axes)
    colors = list(_colors(series))
    if panel.stacking == "none":
        for each, color in zip(series, colors, strict=True):
            axes.plot(each.times, each.values, color=color, lw=1.4, label=each.name)  # type: ignore[arg-type]
    else:
        times = max((each.times for each in series), key=len)
        rows = [_aligned(each, times) for each in series]
        if panel.stacking == "percent":
            wholes = [sum(column) or math.nan for column in zip(*rows, strict=True)]
            rows = [[v / w for v, w in zip(row, wholes, strict=True)] for row in rows]
        axes.stackplot(times, rows, colors=colors, labels=[s.name for s in series], lw=0)  # type: ignore[arg-type]
    unit = FRACTION if panel.stacking == "percent" else panel.unit
    axes.set_ylim(0, 1 if panel.stacking == "percent" else 1.08 * _top(axes) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    locator = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, show_offset=False)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)
    axes.margins(x=0)
    _legend(axes, panel.width)


def _number(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    _blank(axes)
    numbers = "   ".join(shown(each.latest, panel.unit) for each in series)
    text = f"{numbers} {_unit(panel.unit)}"
    color = COLORS[_step_color(panel, series[0].latest)]
    axes.text(
        0.0,
        0.42,
        text,
        transform=axes.transAxes,
        size=min(21, 3.6 * panel.width),
        color=color,
        va="center",
    )


def _bars(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    _frame(axes)
    rows = sorted(series, key=lambda each: each.latest)
    values = [each.latest for each in rows]
    axes.barh(range(len(rows)), values, color=PALETTE[0], height=0.35)
    for row, each in enumerate(rows):
        axes.text(0, row + 0.27, each.name, fontsize=8.5, color=INK, va="bottom")
        number = f" {shown(each.latest, panel.unit)} {_unit(panel.unit)}"
        axes.text(each.latest, row, number, fontsize=8.5, color=PALE, va="center")
    axes.set_ylim(min(len(rows) - 4, 0) - 0.5, len(rows) - 0.2)
    axes.set_yticks([])
    axes.set_xlim(0, 1.5 * max(values) or 1)
    axes.set_xticks([])
    axes.grid(visible=False)


def _waterfall(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    _frame(axes)
    is_floor = [each.color == "transparent" for each in series]
    floors = {
        each.labels["category"]: each.latest
        for each, floor in zip(series, is_floor, strict=True)
        if floor
    }
    steps = [each for each, floor in zip(series, is_floor, strict=True) if not floor]
    steps.sort(key=lambda each: each.labels["category"])
    for place, step in enumerate(steps):
        floor = floors.get(step.labels["category"], 0.0)
        top = floor + step.latest
        axes.bar(place, step.latest, bottom=floor, color=COLORS[step.color], width=0.72)
        axes.text(
            place, top + 0.015, shown(step.latest, panel.unit), ha="center", size=8.5, color=INK
        )
        if place + 1 < len(steps):
            axes.plot([place - 0.36, place + 1.36], [floor, floor], color=PALE, lw=0.6, ls=":")
    axes.set_xticks(range(len(steps)), [step.name for step in steps], fontsize=8.5, rotation=30)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, FRACTION)))


def _aligned(series: Series, times: Sequence[datetime]) -> list[float]:
    """Its values at those times; 0 where it has none."""
    at = dict(zip(series.times, series.values, strict=True))
    return [0.0 if math.isnan(value := at.get(time, 0.0)) else value for time in times]


def _top(axes: Axes) -> float:
    return float(axes.dataLim.y1)


def _colors(series: Iterable[Series]) -> Iterator[str]:
    others = cycle(PALETTE)
    for each in series:
        yield COLORS[each.color] if each.color else next(others)


def _step_color(panel: Panel, value: float) -> str:
    """Of the last of the panel's steps that the value reaches."""
    return [color for limit, color in panel.steps if limit is None or value >= limit][-1]


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(colors=PALE, labelsize=8, length=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def _blank(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _legend(axes: Axes, width: int) -> None:
    """Under the panel, of as many series as there is room for in two rows."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, 8 * width // (max(map(len, names)) + 7))
    axes.legend(handles[: 2 * columns], names[: 2 * columns], ncols=columns, **LEGEND)
