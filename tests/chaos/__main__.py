"""Inject faults, one at a time and two at a time, while clients read streams: `make chaos`.

Prints a table in Markdown. With --write, also writes docs/chaos.md. `--help` lists the options.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import typer

from kvroute.local.ports import free_port
from tests.chaos.client_faults import GRAMMAR_FAULTS, MEMORY_FAULTS
from tests.chaos.faults import BREAKING, FAULTS
from tests.chaos.load import Count, Load
from tests.chaos.pull_faults import PULL_FAULTS
from tests.chaos.victim import Fault, Victim
from tests.support.own_disk import CAN_MOUNT, ON_OWN_DISK
from tests.support.redis_server import Wire, Wired, redis_server
from tests.support.serving import COMMAND, start_cluster

HELD_S = 8.0  # seconds that a fault lasts
WHOLE_S = 90.0  # seconds that a cluster has to recover after a fault
STOPPED = "the cluster is told to stop"


@dataclass(frozen=True)
class Setting:
    """A kind of cluster, and the faults for it."""

    name: str
    replicas: int
    streams: int  # number of clients, each of which reads one stream at a time
    options: tuple[str, ...]  # options of `kvroute serve`
    faults: Mapping[str, Fault] = field(compare=False)


SIMULATED = Setting(
    "simulated replicas with a second tier of cache",
    replicas=3,
    streams=16,
    options=(
        *("--engine", "simulated", "--simulated-decode-ms", "20"),
        # 23 blocks, fewer than the streams need, so that blocks are evicted and reloaded.
        *("--host-cache-gb", "0.1"),
    ),
    faults=FAULTS,
)
PULLING = Setting(
    "simulated replicas that pull blocks from each other",
    replicas=3,
    streams=4,
    options=(
        *("--engine", "simulated", "--simulated-decode-ms", "20"),
        *("--simulated-prefill-tokens-per-s", "10000", "--host-cache-gb", "8", "--pull", "on"),
    ),
    faults=PULL_FAULTS,
)
SMALL = Setting(
    "simulated replicas with small caches",
    replicas=2,
    streams=4,
    options=(
        *("--engine", "simulated", "--simulated-decode-ms", "20"),
        # The long answers need all blocks of both replicas after some seconds.
        *("--simulated-blocks", "90"),
    ),
    faults=MEMORY_FAULTS,
)
VLLM = Setting(
    "vLLM replicas of the built-in model",
    replicas=2,
    streams=4,
    options=("--dtype", "float32", "--kv-cache-memory-mb", "256", "--max-model-len", "4096"),
    faults=GRAMMAR_FAULTS,
)
PAGE = Path("docs/chaos.md")
HEAD = """# Chaos test

`make chaos` injects faults into a running cluster, for {held:g} s each, while clients stream
answers whose text is known. The clients do not retry. This page is the report of one run.

| column | meaning |
|---|---|
| answers | complete answers during the fault |
| broken | answers that ended early, after their first token |
| refused | answers that ended before their first token |
| different | complete answers with another text than the known one |
| before | the longest time without a token in the {held:g} s before the fault |
| longest gap | the longest time without a token during the fault |
| disturbed | time from the fault until the last answer that broke or was refused, or until the \
last token that came more than 1 s after the one before |
| whole | time from the end of the fault until the cluster is whole again |
| memory | private memory of all routers and replicas together, when the cluster is whole again |

