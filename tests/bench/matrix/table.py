"""Ours against the best rival in each cell, the worst cell first."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean

from tests.bench.matrix.runs import Result
from tests.bench.report import Row

TIMES = {"p50": "ttft_p50_s", "p90": "ttft_p90_s", "p99": "ttft_p99_s"}
JUDGED = ("p50", "p90")  # by the worse of these, cells are ordered

Means = Mapping[str, float]  # a policy's figures in a cell, over all seeds


def compared(results: Iterable[Result], ours: Collection[str]) -> list[Row]:
    """Return a row for each cell and each policy of ours. Every figure is compared with that of
    the rival which is best in it."""
    cells: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for each in results:
        cells[each.cell][each.policy].append(each)
    rows = []
    for cell, by_policy in cells.items():
        means = {policy: _means(found) for policy, found in by_policy.items()}
        rivals = {policy: found for policy, found in means.items() if policy not in ours}
        rows += [
            _row(cell, policy, means[policy], rivals)
            for policy in ours
            if policy in means and rivals
        ]
    return sorted(rows, key=worst, reverse=True)


def worst(row: Row) -> float:
    """Return the ratio by which cells are ordered."""
    return max(float(row[f"{name} ratio"] or 0.0) for name in JUDGED)


def _means(results: Sequence[Result]) -> Means:
    names = [*TIMES.values(), "hit_share", "throughput_rps"]
    return {name: mean(float(each.row()[name]) for each in results) for name in names}


def _row(cell: str, policy: str, own: Means, rivals: Mapping[str, Means]) -> Row:
    row: Row = {"cell": cell, "policy": policy}
    for name, field in TIMES.items():
        row[name] = own[field]
        row[f"{name} ratio"] = own[field] / min(each[field] for each in rivals.values())
    row["best p90"] = min(rivals, key=lambda rival: rivals[rival][TIMES["p90"]])
    row["hits"] = own["hit_share"]
    row["hits more"] = own["hit_share"] - max(each["hit_share"] for each in rivals.values())
    most = max(each["throughput_rps"] for each in rivals.values())
    row["requests/s ratio"] = own["throughput_rps"] / most
    return row
