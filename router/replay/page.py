"""A replay as one HTML page that needs nothing else: parameters, table and plots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import numpy as np

from router.replay.compare import Run
from router.replay.plot import REFERENCE, Axis, Line, linear, logarithmic, plot, style, swatch
from router.replay.report import COLUMNS, WARM_UP
from router.replay.trace import Request, ideal_hit_tokens, span_s

QUANTILES = np.linspace(0, 1, 201)
WINDOWS = 30  # of time, over which hits are averaged
HEADROOM = 1.05  # above the highest line

TABLE_NOTE = (
    "Hits are the share of prompt tokens found cached; ideal is one shared cache that forgets "
    "nothing. Times to the first token (TTFT) are in seconds, the time for each later one (TPOT) "
    "is in milliseconds. Imbalance is the prefill time of the busiest replica over the mean. The "
    "first tenth of the requests fills the caches: it counts in req/s, imbalance and the two later "
    "plots alone."
)

CSS = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2430; --quiet: #5c6675; --rule: #e2e6ec;
  --c0: #0b6bcb; --c1: #d4500a; --c2: #0a8f5b; --c3: #b5308f; --c4: #a87800; --c5: #5b53c7 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --text: #e6e9ee; --quiet: #9aa4b2; --rule: #2c323b;
    --c0: #6db3f2; --c1: #ff9466; --c2: #4fd1a0; --c3: #f08fd6; --c4: #e6c04d; --c5: #b3acff } }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 84rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 0 .75rem; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 0 0 .25rem }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem 1rem;
  margin: 0 0 1.5rem } dt { color: var(--quiet); font-size: .8rem } dd { margin: 0;
  overflow-wrap: anywhere }
.scroll { overflow-x: auto } table { border-collapse: collapse; white-space: nowrap;
  font-variant-numeric: tabular-nums } th, td { padding: .3rem .6rem; text-align: right;
  border-bottom: 1px solid var(--rule) } th { font-weight: 600 }
th:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--page) }
.note, figcaption { color: var(--quiet); font-size: .85rem } .note { max-width: 60rem }
.plots + h2 { margin-top: 2.5rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 2rem 1.5rem; margin-top: 2rem } figure { margin: 0 } figure > svg { width: 100% }
.legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; list-style: none; margin: .1rem 0 .4rem;
  padding: 0; font-size: .85rem } .swatch { width: 24px; height: 8px; margin-right: .3rem }
text { font: 12px system-ui, sans-serif; fill: var(--quiet) }
.grid { stroke: var(--rule) } polyline, .swatch path { fill: none; stroke-width: 2;
  stroke-linejoin: round } .dashed { stroke-dasharray: 6 3 }
.c0 { stroke: var(--c0) } .c1 { stroke: var(--c1) } .c2 { stroke: var(--c2) }
.c3 { stroke: var(--c3) } .c4 { stroke: var(--c4) } .c5 { stroke: var(--c5) }
.reference { stroke: var(--quiet); stroke-dasharray: 2 3 }
"""


def page(
    title: str, requests: Sequence[Request], runs: Sequence[Run], parameters: Mapping[str, object]
) -> str:
    """The whole document."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{CSS}</style></head>
<body><h1>{escape(title)}</h1>
<div class="scroll">{_table(runs)}</div>
<p class="note">{TABLE_NOTE}</p>
<div class="plots">{"".join(_figures(requests, runs))}</div>
<h2>Parameters</h2>
<dl>{"".join(_parameter(*each) for each in parameters.items())}</dl>
</body></html>
"""