- A cluster is whole when all replicas are there, Redis can be written, and an
  [audit](operations/health.md#audits) finds no drift.
- When a router, HAProxy, or Serve's process beside HAProxy is killed, its open connections break,
  and so do the answers on them.
- The fault "Ray's head service (GCS) is killed" is not in the table, since `kvroute serve` ends
  with that service. On a fleet, `make test-cluster` kills it
  ([faults](operations/faults.md#rays-head-service-or-haproxy-ends)).
- In the row "the cluster is told to stop", it gets a SIGTERM: running answers are completed, and
  new requests are refused. *Whole* is the time until the cluster has ended.

Everything ran on {cores} CPU cores. The seed of the random numbers was {seed}.
"""
TABLE = """
{replicas} {name}, two routers and {streams} streams:

"""
COLUMNS = (
    *("fault", "answers", "broken", "refused", "different"),
    *("before", "longest gap", "disturbed", "whole", "memory"),
)
HEADING = f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|"


@dataclass(frozen=True)
class Row:
    """The results for one fault, or for several at once."""

    faults: Sequence[str]
    before: Count  # results in the time before the fault
    count: Count  # results during the fault, and until the cluster had recovered
    disturbed_s: float  # seconds from the fault to the last disturbance; 0: there was none
    whole_s: float | None  # seconds until the cluster had recovered; None: more than WHOLE_S
    memory_bytes: int

    @property
    def is_lossless(self) -> bool:
        """Return whether no answer was broken, refused or different.

        A cluster that stops may refuse requests.
        """
        refused = self.count.refused and self.faults != (STOPPED,)
        return not (self.count.broken or refused or self.count.different)

    def markdown(self) -> str:
        count, whole = self.count, "never" if self.whole_s is None else f"{self.whole_s:.1f} s"
        cells = (
            " and ".join(self.faults),
            *map(str, (count.answered, count.broken, count.refused, count.different)),
            *(f"{phase.longest_gap_s:.2f} s" for phase in (self.before, count)),
            *(f"{self.disturbed_s:.1f} s", whole),
            f"{self.memory_bytes / 1e6:.0f} MB",
        )
        return f"| {' | '.join(cells)} |"


@contextmanager
def victim(seed: int, setting: Setting) -> Iterator[Victim]:
    """Run a cluster for the faults. As root, it gets its own small disk."""
    command = ON_OWN_DISK if CAN_MOUNT else COMMAND
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        server, port = stack.enter_context(ExitStack()), free_port()
        server.enter_context(redis_server(port, folder))
        wire = stack.enter_context(Wire(free_port(), port).running())
        options = ("--replicas", f"{setting.replicas}", "--routers", "2", "--redis-url", wire.url)
        logged = ("--request-log", "/tmp/requests")
        cluster = stack.enter_context(
            start_cluster(*setting.options, *options, *logged, command=command)
        )
        wired = Wired(cluster, wire, server, port, folder)
        yield Victim(wired, setting.replicas, random.Random(seed))


async def is_whole(victim: Victim) -> bool:
    """Return whether all replicas serve, Redis is writable, and an audit finds no drift."""
    with suppress(httpx.HTTPError, ValueError, KeyError):
        async with httpx.AsyncClient(base_url=victim.url, timeout=20) as client:
            health = (await client.get("/health")).json()
            audit = (await client.get("/v1/cluster/audit")).raise_for_status().json()
            drifts = [drift for replica in audit["replicas"] for drift in replica["drift"].values()]
            ready = health["replicas"] == victim.replicas == len(audit["replicas"])
            return bool(ready and health["index"]["writable"] and set(drifts) == {0})
    return False


async def suffer(victim: Victim, load: Load, faults: Mapping[str, Fault], held_s: float) -> Row:
    """Inject these faults at once under the load, for `held_s` seconds; return the results."""
    before = load.count = Count()
    await asyncio.sleep(held_s)
    count = load.count = Count()
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        for fault in faults.values():
            await stack.enter_async_context(fault(victim))
        await asyncio.sleep(held_s)
    ended_s, whole_s = time.monotonic(), None
    while whole_s is None and time.monotonic() - ended_s < WHOLE_S:
        if await is_whole(victim):
            whole_s = time.monotonic() - ended_s
        await asyncio.sleep(0.2)
    disturbed_s = count.disturbed_at_s - began_s if count.disturbed_at_s else 0.0
    return Row((*faults,), before, count, disturbed_s, whole_s, victim.memory_bytes())


async def stop(victim: Victim, load: Load, held_s: float) -> Row:
    """Stop the cluster with SIGTERM under the load; return the results.

    Raises:
        AssertionError: /health did not report that the cluster stops.
    """
    before = load.count = Count()
    await asyncio.sleep(held_s)
    count, cluster, began_s = Count(), victim.wired.cluster, time.monotonic()
    load.count, memory_bytes = count, victim.memory_bytes()
    cluster.process.send_signal(signal.SIGTERM)
    statuses = set[int]()
    async with httpx.AsyncClient(base_url=victim.url, timeout=20) as client:
        while 503 not in statuses and cluster.process.poll() is None:
            with suppress(httpx.TransportError):  # too busy to answer, or its port is closed
                statuses.add((await client.get("/health")).status_code)
            await asyncio.sleep(0.02)
    assert 503 in statuses, statuses
    await asyncio.to_thread(cluster.process.wait, WHOLE_S)
    return Row((STOPPED,), before, count, 0.0, time.monotonic() - began_s, memory_bytes)


def torment(
    seed: int,
    schedule: Sequence[Sequence[str]],
    setting: Setting = SIMULATED,
    *,
    held_s: float = HELD_S,
) -> list[Row]:
    """Run the schedule, and return a row for each item. Each row is also printed at once."""
    with victim(seed, setting) as tormented:
        return asyncio.run(_torment(tormented, schedule, setting, held_s))


async def _torment(
    tormented: Victim, schedule: Sequence[Sequence[str]], setting: Setting, held_s: float
) -> list[Row]:
    rows, load = [], Load(tormented.url, setting.streams)
    async with load.running():
        for names in schedule:
            if names == (STOPPED,):
                rows.append(await stop(tormented, load, held_s))
            else:
                faults = {name: setting.faults[name] for name in names}
                rows.append(await suffer(tormented, load, faults, held_s))
            typer.echo(rows[-1].markdown())
    return rows


def scheduled(seed: int, pairs: int) -> list[tuple[str, ...]]:
    """Return the schedule: each fault alone, `pairs` random pairs of faults, then a stop.

    Two faults of Redis form no pair, because one of them can exclude the other.
    """
    of_two = [pair for pair in combinations(FAULTS, 2) if not all("Redis" in name for name in pair)]
    single = ((name,) for name in FAULTS)
    return [*single, *random.Random(seed).sample(of_two, pairs), (STOPPED,)]


def main(
    seed: Annotated[int, typer.Option(help="Seed for the choice of pairs and of processes.")] = 1,
    pairs: Annotated[int, typer.Option(help="Number of pairs of faults.")] = 6,
    only: Annotated[
        list[str] | None, typer.Option(help="Inject only these faults, one at a time.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write docs/chaos.md.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file as JSON.")
    ] = None,
) -> None:
    schedules: dict[Setting, list[tuple[str, ...]]] = {
        SIMULATED: scheduled(seed, pairs),
        PULLING: [(name,) for name in PULL_FAULTS],
        SMALL: [(name,) for name in MEMORY_FAULTS],
        VLLM: [*((name,) for name in GRAMMAR_FAULTS), (STOPPED,)],
    }
    page = [HEAD.format(held=HELD_S, cores=os.cpu_count(), seed=seed)]
    rows: list[Row] = []
    for setting, schedule in schedules.items():
        if only:
            schedule = [(name,) for name in only if (name,) in schedule]
        if not schedule:
            continue
        page.append(TABLE.format(**vars(setting)) + HEADING)
        typer.echo(page[-1])
        rows += (results := torment(seed, schedule, setting))
        page += [row.markdown() for row in results]
    if write:
        PAGE.write_text("\n".join((*page, "")))
    if json_file:
        json_file.write_text(json.dumps([[*row.faults, row.is_lossless] for row in rows]))
    lossy = [row for row in rows if not row.is_lossless and not {*row.faults} & {*BREAKING}]
    raise typer.Exit(1 if lossy or any(row.whole_s is None for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
