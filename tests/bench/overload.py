"""More load than a fleet can serve: `python -m tests.bench.overload` (about 3 minutes, 2 GB).

The cluster has four simulated replicas and two routers. Requests arrive at random times, even if
earlier ones are not answered yet, and all prompts are new. A refusal is late if it came only after
the request had waited.
"""

import argparse
import asyncio
import random
import time
from typing import NamedTuple

import httpx
import numpy as np

from tests.bench.report import Row, Section
from tests.support.serving import start_cluster

REPLICAS = 4
PREFILL_TOKENS_PER_S = 4000  # speed of a replica
MEAN_TOKENS, MAX_TOKENS = 1000, 8000  # mean and maximum length of a prompt
LATE_S = 0.5  # seconds from which a refusal counts as late; earlier ones count as immediate
LOADS = (0.9, 3.0)  # loads as shares of what the fleet can compute
CLIENTS = 500
FLEET = f"--engine simulated --replicas {REPLICAS} --routers 2".split()
SPEED = f"--simulated-prefill-tokens-per-s {PREFILL_TOKENS_PER_S} --simulated-decode-ms 1".split()


class Outcome(NamedTuple):
    status: int  # HTTP status; 0: there was no response
    took_s: float


class Load:
    """A client that sends a load to a cluster."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._outcomes: list[Outcome] = []
        self._health_s: list[float] = []

    async def run(self, load: float, seconds: float) -> Row:
        self._outcomes, self._health_s = [], []
        rate = load * REPLICAS * PREFILL_TOKENS_PER_S / MEAN_TOKENS
        ends_s = time.monotonic() + seconds
        polling = asyncio.create_task(self._poll_health())
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < ends_s:
                group.create_task(self._ask())
                await asyncio.sleep(self._rng.expovariate(rate))
        polling.cancel()
        return self._row(load)

    async def _ask(self) -> None:
        tokens = min(MAX_TOKENS, 1 + round(self._rng.expovariate(1 / MEAN_TOKENS)))
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(tokens)]
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        began_s, status = time.monotonic(), 0
        try:
            status = (await self._client.post("/v1/completions", json=body)).status_code
        except httpx.HTTPError as error:
            print(repr(error))
        self._outcomes.append(Outcome(status, time.monotonic() - began_s))

    async def _poll_health(self) -> None:
        while True:
            began_s = time.monotonic()
            await self._client.get("/health")
            self._health_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.2)

    def _row(self, load: float) -> Row:
        answered = [outcome.took_s for outcome in self._outcomes if outcome.status == 200]
        refused = [outcome.took_s for outcome in self._outcomes if outcome.status == 429]
        return {
            "load": f"{load:.0%}",
            "requests": len(self._outcomes),
            "answered": len(answered),
            "p50, p90 s": quantiles(answered, 0.5, 0.9),
            "refused": len(refused),
            "refused after p50, p90 ms": quantiles([1000 * wait_s for wait_s in refused], 0.5, 0.9),
            "refused late": sum(wait_s > LATE_S for wait_s in refused),
            "other": len(self._outcomes) - len(answered) - len(refused),
            "/health at most ms": round(1000 * max(self._health_s)),
        }


def quantiles(values: list[float], *of: float) -> str:
    return ", ".join(f"{np.quantile(values, share):.3g}" for share in of) if values else ""


async def measure(url: str, seconds: float, seed: int) -> list[Row]:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        load = Load(client, seed)
        return [await load.run(share, seconds) for share in LOADS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="duration of each load")
    parser.add_argument("--max-wait-s", type=float, nargs="+", default=[1, 30])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for wait_s in options.max_wait_s:
        with start_cluster(*FLEET, *SPEED, "--max-wait-s", f"{wait_s}") as cluster:
            rows = asyncio.run(measure(cluster.url, options.seconds, options.seed))
        print(Section(f"Overload with --max-wait-s {wait_s:g}", rows).markdown(), flush=True)


if __name__ == "__main__":
    main()
