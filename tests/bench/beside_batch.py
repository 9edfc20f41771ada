"""Chats beside a batch job on one real engine, whose cache is too small for both.

Each prompt of the batch job is sent once. In one case, its requests have a retention hint that they
are unlikely to be continued. In the other case they have no hint, and the engine evicts the least
recently used blocks.
"""

import asyncio
import random
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import Order, RetentionHint
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.report import Row, Section
from tests.support.engines import Running, started

CHATS, TURNS = 6, 4
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 256, 60, 4
BATCH = 2  # number of prompts of the batch job for each turn of a chat
CACHE_MB = 160  # size of the cache: about 110 blocks of 32 tokens in float32
SEED = 1

# Returns the hint for a request of the chat with this number; 0: of the batch job.
Hints = Callable[[int], RetentionHint | None]


def hint(session: int) -> RetentionHint | None:
    return RetentionHint(session=session) if session else RetentionHint(Order.UNLIKELY)


def no_hint(session: int) -> RetentionHint | None:
    return None


def beside_batch() -> Section:
    rows: list[Row] = [
        {"hints": "none (LRU)", **asyncio.run(_share(no_hint))},
        {"hints": "batch requests are unlikely to be continued", **asyncio.run(_share(hint))},
    ]
    title = f"{CHATS} chats beside a batch job on one engine ({BUILTIN_MODEL})"
    return Section(title, rows)


async def _share(hints: Hints) -> Row:
    rng = random.Random(SEED)

    def passage(tokens: int) -> list[int]:
        return [rng.randrange(1_000, 40_000) for _ in range(tokens)]

    async with started("vllm", kv_cache_memory_mb=CACHE_MB, max_model_len=1024) as running:
        chats = {number: passage(FIRST_TOKENS) for number in range(1, CHATS + 1)}
        hit = asked = 0
        for turn in range(TURNS):
            for number, prompt in chats.items():
                cached, answer = await _ask(running, prompt, hints(number))
                if turn:
                    hit, asked = hit + cached, asked + len(prompt)
                chats[number] = prompt + answer + passage(TURN_TOKENS)
                for _ in range(BATCH):
                    await _ask(running, passage(FIRST_TOKENS), hints(0))
        return {
            "blocks in the cache": running.engine.facts.capacity_blocks,
            "cached share of later turns' tokens": hit / asked,
        }


async def _ask(
    running: Running, prompt: list[int], keep: RetentionHint | None
) -> tuple[int, list[int]]:
    """Send a request; return the number of cached tokens, and the answer."""
    ids = np.array(prompt, np.uint32)
    request = GenerateRequest("", ids, max_tokens=ANSWER_TOKENS)
    chunks = await running.run(replace(request, keep=keep))
    return chunks[0].cached_tokens, [token for chunk in chunks for token in chunk.token_ids]


if __name__ == "__main__":
    print(beside_batch().markdown())