def first_tokens(requests: Sequence[Request], runs: Sequence[Run]) -> list[Line]:
    """Quantiles of the seconds until the first token, of the requests that count."""
    arrivals_s = np.array([request.arrival_s for request in requests])

    def points(run: Run) -> list[tuple[float, float]]:
        waits_s = (np.array(run.outcome.first_token_s) - arrivals_s)[len(requests) // WARM_UP :]
        quantiles_s = np.quantile(waits_s, QUANTILES)
        return list(zip(quantiles_s.tolist(), (100 * QUANTILES).tolist(), strict=True))

    return _lines(runs, points)


def hits_over_time(requests: Sequence[Request], runs: Sequence[Run]) -> list[Line]:
    """Percent of the prompt tokens that were cached, by windows of arrival; the ideal too."""
    after_s = np.array([request.arrival_s for request in requests]) - requests[0].arrival_s
    window = np.minimum(WINDOWS * after_s // span_s(requests), WINDOWS - 1).astype(int)
    input_tokens = np.bincount(window, [r.input_tokens for r in requests], WINDOWS)
    middles_s = (np.arange(WINDOWS) + 0.5) * span_s(requests) / WINDOWS

    def points(hit_tokens: Sequence[int]) -> list[tuple[float, float]]:
        hits = np.bincount(window, hit_tokens, WINDOWS)
        some = input_tokens > 0
        percent = 100 * hits[some] / input_tokens[some]
        return list(zip(middles_s[some].tolist(), percent.tolist(), strict=True))

    ideal = Line("ideal", REFERENCE, points(ideal_hit_tokens(requests)))
    return [ideal, *_lines(runs, lambda run: points(run.outcome.hit_tokens))]


def balance(runs: Sequence[Run]) -> list[Line]:
    """Seconds of prefill, replica by replica, as stairs that go down."""

    def points(run: Run) -> list[tuple[float, float]]:
        falling = sorted(run.outcome.prefill_s, reverse=True)
        return [(float(n + end), each) for n, each in enumerate(falling) for end in (0, 1)]

    return _lines(runs, points)


def _lines(runs: Sequence[Run], points: Callable[[Run], list[tuple[float, float]]]) -> list[Line]:
    return [Line(run.summary.policy, style(n), points(run)) for n, run in enumerate(runs)]


def _figures(requests: Sequence[Request], runs: Sequence[Run]) -> Iterator[str]:
    waits = first_tokens(requests, runs)
    waits_s = [wait_s for line in waits for wait_s, _ in line.points]
    yield _figure(
        "Time to first token",
        logarithmic("time to first token (s)", min(waits_s), max(waits_s)),
        Axis("requests answered by then (%)", 0, 100, [0, 25, 50, 75, 90, 100]),
        waits,
        "Further left is sooner: compare the lines at 50% for the usual request, and near the top "
        "for the slowest ones.",
    )
    hits = hits_over_time(requests, runs)
    yield _figure(
        "Hit share over time",
        linear("time since the first arrival (s)", span_s(requests)),
        linear("prompt tokens found cached (%)", min(100.0, HEADROOM * _highest(hits)) or 100.0),
        hits,
        "Higher is better: what a line lacks to the ideal, one shared cache that forgets nothing, "
        "was computed more than once.",
    )
    work = balance(runs)
    replicas = len(runs[0].outcome.prefill_s)
    yield _figure(
        "Replica balance",
        Axis("replicas, the busiest first", 0, replicas, range(0, replicas + 1, -(-replicas // 8))),
        linear("time spent on prefill (s)", HEADROOM * _highest(work)),
        work,
        "A flat line is work spread evenly and a low one is less work, since hits need no prefill; "
        "a steep left end is a replica that gets too much.",
    )


def _highest(lines: Sequence[Line]) -> float:
    return max(y for line in lines for _, y in line.points)


def _figure(title: str, x: Axis, y: Axis, lines: Sequence[Line], caption: str) -> str:
    legend = "".join(f"<li>{swatch(line)}{escape(line.name)}</li>" for line in lines)
    return (
        f'<figure><h2>{title}</h2>{plot(x, y, lines)}<ul class="legend">{legend}</ul>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(runs: Sequence[Run]) -> str:
    headings = "".join(f'<th scope="col">{heading}</th>' for heading, _, _ in COLUMNS)
    return f"<table><tr>{headings}</tr>{''.join(map(_row, runs))}</table>"


def _row(run: Run) -> str:
    row = run.summary.row()
    policy, *numbers = (escape(form.format(row[name])) for _, name, form in COLUMNS)
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<tr><th scope="row">{policy}</th>{cells}</tr>'


def _parameter(name: str, value: object) -> str:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"<div><dt>{escape(name)}</dt><dd>{escape(shown)}</dd></div>"
