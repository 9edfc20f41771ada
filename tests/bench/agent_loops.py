"""Agents on real engines, with and without seats: `python -m tests.bench.agent_loops`.

Two vLLM replicas with the built-in model serve several agents at once. Each agent sends its whole
conversation with OpenAI's client, waits for the answer, waits for a moment as if it ran a tool, and
sends the next turn. When a conversation is long enough, the agent begins a new one. The
conversations together need more KV cache than the replicas have. With seats, only as many sessions
may send requests as fit into the caches (kvroute/features/seats).
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np
from openai import AsyncOpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tests.bench.report import Row, Section
from tests.support.serving import start_cluster

MODEL = "bench"
WORDS = " ".join(topics.values()).split()  # the text of Python's manual
FIRST_WORDS = 300  # number of words of an agent's instructions and task
TURN_WORDS = 60  # number of words of a tool's result
TURNS = 12  # number of turns of a conversation
ANSWER_TOKENS = 16
TOOL_S = 1.0  # mean time of a tool in seconds
CACHE_MB = 256  # size of each replica's cache: about 5,800 tokens in float32
WARM_UP = 0.3  # share of the time at the beginning that is not counted


@dataclass(slots=True)
class Seen:
    """The results of the agents' turns since the end of the warm-up."""

    begun_s: float  # monotonic time of the end of the warm-up
    times_s: list[float] = field(default_factory=list)  # durations of complete turns
    prompt_tokens: int = 0
    cached_tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--agents", type=int, default=16, help="number of agents at the same time (default: 16)"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="duration for each setting")
    parser.add_argument("--seats", default="auto,off", help="values of --max-sessions")
    options = parser.parse_args()
    rows = [measured(seats, options.agents, options.seconds) for seats in options.seats.split(",")]
    title = f"{options.agents} agents on two vLLM replicas, {options.seconds:.0f} s each"
    print(Section(title, rows).markdown())


def measured(seats: str, agents: int, seconds: float) -> Row:
    """Run agents on a cluster, and return their results."""
    arguments = ["--replicas", "2", "--served-model-name", MODEL, "--max-sessions", seats]
    arguments += ["--kv-cache-memory-mb", str(CACHE_MB), "--max-wait-s", "0"]
    with start_cluster(*arguments) as cluster:
        seen = asyncio.run(run_agents(f"{cluster.url}/v1", agents, seconds))
    counted_s = seconds * (1.0 - WARM_UP)
    return {
        "--max-sessions": seats,
        "turns a minute": round(60.0 * len(seen.times_s) / counted_s, 1),
        "turn p50, s": round(float(np.quantile(seen.times_s, 0.5)), 2),
        "turn p90, s": round(float(np.quantile(seen.times_s, 0.9)), 2),
        "cached share": round(seen.cached_tokens / seen.prompt_tokens, 3),
    }


async def run_agents(url: str, agents: int, seconds: float) -> Seen:
    """Run the agents for this time, and return their results."""
    seen = Seen(time.monotonic() + WARM_UP * seconds)
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600.0) as client:
        loops = [asyncio.create_task(agent(client, number, seen)) for number in range(agents)]
        done, _ = await asyncio.wait(loops, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    for loop in done:
        loop.result()
    return seen


async def agent(client: AsyncOpenAI, number: int, seen: Seen) -> None:
    """Have one conversation after another, until cancelled."""
    rng = random.Random(number)
    for conversation in range(10_000):
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": text(rng, FIRST_WORDS)}
        ]
        for _ in range(TURNS):
            sent_s = time.monotonic()
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=ANSWER_TOKENS,
                temperature=0.0,
                extra_headers={"x-session-id": f"{number}-{conversation}"},
            )
            note(seen, time.monotonic() - sent_s, answer.usage)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": text(rng, TURN_WORDS)})
            await asyncio.sleep(rng.expovariate(1.0 / TOOL_S))


def note(seen: Seen, took_s: float, usage: CompletionUsage | None) -> None:
    """Record a turn, except during the warm-up."""
    if time.monotonic() < seen.begun_s or usage is None:
        return
    details = usage.prompt_tokens_details
    seen.times_s.append(took_s)
    seen.prompt_tokens += usage.prompt_tokens
    seen.cached_tokens += (details.cached_tokens if details else None) or 0


def text(rng: random.Random, words: int) -> str:
    """Return a random text."""
    begin = rng.randrange(len(WORDS) - words)
    return f"{rng.randrange(10**9)} " + " ".join(WORDS[begin : begin + words])


if __name__ == "__main__":
    main()
