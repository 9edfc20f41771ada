"""The cost of many LoRA adapters: `python -m tests.bench.adapters` (some minutes).

A cluster of two vLLM replicas with a small model gets 1,000 adapters, all with other weights. Then
20 of them get requests. Replicas have memory for 16 adapters, and 4 in one batch.
"""

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from kvroute.blocks.chain import Scope
from kvroute.contract.records import Load, ReplicaRecord
from kvroute.features.adapters.added import AddedAdapter
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.placement.fleet import Fleet
from tests.bench.report import Row, Section
from tests.support.adapters import write_adapter
from tests.support.engines import LAYERS, WIDTH, shallow_model
from tests.support.records import facts
from tests.support.serving import Cluster, start_cluster

TIMEOUT_S = 300.0
CLIENTS = 8  # clients that ask for hot adapters at the same time
REQUESTS = 400  # requests for hot adapters
PLACEMENTS = 2000
REPLICAS = 16  # replicas of the placement that is timed


def main(
    adapters: Annotated[int, typer.Option(help="Number of adapters that are added.")] = 1000,
    hot: Annotated[int, typer.Option(help="Number of adapters that get requests.")] = 20,
) -> None:
    """Measure adding, memory, loading and placement with many adapters."""
    print(placements(adapters).markdown() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "adapters"
        for number in range(adapters):
            write_adapter(root / f"a{number}", seed=number, layers=LAYERS, width=WIDTH)
        model = str(shallow_model(Path(folder) / "model"))
        options = ("--model", model, "--served-model-name", BUILTIN_MODEL, "--replicas", "2")
        small = ("--kv-cache-memory-mb", "64", "--max-model-len", "1024")
        with start_cluster(*options, *small, "--lora-root", str(root)) as cluster:
            print(measured(cluster, adapters, hot).markdown(), flush=True)


def placements(adapters: int) -> Section:
    """Time placements for the base model and for adapters, with `adapters` of them registered."""
    fleet = Fleet(model="m", revision="", block_size=16, rng=random.Random(0))
    keys = [
        AddedAdapter(name=f"a{n}", path="/a", digest=f"{n:032x}", rank=8).key
        for n in range(adapters)
    ]
    records = [
        ReplicaRecord(
            f"r{number}",
            "1",
            0,
            facts(max_variants=16),
            Load(variants=tuple(random.Random(number).sample(keys, 16))),
        )
        for number in range(REPLICAS)
    ]
    fleet.update(records)
    running = [record.id for record in records]
    prompt = np.arange(2000, dtype=np.uint32)

    def median_us(loras: Sequence[str]) -> float:
        times_s = []
        for lora in loras:
            began_s = time.perf_counter()
            fleet.place(prompt, running, 0.0, Scope(lora))
            times_s.append(time.perf_counter() - began_s)
        return 1e6 * statistics.median(times_s)

    rows: list[Row] = [
        {"prompt for": "the base model", "µs": median_us([""] * PLACEMENTS)},
        {
            "prompt for": f"one of {adapters:,} adapters",
            "µs": median_us(random.Random(0).choices(keys, k=PLACEMENTS)),
        },
    ]
    return Section(f"Placement of a prompt of 2,000 tokens on {REPLICAS} replicas", rows)


def measured(cluster: Cluster, adapters: int, hot: int) -> Section:
    """Add the adapters, then ask for the hot ones."""
    before = memory_mb(cluster)
    add_s = []
    for number in range(adapters):
        body = {"lora_name": f"a{number}", "lora_path": f"a{number}"}
        began_s = time.perf_counter()
        post(cluster, "/v1/load_lora_adapter", body)
        add_s.append(time.perf_counter() - began_s)
    registered = memory_mb(cluster)
    list_s = timed(lambda: httpx.get(f"{cluster.url}/v1/models", timeout=TIMEOUT_S))
    cold_s = [timed(lambda n=n: ask(cluster, f"a{n}", "first")) for n in range(hot)]
    base_s = [timed(lambda n=n: ask(cluster, BUILTIN_MODEL, f"{n}")) for n in range(hot)]
    rng, replicas = random.Random(1), Counter[str]()

    def one(number: int) -> float:
        name = f"a{rng.randrange(hot)}"
        began_s = time.perf_counter()
        replicas[f"{name} {ask(cluster, name, f'{number}').headers['x-kvroute-replica']}"] += 1
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(CLIENTS) as pool:
        hot_s = [*pool.map(one, range(REQUESTS))]
    used = memory_mb(cluster)
    held = sum(len(each["loaded_on"]) for each in listed(cluster))
    milliseconds = {
        "add an adapter": add_s,
        "list all models": [list_s],
        "first request for an adapter": cold_s,
        "request for the base model": base_s,
        f"request for one of {hot} hot adapters, {CLIENTS} at once": hot_s,
    }
    rows: list[Row] = [
        {
            "": name,
            "median": f"{1e3 * statistics.median(times_s):.1f} ms",
            "p99": f"{1e3 * float(np.quantile(times_s, 0.99)):.1f} ms",
        }
        for name, times_s in milliseconds.items()
    ]
    pairs = Counter(pair.partition(" ")[0] for pair in replicas)
    notes = [
        f"Memory of a {kind}: {before[kind]:.0f} MB without adapters, {registered[kind]:.0f} MB "
        f"after they were added, {used[kind]:.0f} MB after the requests."
        for kind in before
    ]
    notes.append(
        f"A hot adapter was used on {statistics.mean(pairs.values()):.2f} replicas; at the end, "
        f"replicas had {held} adapters in memory."
    )
    return Section(f"{adapters:,} adapters, {hot} of them hot, on two vLLM replicas", rows, notes)


def memory_mb(cluster: Cluster) -> dict[str, float]:
    """Return the mean resident memory of a router, and of a replica with its engine."""
    routers = cluster.routers()
    replicas = cluster.titled("kvroute:Replica")
    own = [sum(map(_rss, (replica, *replica.children(recursive=True)))) for replica in replicas]
    return {
        "router": sum(map(_rss, routers)) / len(routers) / 1e6,
        "replica": sum(own) / len(own) / 1e6,
    }


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def timed(call: Any) -> float:
    """Return the seconds that a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def ask(cluster: Cluster, model: str, text: str) -> httpx.Response:
    body = {"model": model, "prompt": f"{model} {text} " + 40 * "word ", "max_tokens": 1}
    return post(cluster, "/v1/completions", body)


def listed(cluster: Cluster) -> list[dict[str, Any]]:
    return list(httpx.get(f"{cluster.url}/v1/adapters", timeout=TIMEOUT_S).json()["data"])


def post(cluster: Cluster, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{cluster.url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response


if __name__ == "__main__":
    typer.run(main)
