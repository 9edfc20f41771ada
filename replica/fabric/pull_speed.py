"""The time that pulls take: measured once at the start, then corrected by each pull."""

import secrets
import time
from functools import partial
from statistics import median

import numpy as np

from kvroute.prefill.speed import Speed
from kvroute.replica.fabric.protocol import Rows
from kvroute.replica.fabric.pull import LinkSpeed
from kvroute.replica.fabric.puller import PullRun, Target
from kvroute.replica.fabric.server import BlockPlace, BlockServer
from kvroute.wire.tls import OFF, WireTls, client_end, server_ends

MEMORY = 4.0  # number of pulls after which an earlier one weighs 1/e
PROBE_ROWS = 8  # rows that the longer pull of the first measurement has
PROBE_REPEATS = 3
MAX_PROBE_S = 5.0  # limit of one pull of the measurement, in seconds


class PullSpeed:
    """The speed of one replica's pulls, from all peers together."""

    def __init__(self, first: LinkSpeed) -> None:
        self._first = first
        self._speed = Speed(memory=MEMORY)

    def record(self, size_bytes: int, took_s: float) -> None:
        """Learn from a pull that was not interrupted."""
        if size_bytes > 0 and took_s > 0:
            self._speed.learn(self._first.seconds(size_bytes), took_s)

    def current(self) -> LinkSpeed:
        """Return the expected speed of the next pull."""
        slowness = self._speed.slowness
        return LinkSpeed(self._first.latency_s * slowness, self._first.bytes_per_s / slowness)


def measured(host: str, row_bytes: int, tls: WireTls = OFF) -> LinkSpeed:
    """Measure pulls of this process from itself, of one row and of several.

    Args:
        host: the address on which the replica serves blocks.
        row_bytes: size of a row.
        tls: the replica's settings for TLS.

    Raises:
        OSError: the process cannot connect to itself.
    """
    rows = np.zeros((2 * PROBE_ROWS, row_bytes), np.uint8)
    key, places = secrets.token_bytes(32), {bytes([n]): BlockPlace(n, n) for n in range(PROBE_ROWS)}
    ends = server_ends(tls, key)
    server = BlockServer(host, [0], key=key, format_="", find=places.get, rows=rows, tls=ends)
    try:
        one_s, all_s = (_pull_s(server.address, key, rows, count, tls) for count in (1, PROBE_ROWS))
    finally:
        server.close()
    per_row_s = max((all_s - one_s) / (PROBE_ROWS - 1), all_s / PROBE_ROWS**2)
    return LinkSpeed(max(0.0, one_s - per_row_s), row_bytes / per_row_s)


def _pull_s(address: str, key: bytes, rows: Rows, count: int, tls: WireTls) -> float:
    chain = [Target(bytes([n]), PROBE_ROWS + n) for n in range(count)]
    took_s = []
    for _ in range(PROBE_REPEATS):
        deadline_s = time.monotonic() + MAX_PROBE_S
        end = PullRun(rows, [chain]).run(
            address,
            key=key,
            format_="",
            deadline_s=deadline_s,
            tls=partial(client_end, tls, tls.mode, key),
        )
        if end.reason:
            raise OSError(f"a pull of the replica from itself at {address} failed: {end.reason}")
        took_s.append(end.took_s)
    return median(took_s)
