"""Compares kvroute's policies with the best rival in each cell. The worst cell is first."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean

from tests.bench.matrix.runs import Result
from tests.bench.report import Row

TIMES = {"p50": "ttft_p50_s", "p90": "ttft_p90_s", "p99": "ttft_p99_s"}
SLOWDOWNS = {"p50": "slowdown_p50", "p90": "slowdown_p90", "p99": "slowdown_p99"}

Means = Mapping[str, float]  # means of a policy's figures in a cell over all seeds


def compared(results: Iterable[Result], ours: Collection[str]) -> list[Row]:
    """Return a row for each cell and each policy of kvroute, with times to first token.

    Each figure is compared with the figure of the rival that is best in it.
    """
    rows = []
    for cell, policy, own, rivals in _pairs(results, ours):
        if "turns_per_min" in own:
            continue
        ratios = {name: _ratio(own, rivals, field) for name, field in TIMES.items()}
        row: Row = {"cell": cell, "policy": policy, "worst": max(ratios["p50"], ratios["p90"])}
        for name, field in TIMES.items():
            row |= {f"TTFT {name}": own[field], f"{name} ratio": ratios[name]}
        row["best p90"] = min(rivals, key=lambda rival: rivals[rival][TIMES["p90"]])
        rows.append(row | _shares(own, rivals))
    return _worst_first(rows)


def compared_sessions(results: Iterable[Result], ours: Collection[str]) -> list[Row]:
    """Return the rows for cells with a fixed number of sessions, with figures of turns."""
    rows = []
    for cell, policy, own, rivals in _pairs(results, ours):
        if "turns_per_min" not in own:
            continue
        turns = max(rival["turns_per_min"] for rival in rivals.values())
        slower = {name: _ratio(own, rivals, field) for name, field in SLOWDOWNS.items()}
        row: Row = {"cell": cell, "policy": policy}
        row["worst"] = max(turns / own["turns_per_min"], slower["p90"])
        row |= {"turns/min": own["turns_per_min"], "turns ratio": own["turns_per_min"] / turns}
        for name, field in SLOWDOWNS.items():
            row |= {f"slowdown {name}": own[field], f"{name} ratio": slower[name]}
        row |= {f"TTFT {name}": own[field] for name, field in TIMES.items()}
        rows.append(row | _shares(own, rivals))
    return _worst_first(rows)


def _pairs(
    results: Iterable[Result], ours: Collection[str]
) -> Iterable[tuple[str, str, Means, Mapping[str, Means]]]:
    """Yield cell, policy of kvroute, its figures and its rivals' figures, for all combinations."""
    cells: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        cells[result.cell][result.policy].append(result)
    for cell, by_policy in cells.items():
        means = {policy: _means(policy_results) for policy, policy_results in by_policy.items()}
        rivals = {policy: figures for policy, figures in means.items() if policy not in ours}
        for policy in ours:
            if policy in means and rivals:
                yield cell, policy, means[policy], rivals


def _means(results: Sequence[Result]) -> Means:
    """Return the mean over all seeds for each measured figure."""
    rows = [result.row() for result in results]
    return {
        name: mean(float(row[name] or 0.0) for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, int | float)
    }


def _ratio(own: Means, rivals: Mapping[str, Means], field: str) -> float:
    """Return kvroute's figure divided by the rivals' lowest one. Less is better."""
    return own[field] / min(rival[field] for rival in rivals.values())


def _shares(own: Means, rivals: Mapping[str, Means]) -> Row:
    most = max(rival["throughput_rps"] for rival in rivals.values())
    return {
        "hits": own["hit_share"],
        "more hits": own["hit_share"] - max(rival["hit_share"] for rival in rivals.values()),
        "goodput": own["goodput"],
        "more goodput": own["goodput"] - max(rival["goodput"] for rival in rivals.values()),
        "requests/s ratio": own["throughput_rps"] / most,
    }


def _worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: float(row["worst"] or 0.0), reverse=True)
