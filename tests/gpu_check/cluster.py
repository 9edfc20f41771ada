"""Measures a cluster of two replicas over HTTP: first tokens, hits, a killed replica, the audit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import httpx

from kvroute.command.own_cluster import COMMAND, own_cluster

READY_S = 900.0  # seconds that both replicas have to become ready
WORDS = ("river", "stone", "light", "seven", "apple", "north", "cloud", "green")
CLIENTS = 4  # questions about documents that are asked at the same time
KILLED_AT = 0.3  # share of the answer after which the replica is killed
# Starts kvroute with two replicas on one GPU: Ray counts two GPUs, and shows both replicas all.
ON_ONE_GPU = """
import os, sys
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
from kvroute.local import ray_cluster
start_node = ray_cluster._start_node
def start_with_two(*args, **options):
    import ray
    init = ray.init
    ray.init = lambda *args, **options: init(*args, **({"num_gpus": 2} | options))
    return start_node(*args, **options)
ray_cluster._start_node = start_with_two
from kvroute.cli import main
main()
"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured requests."""

    lengths: Sequence[int]  # words of prompts whose first token is measured, new and cached
    documents: int
    questions: int  # for each document
    document_tokens: int  # words of a document
    answer_tokens: int  # tokens of the answer in which a replica is killed


@dataclass(frozen=True)
class Streamed:
    """What one streamed answer has shown."""

    first_s: float  # seconds to the first token
    longest_pause_s: float  # longest time between two events
    replica: str
    cached_tokens: int
    host_tokens: int  # tokens of the prompt that came from host memory, as the router expected
    prompt_tokens: int
    text: str

    @property
    def cached_share(self) -> float:
        """Return the share of the prompt's tokens that came from a cache."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def host_share(self) -> float:
        """Return the share of the prompt's tokens that came from host memory."""
        return self.host_tokens / max(1, self.prompt_tokens)


def measure_cluster(
    options: Sequence[str], sizes: Sizes, *, shares_gpu: bool, is_ours: bool
) -> Iterator[str]:
    """Yield the figures in words, each in a line that begins with a dash.

    Args:
        options: Options of `kvroute serve`.
        sizes: The sizes of the requests.
        shares_gpu: Whether both replicas run on one GPU.
        is_ours: Whether the policy uses caches; only then are hits and a kill measured by length.
    """
    start_s = time.monotonic()
    program = ON_ONE_GPU if shares_gpu else COMMAND
    with (
        own_cluster(["--replicas", "2", *options], program) as url,
        httpx.Client(timeout=600) as client,
    ):
        _wait_for_replicas(url)
        yield f"- ready after {time.monotonic() - start_s:.0f} s"
        model = client.get(f"{url}/v1/models").json()["data"][0]["id"]

        def ask(prompt: str, tokens: int = 1, **more: Any) -> Streamed:
            return stream(client, url, model, prompt, tokens, **more)

        ask(words(50, 0))
        if is_ours:
            yield from first_tokens(ask, sizes.lengths)
        yield from questions(ask, sizes)
        if is_ours:
            yield from by_tier(ask, sizes)
            yield killed(client, url, ask, sizes.answer_tokens)
            yield audit(url)


def first_tokens(ask: Callable[..., Streamed], lengths: Sequence[int]) -> Iterator[str]:
    """Yield how much sooner the first token of a cached prompt comes."""
    for length in lengths:
        prompt = words(length, length)
        cold = ask(prompt)
        again = [ask(f"{prompt} {words(20, seed)}") for seed in (1, 2, 3)]
        cached_s = min(streamed.first_s for streamed in again)
        cached_tokens = ", ".join(f"{streamed.cached_tokens:,}" for streamed in again)
        yield (
            f"- {cold.prompt_tokens:,} tokens: first token {1e3 * cold.first_s:.0f} ms, "
            f"{1e3 * cached_s:.0f} ms for the fastest of three longer prompts with "
            f"{cached_tokens} cached tokens: {cold.first_s / cached_s:.1f} times sooner"
        )


def questions(ask: Callable[..., Streamed], sizes: Sizes) -> Iterator[str]:
    """Yield the hit share and the first tokens of questions about documents, in mixed order."""
    order = [number for number in range(sizes.documents) for _ in range(sizes.questions)]
    random.Random(1).shuffle(order)
    start_s = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        prompts = [
            f"{document(number, sizes)} {words(10, turn)}" for turn, number in enumerate(order)
        ]
        answers = [*clients.map(ask, prompts)]
    duration_s = time.monotonic() - start_s
    cached, prompt = (
        sum(getattr(answer, name) for answer in answers)
        for name in ("cached_tokens", "prompt_tokens")
    )
    first_s = [answer.first_s for answer in answers]
    yield (
        f"- {len(order)} questions about {sizes.documents} documents of "
        f"{sizes.document_tokens:,} tokens, {CLIENTS} at a time: {cached / prompt:.1%} of the "
        f"prompt tokens cached; first token {1e3 * median(first_s):.0f} ms (p50), "
        f"{1e3 * quantiles(first_s, n=100)[89]:.0f} ms (p90), "
        f"{1e3 * quantiles(first_s, n=100)[98]:.0f} ms (p99); {duration_s:.0f} s in all"
    )


