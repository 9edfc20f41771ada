"""What one routing decision costs, by part: `python tests/bench/decision.py`."""

import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import ReplicaRecord
from replica.model import BUILTIN_MODEL, resolve
from router.fleet import Fleet
from router.prompt import Prompts

BLOCK = 32
REPLICAS = [f"r{i}" for i in range(64)]
FILLER_BLOCKS = 1_000_000
ROUNDS = 30


def main() -> None:
    prompts = Prompts(resolve(BUILTIN_MODEL))
    fleet = filled_fleet()
    print(f"{len(fleet.mirror):,} blocks on {len(REPLICAS)} replicas, block size {BLOCK}\n")
    print("| prompt tokens | tokenise | fingerprint | look up | place, whole |")
    print("|---|---|---|---|---|")
    for tokens in (500, 5_000, 50_000):
        print(f"| {tokens:,} | " + " | ".join(row(prompts, fleet, tokens)) + " |")


def filled_fleet() -> Fleet:
    """A fleet of 64 that holds a million blocks besides the prompts asked about."""
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    facts = {
        "prefill_tokens_per_s": 25_000.0,
        "attention_tokens": 32_768.0,
        "prefix_caching": True,
        "capacity_blocks": 50_000,
        "max_model_len": 131_072,
    }
    load = {"running": 0, "waiting": 0, "used_blocks": 0}
    fleet.update([ReplicaRecord(name, "1", 0, facts, load) for name in REPLICAS])
    rng = np.random.default_rng(0)
    for name in REPLICAS:
        fleet.mirror.join(name)
        blocks = rng.integers(0, 2**63, FILLER_BLOCKS // len(REPLICAS)).tolist()
        fleet.mirror.add(name, [Fingerprint(block) for block in blocks])
    return fleet


def row(prompts: Prompts, fleet: Fleet, tokens: int) -> list[str]:
    """The parts' times for a prompt of which one replica has half."""
    text = " ".join(random.Random(tokens).choices(["river", "stone", "cloud", "lamp"], k=tokens))
    token_ids = prompts._token_ids([text], False)[0][:tokens]
    chain = fleet.chain(token_ids, "")
    fleet.mirror.add(REPLICAS[7], chain[: len(chain) // 2])
    parts: list[Callable[[], object]] = [
        lambda: prompts._token_ids([text], False),
        lambda: fleet.chain(token_ids, ""),
        lambda: fleet.mirror.hits(chain),
        lambda: fleet.place(token_ids, "", REPLICAS, time.monotonic()),
    ]
    return [f"{milliseconds(part):.3f} ms" for part in parts]


def milliseconds(part: Callable[[], object]) -> float:
    """The median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        part()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


if __name__ == "__main__":
    main()
