"""Line plots as SVG, in the colours of the page around them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 270  # of a plot; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 26, 40  # around the field of the lines
COLOURS = 6  # that a page gives; further lines repeat them, dashed
REFERENCE = "reference"  # the style of a line that is no competitor


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    title: str  # with its unit
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low)


def linear(title: str, high: float) -> Axis:
    """From 0, with four to eight ticks at round numbers."""
    step = _round_step(high / 7)
    return Axis(title, 0.0, high, [n * step for n in range(int(high / step * (1 + 1e-9)) + 1)])


def logarithmic(title: str, low: float, high: float) -> Axis:
    """From one of 1, 2, 5, 10, 20 ... to another; they are the ticks, or the powers of ten are."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    least = max((mark for mark in marks if mark <= low), default=marks[0])
    most = min(mark for mark in marks if mark >= high and mark > least)
    ticks = [mark for mark in marks if least <= mark <= most]
    tens = [tick for tick in ticks if math.log10(tick).is_integer()]
    return Axis(title, least, most, ticks if len(ticks) <= 7 else tens, is_log=True)


def style(number: int) -> str:
    """The CSS classes of the line of that number."""
    return f"c{number % COLOURS}" + (" dashed" if number // COLOURS % 2 else "")


def plot(x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Says its titles and the lines' names to those who cannot see it."""
    names = ", ".join(line.name for line in lines)
    parts = [*_grid(x, y), *(_polyline(x, y, line) for line in lines)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{y.title} over {x.title}: {names}")}">{"".join(parts)}</svg>'
    )


def swatch(line: Line) -> str:
    """A piece of the line, for a legend."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="swatch" viewBox="0 0 24 8" '
        f'aria-hidden="true"><path class="{line.style}" d="M1 4H23"/></svg>'
    )


def position(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    """Where a point stands in the SVG."""
    return (
        LEFT + (WIDTH - LEFT - RIGHT) * x.place(point[0]),
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y.place(point[1]),
    )


def _polyline(x: Axis, y: Axis, line: Line) -> str:
    places = (position(x, y, point) for point in line.points)
    points = " ".join(f"{across:.2f},{down:.2f}" for across, down in places)
    return (
        f'<polyline class="{line.style}" points="{points}">'
        f"<title>{escape(line.name)}</title></polyline>"
    )


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    left, bottom = position(x, y, (x.low, y.low))
    right, top = position(x, y, (x.high, y.high))
    for tick in y.ticks:
        _, down = position(x, y, (x.low, tick))
        yield f'<path class="grid" d="M{left} {down:.2f}H{right}"/>'
        yield f'<text x="{left - 5}" y="{down + 4:.2f}" text-anchor="end">{tick:g}</text>'
    for tick in x.ticks:
        across, _ = position(x, y, (tick, y.low))
        yield f'<path class="grid" d="M{across:.2f} {bottom}V{top}"/>'
        yield f'<text x="{across:.2f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="4" y="13">{escape(y.title)}</text>'
    middle = (left + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.title)}</text>'


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20 ..."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))
