"""The cells of the policy benchmark: combinations of a trace, an engine, a load and a cache.

There are 640 combinations. `COVER` contains 20 of them: any two values of different columns occur
together in at least one of these cells. `KNOWN` contains cells in which an earlier version of
kvroute was worse than another policy, with the fleet's size of that measurement. `SESSIONS`
contains cells with a fixed number of sessions at the same time. In some of them, the sessions'
contexts fit into the caches, and in others they do not. `FAN_OUTS` contains cells with sub-agents
that start together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

REPLICAS = 8
REQUESTS = 3000  # number of requests of a trace that are used; more give the same results
# Size of the fleet's cache as a share of the trace's distinct blocks.
CACHES = {"tight": 0.2, "ample": 0.6}
# Share of the replicas that are slow, and their speed relative to the others.
SLOW_SHARE, SLOW_SPEED = 0.25, 0.5
NEAR_SATURATION = 0.95  # from this share of the saturation on, results depend on the seed
SEEDS = 3  # number of seeds near the saturation


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A setting in which all policies are compared.

    Exactly one of `load`, `rate` and `sessions` is set.
    """

    trace: str
    engine: str
    load: float | None = None  # share of the saturation
    rate: float | None = None  # requests per second; in a closed loop, session starts per second
    sessions: int | None = None  # number of sessions at the same time, in a closed loop
    cache: str | int  # a name in CACHES, or the number of tokens of each replica's cache
    is_closed: bool = False  # whether a session's turn waits for the answer to the turn before
    is_slow: bool = False  # whether some replicas are slow
    routers: int = 1
    replicas: int = REPLICAS
    limit: int | None = REQUESTS  # maximum number of requests of the trace; None: all

    def __str__(self) -> str:
        words = [
            self.trace + "-closed" * self.is_closed,
            self.engine,
            self._pace(),
            self.cache if isinstance(self.cache, str) else f"{self.cache // 1000}k",
        ]
        words += ["slow"] * self.is_slow
        words += [f"{self.routers} routers"] * (self.routers > 1)
        words += [f"{self.replicas} replicas"] * (self.replicas != REPLICAS)
        return " ".join(words)

    def _pace(self) -> str:
        if self.sessions:
            return f"{self.sessions} sessions"
        return f"{self.load:.0%}" if self.load else f"{self.rate:g}/s"

    @property
    def seeds(self) -> range:
        is_near = self.rate is not None or (self.load or 0.0) >= NEAR_SATURATION
        return range(SEEDS if is_near else 1)

    @property
    def at_saturation(self) -> "Cell":
        """Return the cell that defines the saturation, to which `load` is relative.

        In it, all replicas have full speed, and requests do not wait for earlier answers.
        """
        return replace(self, load=1.0, is_closed=False, is_slow=False, routers=1)


# Columns: trace, engine, load, cache, slow replicas, routers. "agents-closed" is the trace "agents"
# in a closed loop.
COVER_TABLE = """
conversation   l4-8b         50%   tight  slow     4
conversation   h100-8b       80%   tight  healthy  1
conversation   h200-8b       95%   ample  healthy  1
conversation   h100-70b-tp4  130%  ample  healthy  1
agents         l4-8b         80%   ample  healthy  1
agents         h100-8b       50%   ample  healthy  1
agents         h200-8b       130%  tight  slow     1
agents         h100-70b-tp4  95%   tight  healthy  4
documents      l4-8b         95%   tight  healthy  1
documents      h100-8b       130%  tight  healthy  4
documents      h200-8b       50%   ample  healthy  1
documents      h100-70b-tp4  80%   ample  slow     1
mixed          l4-8b         130%  ample  healthy  1
mixed          h100-8b       95%   ample  slow     1
mixed          h200-8b       80%   tight  healthy  4
mixed          h100-70b-tp4  50%   tight  healthy  1
agents-closed  l4-8b         130%  tight  healthy  1
agents-closed  h100-8b       95%   tight  slow     1
agents-closed  h200-8b       80%   ample  healthy  4
agents-closed  h100-70b-tp4  50%   ample  healthy  1
"""


def _cell(line: str) -> Cell:
    trace, engine, load, cache, health, routers = line.split()
    return Cell(
        trace=trace.removesuffix("-closed"),
        engine=engine,
        load=float(load.rstrip("%")) / 100,
        cache=cache,
        is_closed=trace.endswith("-closed"),
        is_slow=health == "slow",
        routers=int(routers),
    )


COVER = [_cell(line) for line in COVER_TABLE.strip().splitlines()]

_CHATS = Cell(
    trace="conversation", engine="h200-8b", load=0.8, cache=800_000, replicas=16, limit=None
)
_BUSY = Cell(
    trace="agents-busy", engine="h200-8b", rate=3.0, cache=800_000, replicas=16, limit=5000
)
KNOWN: Sequence[Cell] = [
    _BUSY,
    replace(_BUSY, rate=1.78, cache=400_000),
    replace(_BUSY, rate=0.08, cache=400_000, is_closed=True),
    _CHATS,
    replace(_CHATS, load=0.95),
    replace(_CHATS, load=1.3),
    replace(_CHATS, engine="l4-8b", load=0.95),
    replace(_CHATS, engine="h100-70b-tp4", load=0.95),
]
_AT_ONCE = Cell(
    trace="agents",
    engine="h200-8b",
    sessions=40,
    cache=800_000,
    is_closed=True,
    replicas=4,
    limit=None,
)
SESSIONS = [_AT_ONCE, replace(_AT_ONCE, sessions=70), replace(_AT_ONCE, sessions=140)]
FAN_OUTS = [
    Cell(trace="fan-outs", engine="h200-8b", load=0.5, cache="tight"),
    Cell(trace="fan-outs", engine="l4-8b", load=0.8, cache="tight"),
    Cell(trace="forks", engine="h200-8b", load=0.5, cache=800_000),
]
CELLS: Sequence[Cell] = [*KNOWN, *SESSIONS, *FAN_OUTS, *COVER]
