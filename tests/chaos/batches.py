"""Kill processes at random moments while batches run: `python -m tests.chaos.batches --kills 100`.

Each line of each batch must have exactly one result at the end.
"""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import psutil
import typer
from openai import APIError, OpenAI

from tests.support.batches import FINAL, assert_complete, completed, create, questions
from tests.support.clients import openai_client
from tests.support.serving import READY, Cluster, kill_at_once, launched, redis_of

LINES = 300
BATCHES = 3  # batches that run at the same time
LONGEST_S = 6.0  # longest time between two blows
STOPPED_S = 10.0  # longest time for which a router is stopped
STILL_S = 240.0  # seconds without a new result after which the run has failed
OPTIONS = (
    *("--engine", "simulated", "--replicas", "2", "--routers", "3", "--cluster", "chaos"),
    *("--simulated-prefill-tokens-per-s", "20000", "--simulated-decode-ms", "1"),
)
# What is struck, and how often in relation to the others.
BLOWS = {"router": 6, "stopped router": 4, "replica": 2, "redis": 2, "cluster": 1}


class Run:
    """Batches on a cluster that is struck."""

    def __init__(self, folder: Path, *, seed: int, kills: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.kills = kills
        self.counts = dict.fromkeys(BLOWS, 0)
        self.open: list[str] = []
        self.complete = 0  # batches whose results were checked
        self.stopped: dict[psutil.Process, float] = {}  # router -> when it goes on

    def run(self) -> None:
        while sum(self.counts.values()) < self.kills or self.open:
            options = (*OPTIONS, "--files-dir", str(self.folder))
            with launched(*options) as cluster, openai_client(cluster) as client:
                cluster.wait_for(READY)
                self._strike(cluster, client)
                self.stopped.clear()

    def _strike(self, cluster: Cluster, client: OpenAI) -> None:
        """Strike until the whole cluster is killed, or everything is done."""
        progress, seen_s = -1, time.monotonic()
        while True:
            is_over = sum(self.counts.values()) >= self.kills
            if not is_over:
                self._create(client)
            self._check(client)
            if is_over and not self.open:
                return
            now = sum(max(0, completed(client, batch)) for batch in self.open)
            if now != progress:
                progress, seen_s = now, time.monotonic()
            assert time.monotonic() - seen_s < STILL_S, self.open
            self._go_on(everyone=is_over)
            time.sleep(self.random.uniform(0.2, LONGEST_S))
            if not is_over and self._blow(cluster) == "cluster":
                return

    def _create(self, client: OpenAI) -> None:
        while len(self.open) < BATCHES:
            with suppress(Exception):  # the router died meanwhile: the next attempt succeeds
                model = client.models.list().data[0].id
                self.open.append(create(client, questions(model, LINES)).id)

    def _check(self, client: OpenAI) -> None:
        for batch in [*self.open]:
            try:
                if client.batches.retrieve(batch).status not in FINAL:
                    continue
                assert_complete(client, batch, LINES)
            except APIError:  # what was struck answers later
                continue
            self.open.remove(batch)
            self.complete += 1

    def _blow(self, cluster: Cluster) -> str:
        (kind,) = self.random.choices([*BLOWS], [*BLOWS.values()])
        routers = [router for router in cluster.routers() if router not in self.stopped]
        replicas = cluster.titled("kvroute:Replica")
        if kind == "cluster":
            kill_at_once(cluster.processes())
        elif kind == "stopped router" and routers:
            router = self.random.choice(routers)
            router.send_signal(signal.SIGSTOP)
            self.stopped[router] = time.monotonic() + self.random.uniform(1.0, STOPPED_S)
        elif kind == "redis":
            redis_of(cluster).flushall()  # it loses its data, as if it had been restarted
        else:
            victims = {"router": routers, "replica": replicas}.get(kind)
            if not victims:
                return "nothing"
            with suppress(psutil.NoSuchProcess):
                self.random.choice(victims).kill()
        self.counts[kind] += 1
        print(f"{sum(self.counts.values())} {kind}; {self.complete} batches complete", flush=True)
        return kind

    def _go_on(self, *, everyone: bool) -> None:
        for router, until_s in [*self.stopped.items()]:
            if everyone or time.monotonic() > until_s:
                with suppress(psutil.NoSuchProcess):
                    router.send_signal(signal.SIGCONT)
                del self.stopped[router]


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often something is struck.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
) -> None:
    """Strike a cluster at random moments while batches run."""
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), seed=seed, kills=kills)
        run.run()
    print(f"{run.counts}: {run.complete} batches of {LINES} lines, each line with one result")


if __name__ == "__main__":
    typer.run(main)
