"""Two vLLM servers behind several gateways, one after another: `python -m tests.bench.attach`.

Agents have the same conversations behind each gateway, one turn after another, with pauses as if
they ran tools. Twice, a server is killed and started again. The servers run the built-in model on
CPUs; each has one core, so the gateway and the agents take time from them. `--minutes 30` is the
time for each gateway.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.bench.agent_loops import text
from tests.bench.llm_d_gateway import STANDS_FOR
from tests.bench.report import Row, Section
from tests.bench.stream.gateway import MISSING, gateway, is_installed
from tests.bench.stream.mock_engine import HOST
from tests.bench.timed_chat import timed_chat
from tests.support.attached import NAME, AttachableServer, attachable_servers
from tests.support.serving import ATTACH, launched

LLM_D = (sys.executable, "-m", "tests.bench.llm_d_gateway", "attach", "--policy", STANDS_FOR)
# Name of a gateway -> the command that starts it; none: SGLang's gateway.
WAYS = {
    "kvroute": ATTACH,
    "round robin": (*ATTACH, "--policy", "round-robin"),
    "llm-d 1.0's rule": LLM_D,
    "sglang-router": (),
}
AGENTS = 8  # conversations at the same time
SYSTEMS = 3  # long system prompts, which conversations share
SYSTEM_WORDS = 220
TURNS = 5
TURN_WORDS = 50
ANSWER_TOKENS = 24
TOOL_S = 2.0  # mean seconds between an answer and the next turn
KILLS = (0.4, 0.7)  # shares of the time after which a server is killed
WARM_UP = 0.1  # share of the time at the beginning that does not count


@dataclass
class Turns:
    """The turns of all agents behind one gateway, after the warm-up."""

    counts_from_s: float  # monotonic time
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0

    @property
    def is_counted(self) -> bool:
        return time.monotonic() >= self.counts_from_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attach")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for each gateway")
    parser.add_argument("--agents", type=int, default=AGENTS, help="conversations at a time")
    parser.add_argument("--seed", type=int, default=0)
    known = [name for name, command in WAYS.items() if command or is_installed()]
    parser.add_argument("--gateways", nargs="+", choices=known, default=known)
    options = parser.parse_args()
    rows = [
        row(name, measured(name, options.agents, 60 * options.minutes, options.seed))
        for name in options.gateways
    ]
    notes = [] if is_installed() else [MISSING]
    title = f"Two servers, {options.agents} agents, {options.minutes:g} minutes, two kills"
    print(Section(title, rows, notes).markdown())


def row(name: str, turns: Turns) -> Row:
    ttft_s, gaps_ms = (
        np.percentile(values, [50, 90, 99])
        for values in (turns.ttft_s, [1000 * gap_s for gap_s in turns.gaps_s])
    )
    return {
        "gateway": name,
        "turns": len(turns.ttft_s),
        "failed": turns.failed,
        "hit share": turns.cached_tokens / turns.prompt_tokens,
        **{f"TTFT p{q} s": float(value) for q, value in zip((50, 90, 99), ttft_s, strict=True)},
        **{f"gap p{q} ms": float(value) for q, value in zip((50, 90, 99), gaps_ms, strict=True)},
    }


def measured(name: str, agents: int, seconds: float, seed: int) -> Turns:
    """Run the agents behind a gateway, in front of servers with empty caches."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(attachable_servers(Path(resolve(BUILTIN_MODEL)), folder))
        url = stack.enter_context(started(name, servers))
        turns = asyncio.run(_run(url, servers, agents, seconds, seed))
    print(row(name, turns), file=sys.stderr, flush=True)
    return turns


@contextmanager
def started(name: str, servers: Sequence[AttachableServer]) -> Iterator[str]:
    """Run a gateway; yield its address."""
    if not (command := WAYS[name]):
        with gateway([server.port for server in servers], policy="cache_aware") as (port, _):
            yield f"http://{HOST}:{port}"
        return
    with launched(*(server.url for server in servers), command=command) as running:
        running.wait_for("kvroute ready at ")
        yield running.url


async def _run(
    url: str, servers: Sequence[AttachableServer], agents: int, seconds: float, seed: int
) -> Turns:
    turns = Turns(time.monotonic() + WARM_UP * seconds)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    async with client:
        running = [
            asyncio.create_task(_converse(client, random.Random(f"{seed} {number}"), turns))
            for number in range(agents)
        ]
        begun_s = time.monotonic()
        for share, server in zip(KILLS, servers, strict=False):
            await _unless_failed(running, begun_s + share * seconds - time.monotonic())
            server.kill()
            server.start()
        await _unless_failed(running, begun_s + seconds - time.monotonic())
        for agent in running:
            agent.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return turns


async def _unless_failed(running: Sequence["asyncio.Task[None]"], seconds: float) -> None:
    """Wait; if an agent fails meanwhile, raise its error at once."""
    done, _ = await asyncio.wait(
        running, timeout=max(0.0, seconds), return_when=asyncio.FIRST_EXCEPTION
    )
    for agent in done:
        agent.result()


async def _converse(client: AsyncOpenAI, rng: random.Random, turns: Turns) -> None:
    """Have one conversation after another, until cancelled. A failed turn ends a conversation."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / TOOL_S))
        system = text(random.Random(rng.randrange(SYSTEMS)), SYSTEM_WORDS)
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": system}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": text(rng, TURN_WORDS)})
            try:
                answer = await _answered(client, messages, turns)
            except OpenAIError:
                turns.failed += turns.is_counted
                break
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(rng.expovariate(1 / TOOL_S))


async def _answered(
    client: AsyncOpenAI, messages: Sequence[ChatCompletionMessageParam], turns: Turns
) -> str:
    """Return the answer to a conversation, and count the turn. Raises OpenAIError if it breaks."""
    try:
        answer = await timed_chat(client, NAME, messages, ANSWER_TOKENS)
    except (httpx.HTTPError, ValueError) as error:  # the connection has ended, or a line is cut
        raise OpenAIError(str(error)) from error
    if answer.usage is None:
        raise OpenAIError("the answer is not complete")
    if turns.is_counted and answer.times_s:
        turns.ttft_s.append(answer.times_s[0] - answer.begun_s)
        turns.gaps_s += [after - before for before, after in pairwise(answer.times_s)]
        turns.prompt_tokens += answer.usage.prompt_tokens
        turns.cached_tokens += answer.cached_tokens
    return answer.text


if __name__ == "__main__":
    main()
