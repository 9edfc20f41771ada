"""Figures of a closed loop (closed_loop.py): durations of sessions, and rate of answered turns."""

from dataclasses import dataclass

import numpy as np

from kvroute.replay.simulate import Outcome
from kvroute.replay.workload.closed_loop import Loop

SHARE_ENDED = 0.9  # most_sessions_s is the time until this share of the sessions has ended


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Figures of all sessions of a replay; None in an open loop, which has no sessions."""

    sessions: int | None = None
    session_mean_s: float | None = None  # from a session's first arrival to its last token
    session_p50_s: float | None = None
    session_p90_s: float | None = None
    slowdown_p50: float | None = None  # duration relative to the duration on an idle replica
    slowdown_p90: float | None = None
    slowdown_p99: float | None = None
    turns_per_min: float | None = None  # answered turns, before the number of sessions falls
    most_sessions_s: float | None = None  # from the first arrival until 90% of sessions have ended


def session_times(loop: Loop, outcome: Outcome) -> SessionTimes:
    """Return the figures of a replay's sessions. Durations include the users' thinking times."""
    if not loop.sessions:
        return SessionTimes()
    starts_s = np.array([outcome.arrival_s[session.turns[0]] for session in loop.sessions])
    ends_s = np.array([outcome.finished_s[session.turns[-1]] for session in loop.sessions])
    alone_s = np.array([session.alone_s for session in loop.sessions])
    durations_s = ends_s - starts_s
    p50_s, p90_s = np.percentile(durations_s, [50, 90])
    slow_p50, slow_p90, slow_p99 = np.percentile(durations_s / alone_s, [50, 90, 99])
    first_start_s = starts_s.min()
    full_until_s = ends_s[ends_s >= starts_s.max()].min()  # first end after the last start
    turns = int((np.array(outcome.finished_s) <= full_until_s).sum())
    return SessionTimes(
        len(loop.sessions),
        session_mean_s=float(durations_s.mean()),
        session_p50_s=float(p50_s),
        session_p90_s=float(p90_s),
        slowdown_p50=float(slow_p50),
        slowdown_p90=float(slow_p90),
        slowdown_p99=float(slow_p99),
        turns_per_min=60 * turns / float(full_until_s - first_start_s),
        most_sessions_s=float(np.quantile(ends_s, SHARE_ENDED) - first_start_s),
    )
