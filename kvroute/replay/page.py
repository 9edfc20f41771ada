"""A self-contained HTML page with a replay's results: tables, plots and parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from kvroute.replay.compare import Run
from kvroute.replay.plot import Line, Plot, svg
from kvroute.replay.report import WARM_UP, Column, cells, table_columns
from kvroute.replay.session_times import done_over_time
from kvroute.replay.workload.closed_loop import OPEN_LOOP, Loop
from kvroute.replay.workload.trace import Request, ideal_hit_tokens

QUANTILES = np.linspace(0, 1, 201)  # quantiles of the plot of times to first token
WINDOWS = 30  # number of equal time windows in the plot of hit shares

Ints = NDArray[np.int64]

TABLE_NOTE = (
    "Hits are the share of prompt tokens found cached; ideal is one shared cache that forgets "
    "nothing. Times to the first token (TTFT) are in seconds, the time for each later one (TPOT) "
    "is in milliseconds. Tokens/s are prompt tokens whose request had its first token while "
    "requests still came. Imbalance is the prefill time of the busiest replica over the mean. The "
    "first tenth of the requests fills the caches: it counts in req/s, tokens/s, imbalance and the "
    "two later plots alone."
)
SESSIONS_NOTE = (
    "A session lasts from its first request to its last token, thinking included, in seconds; its "
    "slowdown is that over what it takes on an idle replica which has every repeated block cached. "
    "Turns/min are those answered until a session ended and none was left to start. 90% done is "
    "the time from the first request until nine tenths of the sessions had ended. All sessions "
    "count."
)

CSS = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2430; --quiet: #5c6675; --rule: #e2e6ec;
  --c1: #0b6bcb; --c2: #d4500a; --c3: #0a8f5b; --c4: #b5308f; --c5: #a87800; --c6: #5b53c7 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --text: #e6e9ee; --quiet: #9aa4b2; --rule: #2c323b;
    --c1: #6db3f2; --c2: #ff9466; --c3: #4fd1a0; --c4: #f08fd6; --c5: #e6c04d; --c6: #b3acff } }
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
  gap: 2rem 1.5rem; margin-top: 2rem } figure { margin: 0 }
figure > svg { width: 100%; height: auto }
"""


def page(
    title: str,
    requests: Sequence[Request],
    runs: Sequence[Run],
    parameters: Mapping[str, object],
    loop: Loop = OPEN_LOOP,
) -> str:
    """Return the whole document."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{CSS}</style></head>
<body><h1>{escape(title)}</h1>
{"".join(_tables(runs))}\
<p class="note">{TABLE_NOTE}{f" {SESSIONS_NOTE}" if loop.sessions else ""}</p>
<div class="plots">{"".join(map(_figure, plots(requests, runs, loop)))}</div>
<h2>Parameters</h2>
<dl>{"".join(_parameter(*item) for item in parameters.items())}</dl>
</body></html>
"""


