"""The benefit of named prefixes on real engines: `python -m tests.bench.prefixes` (some minutes).

Two vLLM replicas with the built-in model start with two prefixes from a file. "Without" means the
same prompts, each with a different `cache_salt`, so that they share no blocks. Both ways alternate,
so that other load on the machine affects both equally.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.report import Row, Section
from tests.support.serving import start_cluster

LAW = "You are a careful lawyer. Answer in one sentence and name the law. " * 80
TASKS = {"law": LAW, "法律": "你是一名细心的律师。请用一句话回答，并说出法律的名称。" * 30}  # noqa: RUF001
BRIEF = "You are a careful clerk. Answer in one sentence and name the rule. " * 20
UNPINNED = f"Nobody keeps this. {LAW}"
OPTIONS = (
    *("--replicas", "2", "--max-model-len", "4096"),
    # A cache of 11,600 tokens, of which pins may take 4,600.
    *("--kv-cache-memory-mb", "512", "--pin-share", "0.4"),
)
ROUNDS = 5  # number of rounds that count, after one for warming up
FLOODS = 3  # size of a flood as a multiple of the size of all caches
FLOOD_TOKENS = 2_000  # length of a prompt of a flood
STREAMS = 20
GREEDY_PROMPTS = 20
SEED = 1


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    replica: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.json"
        tasks = [{"task_id": name, "prompt": text} for name, text in TASKS.items()]
        file.write_text(json.dumps(tasks))
        arguments = (*OPTIONS, "--multi-task-prompt", str(file))
        with start_cluster(*arguments) as cluster:
            asyncio.run(measure(f"{cluster.url}/v1"))


async def measure(url: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        for section in (kept, worth, replaced):
            print((await section(client)).markdown() + "\n", flush=True)


async def kept(client: AsyncOpenAI) -> Section:
    """Measure hits before the first request, and after floods of other prompts."""
    rows = [await cached(client, "ready", name) for name in TASKS]
    await declare(client, "unpinned", UNPINNED, pinned=False)
    rng = random.Random(SEED)
    for name, at_once in (("one by one", 1), ("8 at once", 8)):
        await flood(client, rng, at_once=at_once)
        when = f"{FLOODS} times the caches' size, {name}"
        rows += [await cached(client, when, name) for name in TASKS]
        rows.append(await cached(client, when, "unpinned"))
    return Section("Cached tokens of named prefixes", rows)


async def worth(client: AsyncOpenAI) -> Section:
    """Measure the benefit of prefixes that make up a third, or nine tenths, of each prompt."""
    await declare(client, "brief", BRIEF)
    rng = random.Random(SEED)
    rows = [
        await throughput(client, rng, "brief", at_once=12),
        await throughput(client, rng, "law", at_once=4),
        await first_tokens(client, rng, "law"),
    ]
    notes = [
        f"Medians of {ROUNDS} rounds; the ratio is the median of the rounds' ratios.",
        await same_answers(client),
    ]
    return Section("Benefit of named prefixes", rows, notes)


async def replaced(client: AsyncOpenAI) -> Section:
    """Measure the replacement of a killed replica, and a new version of a prefix."""
    rows = [await killed(client), await updated(client)]
    return Section("A killed replica, and a new version of a prefix", rows)


async def cached(client: AsyncOpenAI, when: str, name: str) -> Row:
    """Return, for each replica, the fewest cached tokens of a request with the prefix.

    Usually the first request on a replica has the fewest.
    """
    fewest: dict[str, int] = {}
    for _ in range(8):
        for answer in await asyncio.gather(*(ask(client, name, unlike()) for _ in range(8))):
            least = fewest.get(answer.replica, answer.cached_tokens)
            fewest[answer.replica] = min(least, answer.cached_tokens)
        if len(fewest) == 2:
            break
    values = sorted(fewest.values())
    row: Row = {"after": when, "prefix": name, "tokens": (await get(client, name))["tokens"]}
    return row | {
        "in full blocks": await full_tokens(client, name),
        "cached on each replica": ", ".join(f"{tokens:,}" for tokens in values),
    }


async def flood(client: AsyncOpenAI, rng: random.Random, *, at_once: int) -> None:
    """Send new prompts to both replicas."""
    gate = asyncio.Semaphore(at_once)

    async def send(prompt: list[int]) -> None:
        async with gate:
            await ask(client, None, prompt)

    blocks = sum(
        replica["capacity_blocks"] * replica["block_size"] for replica in await replicas(client)
    )
    prompts = [ids(rng, FLOOD_TOKENS) for _ in range(FLOODS * blocks // FLOOD_TOKENS + 1)]
    await asyncio.gather(*map(send, prompts))


async def throughput(client: AsyncOpenAI, rng: random.Random, name: str, *, at_once: int) -> Row:
    """Measure prompt tokens per second with a prefix that is a third of each prompt."""
    prefix_tokens = (await get(client, name))["tokens"]

    async def tokens_per_s(rests: Sequence[list[int]], is_isolated: bool) -> float:
        begun_s = time.monotonic()
        sent = (ask(client, name, rest, is_isolated=is_isolated) for rest in rests)
        answers = await asyncio.gather(*sent)
        return sum(answer.prompt_tokens for answer in answers) / (time.monotonic() - begun_s)

    async def both() -> tuple[float, float]:
        rests = [ids(rng, 2 * prefix_tokens) for _ in range(at_once)]
        return await tokens_per_s(rests, False), await tokens_per_s(rests, True)

    pairs = await rounds(both)
    title = f"prompt tokens/s, {prefix_tokens:,} of {3 * prefix_tokens:,} shared, {at_once} at once"
    return compared(title, pairs, [shared / apart for shared, apart in pairs], goal=1.26)


async def first_tokens(client: AsyncOpenAI, rng: random.Random, name: str) -> Row:
    """Measure the time to first token of single requests; the prefix is 90% of each prompt."""
    prefix_tokens = (await get(client, name))["tokens"]
    rest_tokens = round(prefix_tokens / 9)

    async def both() -> tuple[float, float]:
        rest = ids(rng, rest_tokens)
        shared = await ask(client, name, rest)
        apart = await ask(client, name, rest, is_isolated=True)
        return shared.ttft_s, apart.ttft_s

    pairs = await rounds(both)
    title = f"TTFT s, {prefix_tokens:,} of {prefix_tokens + rest_tokens:,} shared"
    return compared(title, pairs, [apart / shared for shared, apart in pairs], goal=2.0)


async def rounds(both: Callable[[], Awaitable[tuple[float, float]]]) -> list[tuple[float, float]]:
    await both()
    return [await both() for _ in range(ROUNDS)]


def compared(
    figure: str, pairs: Sequence[tuple[float, float]], ratios: Sequence[float], *, goal: float
) -> Row:
    """Return a row that compares both ways.

    Args:
        figure: The name of the measured figure.
        pairs: The figure with the prefix and without it, in each round.
        ratios: How many times better the prefix makes the figure, in each round.
        goal: The smallest ratio that is good enough.
    """
    shared, apart = (statistics.median(values) for values in zip(*pairs, strict=True))
    row: Row = {"": figure, "with the prefix": shared, "without": apart}
    return row | {
        "times better": statistics.median(ratios),
        "in each round": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "goal": goal,
    }


async def same_answers(client: AsyncOpenAI) -> str:
    """Compare greedy answers with and without the prefix's blocks, one request at a time."""
    words = " ".join(topics[name] for name in sorted(topics)).split()  # the text of Python's manual
    rng = random.Random(SEED)
    equal, longest = 0, 0
    for _ in range(GREEDY_PROMPTS):
        start, length = rng.randrange(len(words) - 250), rng.randrange(20, 250)
        question = f"What does this mean? {' '.join(words[start : start + length])}\nIt means"
        answers = [
            await ask(client, "brief", question, tokens=32, is_isolated=is_isolated)
            for is_isolated in (False, True)
        ]
        equal += answers[0].text == answers[1].text
        longest = max(longest, answers[0].prompt_tokens)
    return (
        f"Greedy answers of 32 tokens equal with the prefix and without: {equal} of "
        f"{GREEDY_PROMPTS}, to prompts of up to {longest} tokens."
    )


