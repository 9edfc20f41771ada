"""Draws line plots as SVG with matplotlib, in the colours of the page."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

SIZE_IN = (5.2, 4.2)  # width and height of a plot in inches; the page scales it
LEGEND_COLUMNS = 3

# The page's CSS defines these names for light and dark mode. Plots are drawn with placeholder
# colours, which are replaced in the SVG.
COLOURS = {f"#0000{n:02x}": f"var(--c{n})" for n in range(1, 7)}
TEXT, RULE = "#000100", "#000200"
NAMES = {**COLOURS, TEXT: "var(--quiet)", RULE: "var(--rule)"}

PARAMETERS: dict[Any, Any] = {  # Any, as matplotlib declares the names as literals
    "svg.fonttype": "none",  # text is not converted to paths
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": RULE,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": RULE,
    "lines.linewidth": 2.0,
}


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    is_reference: bool = False  # a reference, not a policy: drawn in grey


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_title: str  # title of the x axis, with its unit
    y_title: str
    lines: Sequence[Line]
    caption: str  # how to read the plot
    is_log: bool = False  # whether the x axis is logarithmic
    y_end: float | None = None  # end of the y axis; None: a little above the highest point


def svg(plot: Plot) -> str:
    """Return an SVG element for an HTML page, with a label for screen readers."""
    # The salt makes the ids of a page's plots differ.
    with matplotlib.rc_context(PARAMETERS | {"svg.hashsalt": plot.title}):
        figure = Figure(SIZE_IN, layout="constrained")
        _draw(figure.add_subplot(), plot)
        figure.legend(loc="outside lower left", ncols=LEGEND_COLUMNS, frameon=False)
        drawn = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=metadata)
    names = ", ".join(line.name for line in plot.lines)
    label = escape(f"{plot.y_title} over {plot.x_title}: {names}")
    content = re.sub("|".join(NAMES), lambda found: NAMES[found[0]], drawn.getvalue())
    return content[content.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{label}"', 1
    )


def _draw(axes: Axes, plot: Plot) -> None:
    colours = cycle((colour, dash) for dash in ("-", "--", "-.") for colour in COLOURS)
    for line in plot.lines:
        colour, dash = (TEXT, ":") if line.is_reference else next(colours)
        x, y = zip(*line.points, strict=True)
        axes.plot(x, y, color=colour, linestyle=dash, label=line.name)
    axes.set_xlabel(plot.x_title)
    axes.set_ylabel(plot.y_title)
    axes.set_ylim(0, plot.y_end)
    if plot.is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    axes.spines[["top", "right"]].set_visible(False)