def first_tokens(requests: Sequence[Request], runs: Sequence[Run]) -> list[Line]:
    """Return quantiles of the measured requests' time to first token, in seconds."""

    def points(run: Run) -> list[tuple[float, float]]:
        waits_s = np.array(run.outcome.first_token_s) - run.outcome.arrival_s
        waits_s = waits_s[len(requests) // WARM_UP :]
        quantiles_s = np.quantile(waits_s, QUANTILES)
        return list(zip(quantiles_s.tolist(), (100 * QUANTILES).tolist(), strict=True))

    return _lines(runs, points)


def hits_over_time(requests: Sequence[Request], runs: Sequence[Run]) -> list[Line]:
    """Return the percentage of cached prompt tokens by arrival window, and the ideal."""
    input_tokens = np.array([request.input_tokens for request in requests])
    recorded_s = [request.arrival_s for request in requests]
    ideal = _shares_over_time(recorded_s, input_tokens, ideal_hit_tokens(requests))
    return [
        Line("ideal", ideal, is_reference=True),
        *_lines(
            runs,
            lambda run: _shares_over_time(
                run.outcome.arrival_s, input_tokens, run.outcome.hit_tokens
            ),
        ),
    ]


def _shares_over_time(
    arrivals_s: Sequence[float], input_tokens: Ints, hit_tokens: Sequence[int]
) -> list[tuple[float, float]]:
    """Return the middle of each arrival window in seconds, and its percentage of hits."""
    after_s = np.array(arrivals_s) - min(arrivals_s)
    span_s = after_s.max()
    window = np.minimum(WINDOWS * after_s // span_s, WINDOWS - 1).astype(int)
    tokens = np.bincount(window, input_tokens, WINDOWS)
    hits = np.bincount(window, hit_tokens, WINDOWS)
    middles_s = (np.arange(WINDOWS) + 0.5) * span_s / WINDOWS
    some = tokens > 0
    percent = 100 * hits[some] / tokens[some]
    return list(zip(middles_s[some].tolist(), percent.tolist(), strict=True))


def balance(runs: Sequence[Run]) -> list[Line]:
    """Return seconds of prefill per replica, as descending steps."""

    def points(run: Run) -> list[tuple[float, float]]:
        falling = sorted(run.outcome.prefill_s, reverse=True)
        return [(float(n + end), s) for n, s in enumerate(falling) for end in (0, 1)]

    return _lines(runs, points)


def _lines(runs: Sequence[Run], points: Callable[[Run], list[tuple[float, float]]]) -> list[Line]:
    return [Line(run.summary.policy, points(run)) for run in runs]


def plots(
    requests: Sequence[Request], runs: Sequence[Run], loop: Loop = OPEN_LOOP
) -> Iterator[Plot]:
    yield Plot(
        "Time to first token",
        "time to first token (s)",
        "requests answered by then (%)",
        first_tokens(requests, runs),
        "Lines further left are faster: compare them at 50% for the typical request, and near the "
        "top for the slowest requests.",
        is_log=True,
        y_end=100.0,
    )
    yield Plot(
        "Hit share over time",
        "time since the first arrival (s)",
        "prompt tokens found cached (%)",
        hits_over_time(requests, runs),
        "Higher is better. The gap to the ideal, one shared cache without eviction, "
        "is the share of tokens that were computed more than once.",
    )
    yield Plot(
        "Replica balance",
        "replicas, the busiest first",
        "time spent on prefill (s)",
        balance(runs),
        "A flat line means evenly spread work. A low line means less work, since hits need no "
        "prefill. A steep left end means that one replica gets too much work.",
    )
    if loop.sessions:
        yield Plot(
            "Sessions done",
            "time since the first arrival (s)",
            "sessions that have ended (%)",
            _lines(runs, lambda run: done_over_time(loop, run.outcome)),
            "Lines further left are faster. A line ends with the last session.",
            y_end=100.0,
        )


def _figure(plot: Plot) -> str:
    return (
        f"<figure><h2>{plot.title}</h2>{svg(plot)}<figcaption>{plot.caption}</figcaption></figure>"
    )


def _tables(runs: Sequence[Run]) -> Iterator[str]:
    for columns in table_columns([run.summary for run in runs]):
        yield f'<div class="scroll">{_table(runs, columns)}</div>\n'


def _table(runs: Sequence[Run], columns: Sequence[Column]) -> str:
    headings = "".join(f'<th scope="col">{heading}</th>' for heading, _, _ in columns)
    rows = "".join(_row(cells(run.summary, columns)) for run in runs)
    return f"<table><tr>{headings}</tr>{rows}</table>"


def _row(values: Sequence[str]) -> str:
    policy, *numbers = map(escape, values)
    return f'<tr><th scope="row">{policy}</th>{"".join(f"<td>{n}</td>" for n in numbers)}</tr>'


def _parameter(name: str, value: object) -> str:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"<div><dt>{escape(name)}</dt><dd>{escape(shown)}</dd></div>"
