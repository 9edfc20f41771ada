"""kvroute's first tokens are not much later than the best rival's, on made traces.

These are a few small cells of `make bench-policies`. Times are modelled: equal code gives equal
figures on any machine.
"""

import pytest

from tests.bench.matrix.cells import Cell
from tests.bench.matrix.runs import measure
from tests.bench.matrix.table import compared

LIMIT = 2000  # requests of each trace
MAX_P90 = 1.25  # ours, over the best rival's
RIVALS = ("llm-d", "sglang", "dynamo-wspt", "lmetric")

# What 8 replicas can just serve, in requests a second, as the benchmark once found it.
SATURATIONS = {
    "conversation h200-8b 100% ample": 13.66,
    "conversation l4-8b 100% tight": 1.078,
    "documents h100-70b-tp4 100% tight": 3.742,
    "mixed h100-8b 100% ample": 13.26,
    "agents h200-8b 100% ample": 5.507,
}
CELLS = [
    Cell(trace="conversation", engine="h200-8b", load=0.95, cache="ample", limit=LIMIT),
    Cell(
        trace="documents",
        engine="h100-70b-tp4",
        load=0.8,
        cache="tight",
        routers=4,
        limit=LIMIT,
    ),
    Cell(trace="mixed", engine="h100-8b", load=0.95, cache="ample", limit=LIMIT),
    Cell(trace="agents", engine="h200-8b", load=0.8, cache="ample", limit=LIMIT),
    Cell(trace="agents", engine="h200-8b", load=0.8, cache="ample", is_closed=True, limit=LIMIT),
    Cell(trace="conversation", engine="l4-8b", load=0.8, cache="tight", is_slow=True, limit=LIMIT),
]


def p90_ratio(cell: Cell) -> float:
    results = [measure(cell, policy, 0, {}, SATURATIONS) for policy in ("kvroute", *RIVALS)]
    (row,) = compared(results, ["kvroute"])
    return float(row["p90 ratio"] or 0.0)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_first_tokens_are_as_early_as_under_the_best_rival(cell: Cell) -> None:
    assert p90_ratio(cell) < MAX_P90