async def killed(client: AsyncOpenAI) -> Row:
    """Kill a replica; measure the time until its successor answers, and that answer's hits."""
    before = {replica["id"]: replica["pid"] for replica in await replicas(client)}
    begun_s = time.monotonic()
    os.kill(next(iter(before.values())), signal.SIGKILL)
    outcomes: Counter[str] = Counter()
    while True:
        answers = await asyncio.gather(
            *(ask(client, "law", unlike()) for _ in range(4)), return_exceptions=True
        )
        new = [a for a in answers if isinstance(a, Answer) and a.replica not in before]
        outcomes.update("ok" if isinstance(a, Answer) else "failed" for a in answers)
        if new:
            break
    least, full = min(answer.cached_tokens for answer in new), await full_tokens(client, "law")
    return {
        "": "kill -9 of a replica",
        "after s": time.monotonic() - begun_s,
        "then": f"its successor's first answer, {least:,} of {full:,} tokens cached",
        "requests meanwhile": outcomes.total(),
        "failed": outcomes["failed"],
    }


async def updated(client: AsyncOpenAI) -> Row:
    """Declare new versions during concurrent streams.

    The versions have different lengths, so that the number of a prompt's tokens shows which version
    it had. Any other number would be a mixture of versions.
    """
    alone = (await ask(client, None, "Why?")).prompt_tokens
    old = (await get(client, "law"))["tokens"]
    lengths: list[int] = []
    failures: list[OpenAIError] = []
    is_over = asyncio.Event()

    async def stream_on() -> None:
        while not is_over.is_set():
            try:
                answer = await ask(client, "law", "Why?", tokens=20)
            except OpenAIError as error:
                failures.append(error)
            else:
                lengths.append(answer.prompt_tokens - alone)

    async with asyncio.TaskGroup() as streams:
        for _ in range(STREAMS):
            streams.create_task(stream_on())
        while len(lengths) < STREAMS:
            await asyncio.sleep(0.1)
        begun_s = time.monotonic()
        await declare(client, "law", f"{LAW} Be kind.")
        took_s = time.monotonic() - begun_s
        new = (await get(client, "law"))["tokens"]
        while lengths.count(new) < STREAMS:
            await asyncio.sleep(0.1)
        is_over.set()
    counts = Counter(lengths)
    mixed = len(lengths) - counts[old] - counts[new]
    return {
        "": f"another text under {STREAMS} streams",
        "after s": took_s,
        "then": f"in use; {counts[old]} had the old text, {counts[new]} the new, {mixed} a mix",
        "requests meanwhile": len(lengths) + len(failures),
        "failed": len(failures),
    }


