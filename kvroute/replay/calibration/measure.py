"""Measures the speed of a running cluster's replicas through its OpenAI endpoint."""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from rich.progress import Progress

from kvroute.client import key_headers, no_cluster
from kvroute.replay.calibration.fit import Decode, Prefill

TOKEN_IDS = range(100, 1000)  # ids that are ordinary tokens in every vocabulary
SHORTEST_TOKENS = 64  # tokens of the shortest prompt
REPETITIONS = 3  # number of times that each measurement runs; the median is used
LONG_S = 5.0  # seconds; prompts longer than one that took this time are skipped
SOON_S = 3.0  # longest prefill in seconds of the long prompts for decodes
BATCHES = (1, 2, 4, 8, 16)  # numbers of sequences with short prompts that decode on one replica
LONG_BATCHES = (1, 4)  # the same numbers with long prompts
ANSWER_TOKENS = 32  # tokens of each answer
LEAST_STEPS = 8  # number of shared steps below which a sample of decodes is ignored
WATCH_INTERVAL_S = 0.5  # seconds between two reads of the replicas' load
STALE_S = 3.0  # largest age in seconds of a reported load: the replica's lease


class ClusterError(RuntimeError):
    """The cluster cannot be measured. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The arrival times of one response, on one monotonic clock."""

    replica: str
    prompt_tokens: int
    sent_s: float
    tokens_s: list[float]  # arrival time of each token


@dataclass(frozen=True, slots=True)
class Measurement:
    prefills: list[Prefill]
    decodes: list[Decode]
    kv_tokens: int  # capacity of one replica's cache
    foreign_requests: int  # largest number of other clients' requests at one time


async def measure(url: str, model: str | None, progress: Progress) -> Measurement:
    """Measure the cluster, which takes a minute on fast engines and several on slow ones.

    Raises:
        ClusterError: The cluster cannot be measured.
    """
    timeout = httpx.Timeout(600, connect=10)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=key_headers()) as client:
        try:
            cluster = await _Cluster.find(client, url.rstrip("/"), model)
            async with cluster.watched():
                prefills = await cluster.prefills(progress)
                decodes = await cluster.decodes(prefills, progress)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClusterError(
                f"the cluster at {url} stopped answering ({error!r}); see its output"
            ) from None
    return Measurement(prefills, decodes, cluster.kv_tokens, cluster.foreign_requests)