def by_tier(ask: Callable[..., Streamed], sizes: Sizes) -> Iterator[str]:
    """Ask once more about each document, and yield the first tokens by where its blocks were."""
    answers = [
        ask(f"{document(number, sizes)} {words(10, 10_000 + number)}")
        for number in range(sizes.documents)
    ]
    tiers = {
        "GPU memory": [a for a in answers if a.cached_share > 0.9 and a.host_share < 0.1],
        "host memory": [a for a in answers if a.cached_share > 0.9 and a.host_share > 0.5],
        "neither": [a for a in answers if a.cached_share < 0.1],
    }
    for tier, found in tiers.items():
        if found:
            first_ms = 1e3 * median(answer.first_s for answer in found)
            yield (
                f"- {len(found)} more questions, one at a time, with the document in {tier}: "
                f"first token {first_ms:.0f} ms (p50)"
            )


def document(number: int, sizes: Sizes) -> str:
    """Return the text of a document, without a question."""
    return words(sizes.document_tokens, 1000 + number)


def killed(client: httpx.Client, url: str, ask: Callable[..., Streamed], tokens: int) -> str:
    """Return what a client sees of a replica that is killed in the middle of an answer."""
    prompt = words(100, 7)
    expected = ask(prompt, tokens)

    def kill(event: int, replica_id: str) -> None:
        if event == int(KILLED_AT * tokens):
            replicas = client.get(f"{url}/v1/cluster").json()["replicas"]
            pid = next(each["pid"] for each in replicas if each["id"] == replica_id)
            os.kill(pid, signal.SIGKILL)

    found = ask(prompt, tokens, on_event=kill)
    _wait_for_replicas(url)
    same = "the same text" if found.text == expected.text else "ANOTHER TEXT"
    return f"- a replica is killed: {same}, longest pause {found.longest_pause_s:.2f} s"


def audit(url: str) -> str:
    """Return the doctor's finding about the index."""
    command = [sys.executable, "-c", COMMAND, "doctor", "--url", url, "--audit", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    checks = json.loads(done.stdout)
    findings = [check["finding"] for check in checks if check["name"].startswith("audit")]
    problems = [check["name"] for check in checks if check["grade"] != "ok"]
    return f"- doctor: {'; '.join(findings)}; problems: {', '.join(problems) or 'none'}"


def stream(
    client: httpx.Client,
    url: str,
    model: str,
    prompt: str,
    tokens: int,
    on_event: Callable[[int, str], None] = lambda event, replica_id: None,
) -> Streamed:
    """Send a prompt and time its answer; `on_event` gets each event's number and the replica."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    start_s = last_s = time.monotonic()
    first_s, pause_s, text, usage = 0.0, 0.0, list[str](), dict[str, Any]()
    receipts: Sequence[Mapping[str, Any]] = ()
    headers = {"x-kvroute-receipt": "1"}
    with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        replica = response.headers.get("x-kvroute-replica", "")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event: Mapping[str, Any] = json.loads(line.removeprefix("data: "))
            now_s = time.monotonic()
            usage = event.get("usage") or usage
            receipts = event.get("kvroute_receipts") or receipts
            if not event.get("choices"):
                continue
            if text:
                pause_s = max(pause_s, now_s - last_s)
            else:
                first_s = now_s - start_s
            last_s = now_s
            text.append(event["choices"][0]["text"])
            on_event(len(text), replica)
    return Streamed(
        first_s,
        pause_s,
        replica,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        host_tokens=sum(
            candidate.get("host_tokens", 0)
            for receipt in receipts
            for candidate in receipt["replicas"]
            if candidate["id"] == replica
        ),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        text="".join(text),
    )


def words(count: int, seed: int) -> str:
    """Return a text of random words, each about one token."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _wait_for_replicas(url: str) -> None:
    """Wait until both replicas are ready.

    Raises:
        TimeoutError: They are not ready in time.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            if httpx.get(f"{url}/health", timeout=5).json()["replicas"] == 2:
                return
        time.sleep(0.5)
    raise TimeoutError(f"two replicas were not ready within {READY_S:.0f} s")