async def declare(client: AsyncOpenAI, name: str, text: str, *, pinned: bool = True) -> None:
    """Declare a prefix; wait until all replicas have cached it and routers use it."""
    body = {"id": name, "prompt": text, "pinned": pinned}
    shown: Any = await client.post("/prefixes", body=body, cast_to=object)
    while len(shown["warm_on"]) < 2 or shown["version_in_use"] != shown["version"]:
        await asyncio.sleep(0.1)
        shown = await get(client, name)


async def get(client: AsyncOpenAI, name: str) -> Any:
    return await client.get(f"/prefixes/{name}", cast_to=object)


async def full_tokens(client: AsyncOpenAI, name: str) -> int:
    shown = await get(client, name)
    return int(shown["tokens"] - shown["partial_tokens"])


async def replicas(client: AsyncOpenAI) -> list[dict[str, Any]]:
    cluster: Any = await client.get("/cluster", cast_to=object)
    return list(cluster["replicas"])


async def ask(
    client: AsyncOpenAI,
    name: str | None,
    prompt: str | list[int],
    *,
    tokens: int = 1,
    is_isolated: bool = False,
) -> Answer:
    """Send a prompt after the prefix. With `is_isolated`, it shares no blocks with others."""
    body = {"prefix_id": name} if name else {}
    salt = {"cache_salt": uuid.uuid4().hex} if is_isolated else {}
    begun_s, first_s, text = time.monotonic(), None, ""
    stream = await client.completions.create(
        model=BUILTIN_MODEL,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, **body, **salt},
    )
    async for event in stream:
        for choice in event.choices:
            first_s = first_s or time.monotonic()
            text += choice.text
    usage: Any = event.usage
    assert first_s is not None
    return Answer(
        text,
        stream.response.headers["x-kvroute-replica"],
        first_s - begun_s,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens or 0,
    )


def ids(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def unlike() -> str:
    """Return a question that was not sent before."""
    return f"{uuid.uuid4().hex}?"


if __name__ == "__main__":
    main()