class _Cluster:
    """A cluster under measurement; requests of other clients are counted."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        model: str,
        max_model_len: int,
        replica_status: Sequence[Mapping[str, Any]],
    ) -> None:
        self.replicas = len(replica_status)
        self.kv_tokens = min(
            replica["capacity_blocks"] * replica["block_size"] for replica in replica_status
        )
        self.foreign_requests = _requests(replica_status)  # the largest number so far
        self._client = client
        self._url = url
        self._model = model
        self._longest_tokens = min(max_model_len, self.kv_tokens) - ANSWER_TOKENS
        self._in_flight = 0
        self._levels: list[tuple[float, int]] = []  # (end time, requests in flight until then)
        self._rng = random.Random()

    @classmethod
    async def find(cls, client: httpx.AsyncClient, url: str, model: str | None) -> "_Cluster":
        try:
            facts = await _facts(client, url)
            if _requests(facts["replicas"]):
                await asyncio.sleep(STALE_S)
                facts = await _facts(client, url)
            cards = (await client.get(f"{url}/v1/models")).raise_for_status().json()["data"]
            card = _card([card for card in cards if "parent" not in card], model)
            replica_status = [
                replica for replica in facts["replicas"] if replica["model"] == card["id"]
            ]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ClusterError(no_cluster(url, error)) from None
        if not replica_status or not card["max_model_len"]:
            raise ClusterError(f"{url} has no replica yet; wait until kvroute status shows one")
        return cls(client, url, card["id"], card["max_model_len"], replica_status)

    async def prefills(self, progress: Progress) -> list[Prefill]:
        """Return times to first token of new prompts, sent one at a time, from short to long."""
        for _ in range(2 * self.replicas):
            await self._stream(self._prompt(SHORTEST_TOKENS), 1)
        lengths = list(_doubling(SHORTEST_TOKENS, self._longest_tokens))
        task = progress.add_task("prompts", total=len(lengths) * REPETITIONS)
        samples: list[Prefill] = []
        for _ in range(REPETITIONS):
            for tokens in lengths:
                progress.update(task, description=f"a prompt of {tokens} tokens", advance=1)
                stream = await self._stream(self._prompt(tokens), 1)
                samples.append(Prefill(tokens, stream.tokens_s[0] - stream.sent_s))
                if samples[-1].ttft_s > LONG_S:
                    lengths = [length for length in lengths if length <= tokens]
                    break
        progress.update(task, total=1, completed=1)
        return median_prefills(samples)

    async def decodes(self, prefills: Sequence[Prefill], progress: Progress) -> list[Decode]:
        """Return step times of growing batches, of short prompts and then of long ones."""
        soon = [prompt.tokens for prompt in prefills if prompt.ttft_s <= SOON_S]
        plan = [(SHORTEST_TOKENS, batch) for batch in BATCHES]
        plan += [(max(soon, default=SHORTEST_TOKENS), batch) for batch in LONG_BATCHES]
        batches = [
            [self._prompt(tokens) for _ in range(batch * self.replicas)]
            for tokens, batch in plan
            if batch * (tokens + ANSWER_TOKENS) <= self.kv_tokens
        ]
        task = progress.add_task("answers", total=len(batches) * REPETITIONS)
        for prompts in batches:
            progress.update(task, description=f"prompts of {len(prompts[0])} tokens")
            for prompt in prompts:
                await self._stream(prompt, 1)  # caches it, so that all start decoding together
        samples: list[list[Decode]] = [[] for _ in batches]
        for _ in range(REPETITIONS):
            for prompts, found in zip(batches, samples, strict=True):
                progress.update(task, description=f"{len(prompts)} answers at once", advance=1)
                found += await self._together(prompts)
        if not any(samples):
            raise ClusterError(
                "no answers decoded together long enough to be timed; measure again when the "
                "cluster is idle"
            )
        return [sample for found in samples for sample in median_decodes(found)]

    async def _together(self, prompts: Sequence[list[int]]) -> list[Decode]:
        """Return a sample for each replica, from its concurrent responses."""
        streams = await asyncio.gather(*(self._stream(ids, ANSWER_TOKENS) for ids in prompts))
        by_replica: dict[str, list[Stream]] = defaultdict(list)
        for stream in streams:
            by_replica[stream.replica].append(stream)
        found = map(decode_sample, by_replica.values())
        return [sample for sample in found if sample is not None]

    async def _stream(self, prompt: list[int], answer_tokens: int) -> Stream:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        address = f"{self._url}/v1/completions"
        sent_s, tokens_s = time.perf_counter(), []
        with self._counted():
            async with self._client.stream("POST", address, json=body) as answer:
                if answer.is_error:
                    raise ClusterError(_refusal(await answer.aread()))
                async for line in answer.aiter_lines():
                    if line.startswith('data: {"error"'):
                        raise ClusterError(_refusal(line.removeprefix("data: ").encode()))
                    if line.startswith("data: {"):
                        tokens_s.append(time.perf_counter())
        return Stream(answer.headers.get("x-kvroute-replica", ""), len(prompt), sent_s, tokens_s)

    def _prompt(self, tokens: int) -> list[int]:
        """Return random tokens, which no replica has cached."""
        return self._rng.choices(TOKEN_IDS, k=tokens)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._levels.append((time.perf_counter(), self._in_flight))
        self._in_flight += 1
        try:
            yield
        finally:
            self._levels.append((time.perf_counter(), self._in_flight))
            self._in_flight -= 1

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Count the requests of other clients until the block ends."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            replica_status = (await _facts(self._client, self._url))["replicas"]
            since_s = time.perf_counter() - STALE_S
            recent = [number for until_s, number in self._levels if until_s > since_s]
            # Each replica's reported load may be from a time when it had all of our requests.
            own = self.replicas * max([self._in_flight, *recent])
            self.foreign_requests = max(self.foreign_requests, _requests(replica_status) - own)
            await asyncio.sleep(WATCH_INTERVAL_S)


def median_prefills(samples: Sequence[Prefill]) -> list[Prefill]:
    """Return one sample for each length."""
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_tokens[sample.tokens].append(sample.ttft_s)
    return [Prefill(tokens, median(times_s)) for tokens, times_s in by_tokens.items()]


def median_decodes(samples: Sequence[Decode]) -> list[Decode]:
    """Return one sample for each number of sequences."""
    by_sequences: dict[int, list[Decode]] = defaultdict(list)
    for sample in samples:
        by_sequences[sample.sequences].append(sample)
    return [
        sorted(group, key=lambda sample: sample.step_s)[len(group) // 2]
        for group in by_sequences.values()
    ]


def decode_sample(streams: Sequence[Stream]) -> Decode | None:
    """Return the mean step while all streams of a replica decoded together.

    Returns None if that time was too short. Tokens in one packet have equal arrival times, so steps
    are counted, not timed one by one.
    """
    starts_s = max(stream.tokens_s[0] for stream in streams)
    ends_s = min(stream.tokens_s[-1] for stream in streams)
    steps_s, context_tokens = [], 0.0
    for stream in streams:
        within = [i for i, at_s in enumerate(stream.tokens_s) if starts_s <= at_s <= ends_s]
        if len(within) <= LEAST_STEPS:
            return None
        first, last = within[0], within[-1]
        steps_s.append((stream.tokens_s[last] - stream.tokens_s[first]) / (last - first))
        context_tokens += stream.prompt_tokens + (first + last + 1) / 2
    return Decode(len(streams), context_tokens, median(steps_s))


async def _facts(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    facts: dict[str, Any] = (await client.get(f"{url}/v1/cluster")).raise_for_status().json()
    return facts


def _card(cards: Sequence[dict[str, Any]], model: str | None) -> dict[str, Any]:
    """Return the card of the named model, or of the only one."""
    if model is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card["id"] == model:
            return card
    served = ", ".join(card["id"] for card in cards)
    raise ClusterError(f"--model is {model!r}; name one that the cluster serves: {served}")


def _requests(replica_status: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of the replicas' running and waiting requests."""
    return sum(replica["running"] + replica["waiting"] for replica in replica_status)


def _doubling(first: int, last: int) -> Iterator[int]:
    length = first
    while length < last:
        yield length
        length *= 2
    yield last


def _refusal(body: bytes) -> str:
    try:
        return f"the cluster refused: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the cluster refused: {body[:200]!r}"
