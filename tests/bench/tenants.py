"""Whether a tenant can detect another tenant's prompts: `python -m tests.bench.tenants`.

This takes about 5 minutes and 3 GB. There is one vLLM replica with the built-in model, and two
tenants, a and b, with API keys. In each round, tenant a sends a prompt. Then three requests follow
in random order, one at a time: b sends the same prompt (foreign), b sends a new prompt (new), and a
sends its prompt again (own). If b got first tokens faster for foreign prompts than for new ones, b
could detect which prompts a has sent. The result is the mean difference between foreign and new
prompts with its 95% bootstrap interval, and the share of rounds in which the foreign prompt was
faster.
"""

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.report import Row, Section
from tests.support.serving import KVROUTE, start_cluster

WORDS = 700
VOCABULARY = ["river", "stone", "paper", "glass", "winter", "signal", "garden", "engine", "copper"]
OPTIONS = ("--replicas", "1", "--routers", "1", "--max-model-len", "2048")
RESAMPLES = 10_000


def prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(WORDS))


def first_token_s(client: httpx.Client, text: str) -> float:
    """Return the seconds until the first event of a streamed answer."""
    body = {"model": BUILTIN_MODEL, "prompt": text, "max_tokens": 1, "stream": True}
    began_s = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        next(response.iter_lines())
        return time.perf_counter() - began_s


def measure(url: str, keys: Sequence[str], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds to the first token in each round."""
    rng = random.Random(0)
    times_s: dict[str, list[float]] = {"foreign": [], "new": [], "own": []}
    a, b = (client(url, key) for key in keys)
    with a, b:
        for text in (prompt(rng) for _ in range(4)):  # warm-up
            first_token_s(b, text)
        for _ in range(rounds):
            prompt_of_a, new_prompt = prompt(rng), prompt(rng)
            first_token_s(a, prompt_of_a)
            steps = [("foreign", b, prompt_of_a), ("new", b, new_prompt), ("own", a, prompt_of_a)]
            rng.shuffle(steps)
            for name, sender, text in steps:
                times_s[name].append(first_token_s(sender, text))
    return {name: np.array(times) for name, times in times_s.items()}


def client(url: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=120)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the mean difference."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.quantile(differences[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def report(times_s: dict[str, np.ndarray]) -> None:
    rows: list[Row] = [
        {
            "prompt": name,
            "first token p50 ms": round(1000 * float(np.quantile(times, 0.5))),
            "p90 ms": round(1000 * float(np.quantile(times, 0.9))),
        }
        for name, times in times_s.items()
    ]
    differences = 1000 * (times_s["foreign"] - times_s["new"])
    low, high = interval(differences)
    faster = float(np.mean(differences < 0))
    note = (
        f"foreign - new: {differences.mean():+.1f} ms on average, 95% interval {low:+.1f} to "
        f"{high:+.1f} ms; the foreign one was faster in {faster:.0%} of {len(differences)} pairs"
    )
    print(Section("First tokens of another tenant's prompts", rows, [note]).markdown())


def add_key(path: Path, tenant: str) -> str:
    command = [*KVROUTE, "keys", "add", "--tenant", tenant, "--file", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        keys = [add_key(path, tenant) for tenant in "ab"]
        with start_cluster(*OPTIONS, "--api-keys", str(path)) as cluster:
            report(measure(cluster.url, keys, rounds))


if __name__ == "__main__":
    main()
