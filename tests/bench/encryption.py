"""What TLS costs between routers and replicas, and in pulls: `python -m tests.bench.encryption`.

Both ends are in this process. CPU times are those of both ends together. With and without TLS is
measured in turns, so the ratios hold on a busy machine, too.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import numpy as np
import uvloop

from kvroute.contract.generation import Chunk, Emit, GenerateRequest
from kvroute.replica.fabric.puller import PullRun, Target
from kvroute.replica.fabric.server import BlockPlace, BlockServer
from kvroute.wire.link import Link, LostError, Stream, connect
from kvroute.wire.server import Server
from kvroute.wire.tls import OFF, WireTls, client_end, server_ends
from tests.bench.report import Row, Section

LOOPBACK = "127.0.0.1"
ROUNDS = 7  # measurements of each kind; their median counts
CONNECTIONS = 50
REQUESTS = 500
PROMPT_TOKENS = 2000
STREAMS, TOKENS = 64, 400
ROWS, ROW_BYTES = 64, 1_400_000  # the blocks of a pull
KINDS = (OFF, WireTls(is_on=True))


def encryption() -> list[Section]:
    """Measure everything, and return the tables."""
    wire = uvloop.run(_wire())
    pulls = [_pulls(rows) for rows in (1, ROWS)]
    notes = ("CPU time of both ends together; the median of several rounds.",)
    return [
        Section("TLS between routers and replicas", wire, notes),
        Section("TLS in pulls, blocks of 1.4 MB", pulls, notes),
    ]


async def _wire() -> list[Row]:
    acts: dict[str, tuple[Callable[[WireTls], Awaitable[float]], str]] = {
        "a connection, ms of CPU": (_connecting_ms, "{:.2f}"),
        f"a request of {PROMPT_TOKENS} tokens, us of CPU": (_request_us, "{:.0f}"),
        f"a token, {STREAMS} streams, us of CPU": (_token_us, "{:.2f}"),
    }
    rows: list[Row] = []
    for name, (measure, format_) in acts.items():
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for tls in KINDS:
                taken[tls.is_on].append(await measure(tls))
        rows.append(_row(name, format_, median(taken[False]), median(taken[True])))
    return rows


def _row(name: str, format_: str, plain: float, encrypted: float) -> Row:
    return {
        "cost of": name,
        "plain": format_.format(plain),
        "TLS": format_.format(encrypted),
        "TLS / plain": f"{encrypted / plain:.2f}",
    }


class _Engine:
    """Answers with one token, or with TOKENS for all streams in equal steps."""

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        tokens = 1 if len(request.token_ids) > 1 else TOKENS
        for number in range(tokens):
            emit(Chunk((number,), 0, is_last=number == tokens - 1))
            await asyncio.sleep(0)


async def _linked(tls: WireTls) -> tuple[Server, Link]:
    secret = os.urandom(32)
    server = Server(
        _Engine().generate, {}, max_requests=1000, secret=secret, tls=server_ends(tls, secret)
    )
    await server.start(LOOPBACK)
    return server, await _connect(server, tls)


async def _connect(server: Server, tls: WireTls) -> Link:
    end = client_end(tls, tls.mode, server.secret)
    return await connect("a", LOOPBACK, server.port, server.secret, within_s=30, tls=end)


async def _close(server: Server, *links: Link) -> None:
    for link in links:
        link.lose(LostError("over"))
    await server.close()


async def _connecting_ms(tls: WireTls) -> float:
    server, link = await _linked(tls)
    begun = time.process_time()
    links = [await _connect(server, tls) for _ in range(CONNECTIONS)]
    took_s = time.process_time() - begun
    await _close(server, link, *links)
    return 1e3 * took_s / CONNECTIONS


async def _request_us(tls: WireTls) -> float:
    server, link = await _linked(tls)
    ids = np.arange(PROMPT_TOKENS, dtype=np.uint32)
    begun = time.process_time()
    for number in range(REQUESTS):
        await _read(link.open(GenerateRequest(str(number), ids), max_waiting=10_000))
    took_s = time.process_time() - begun
    await _close(server, link)
    return 1e6 * took_s / REQUESTS


async def _token_us(tls: WireTls) -> float:
    server, link = await _linked(tls)
    ids = np.arange(1, dtype=np.uint32)
    begun = time.process_time()
    streams = [
        link.open(GenerateRequest(str(number), ids), max_waiting=1_000_000)
        for number in range(STREAMS)
    ]
    await asyncio.gather(*map(_read, streams))
    took_s = time.process_time() - begun
    await _close(server, link)
    return 1e6 * took_s / STREAMS / TOKENS


async def _read(stream: Stream) -> None:
    while await stream.next() is not None:
        pass


def _pulls(count: int) -> Row:
    rows = np.zeros((2 * ROWS, ROW_BYTES), np.uint8)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for tls in KINDS:
            taken[tls.is_on].append(_pull(tls, rows, count))
    plain, encrypted = (
        [median(values) for values in zip(*taken[is_on], strict=True)] for is_on in (False, True)
    )
    size_gb = count * ROW_BYTES / 1e9
    return {
        "blocks": count,
        "plain, ms": f"{1e3 * plain[0]:.1f}",
        "TLS, ms": f"{1e3 * encrypted[0]:.1f}",
        "plain, GB/s": f"{size_gb / plain[0]:.2f}",
        "TLS, GB/s": f"{size_gb / encrypted[0]:.2f}",
        "TLS / plain, time": f"{encrypted[0] / plain[0]:.2f}",
        "plain, ms of CPU": f"{1e3 * plain[1]:.1f}",
        "TLS, ms of CPU": f"{1e3 * encrypted[1]:.1f}",
        "TLS / plain, CPU": f"{encrypted[1] / plain[1]:.2f}",
    }


def _pull(tls: WireTls, rows: np.ndarray, count: int) -> tuple[float, float]:
    """Pull blocks once. Return the time and the CPU time in seconds."""
    key, places = b"k" * 32, {bytes([n]): BlockPlace(n, n) for n in range(ROWS)}
    ends = server_ends(tls, key)
    server = BlockServer(LOOPBACK, [0], key=key, format_="", find=places.get, rows=rows, tls=ends)
    chain = [Target(bytes([n]), ROWS + n) for n in range(count)]
    try:
        begun, deadline_s = time.process_time(), time.monotonic() + 60
        end = PullRun(rows, [chain]).run(
            server.address,
            key=key,
            format_="",
            deadline_s=deadline_s,
            tls=partial(client_end, tls, tls.mode, key),
        )
        took_s = time.process_time() - begun
        assert not end.reason, end
        return end.took_s, took_s
    finally:
        server.close()


if __name__ == "__main__":
    for section in encryption():
        print(section.markdown(), end="\n\n")
