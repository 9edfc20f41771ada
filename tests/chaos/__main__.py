"""Faults one by one and two at a time under steady streams: `make chaos`; `--help` has options.

Markdown on stdout, and in docs/chaos.md with --write.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import typer

from kvroute.local.ports import free_port
from tests.chaos.faults import BREAKING, FAULTS, Victim
from tests.chaos.load import STREAMS, Count, Load
from tests.support.own_disk import CAN_MOUNT, ON_OWN_DISK
from tests.support.redis_server import Wire, Wired, redis_server
from tests.support.serving import COMMAND, start_cluster

REPLICAS = 3
STEADY_S, HELD_S, WHOLE_S = 3.0, 8.0, 90.0
OPTIONS = (
    *("--engine", "simulated", "--replicas", f"{REPLICAS}", "--routers", "2"),
    *("--simulated-decode-ms", "20", "--request-log", "/tmp/requests"),
    *("--host-cache-gb", "0.1"),  # 23 blocks, fewer than the streams need: they come and go
)
PAGE = Path("docs/chaos.md")
HEAD = """# Faults on purpose

`make chaos` runs streams whose answers are known, without retries, and does this to the cluster
meanwhile, for {held:g} s each. A broken answer ended after its first token, a refused one before.
The longest gap is before any token. *Disturbed* is the time from the fault to the last broken,
refused or late (1 s) token of any stream. *Whole* is when all replicas are there, Redis can be
written and an audit finds no drift, counted from the end of the fault. *Memory* is what the routers
and replicas have to themselves then, all together.

A killed router, HAProxy or Serve process beside it takes its open connections along: those answers
break. Ray's head service (GCS) is not in the table: `kvroute serve` ends with it, and on a fleet
`make test-cluster` kills it ([operations](operations.md#rays-head-service-or-haproxy-ends)).

This run: {replicas} simulated replicas with a second tier of cache, two routers and {streams}
streams on {cores} CPU cores. Seed {seed}.

"""
COLUMNS = (
    *("fault", "answers", "broken", "refused", "different"),
    *("longest gap", "disturbed", "whole", "memory"),
)


@dataclass(frozen=True)
class Row:
    faults: Sequence[str]
    count: Count
    disturbed_s: float
    whole_s: float | None  # None: not within WHOLE_S
    memory_bytes: int

    @property
    def is_lossless(self) -> bool:
        return not (self.count.broken or self.count.refused or self.count.different)

    def markdown(self) -> str:
        count, whole = self.count, "never" if self.whole_s is None else f"{self.whole_s:.1f} s"
        cells = (
            " and ".join(self.faults),
            *map(str, (count.answered, count.broken, count.refused, count.different)),
            *(f"{count.longest_gap_s:.2f} s", f"{self.disturbed_s:.1f} s", whole),
            f"{self.memory_bytes / 1e6:.0f} MB",
        )
        return f"| {' | '.join(cells)} |"


@contextmanager
def victim(seed: int) -> Iterator[Victim]:
    """A cluster to be tormented; as root, with a small disk of its own."""
    command = ON_OWN_DISK if CAN_MOUNT else COMMAND
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        server, port = stack.enter_context(ExitStack()), free_port()
        server.enter_context(redis_server(port, folder))
        wire = stack.enter_context(Wire(free_port(), port).running())
        options = (*OPTIONS, "--redis-url", wire.url)
        cluster = stack.enter_context(start_cluster(*options, command=command))
        yield Victim(Wired(cluster, wire, server, port, folder), random.Random(seed))


async def is_whole(victim: Victim) -> bool:
    """Every replica serves, and nothing is counted otherwise anywhere."""
    with suppress(httpx.HTTPError, ValueError, KeyError):
        async with httpx.AsyncClient(base_url=victim.url, timeout=20) as client:
            health = (await client.get("/health")).json()
            audit = (await client.get("/v1/cluster/audit")).raise_for_status().json()
            drifts = [drift for each in audit["replicas"] for drift in each["drift"].values()]
            ready = health["replicas"] == REPLICAS == len(audit["replicas"])
            return bool(ready and health["index"]["writable"] and set(drifts) == {0})
    return False


async def suffer(victim: Victim, load: Load, faults: Sequence[str], held_s: float) -> Row:
    """The faults all at once, under the load, for so long."""
    await asyncio.sleep(STEADY_S)
    count = load.count = Count()
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        for name in faults:
            await stack.enter_async_context(FAULTS[name](victim))
        await asyncio.sleep(held_s)
    ended_s, whole_s = time.monotonic(), None
    while whole_s is None and time.monotonic() - ended_s < WHOLE_S:
        if await is_whole(victim):
            whole_s = time.monotonic() - ended_s
        await asyncio.sleep(0.2)
    disturbed_s = count.disturbed_at_s - began_s if count.disturbed_at_s else 0.0
    return Row(faults, count, disturbed_s, whole_s, victim.memory_bytes())


def torment(seed: int, schedule: Sequence[Sequence[str]], *, held_s: float = HELD_S) -> list[Row]:
    """A row for each of the schedule; each is printed when it is known."""
    with victim(seed) as tormented:
        return asyncio.run(_torment(tormented, schedule, held_s))


async def _torment(
    tormented: Victim, schedule: Sequence[Sequence[str]], held_s: float
) -> list[Row]:
    rows, load = [], Load(tormented.url)
    async with load.running():
        for faults in schedule:
            rows.append(await suffer(tormented, load, faults, held_s))
            typer.echo(rows[-1].markdown())
    return rows


def scheduled(seed: int, pairs: int) -> list[tuple[str, ...]]:
    """Each fault alone, then so many pairs. A Redis that is away can have no other fault."""
    of_two = [pair for pair in combinations(FAULTS, 2) if not all("Redis" in name for name in pair)]
    return [*((name,) for name in FAULTS), *random.Random(seed).sample(of_two, pairs)]


def main(
    seed: Annotated[int, typer.Option(help="Which pairs, and which victims.")] = 1,
    pairs: Annotated[int, typer.Option(help="How often two faults happen at once.")] = 6,
    only: Annotated[
        list[str] | None, typer.Option(help="These faults instead, one by one.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write docs/chaos.md.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="The figures as JSON.")] = None,
) -> None:
    schedule = [(name,) for name in only] if only else scheduled(seed, pairs)
    head = HEAD.format(
        held=HELD_S, replicas=REPLICAS, streams=STREAMS, cores=os.cpu_count(), seed=seed
    ) + "\n".join((f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"))
    typer.echo(head)
    rows = torment(seed, schedule)
    if write:
        PAGE.write_text("\n".join((head, *(row.markdown() for row in rows), "")))
    if json_file:
        json_file.write_text(json.dumps([[*row.faults, row.is_lossless] for row in rows]))
    lossy = [row for row in rows if not row.is_lossless and not {*row.faults} & {*BREAKING}]
    raise typer.Exit(1 if lossy or any(row.whole_s is None for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
