"""The longest pauses of answers while a long prompt is computed: `python -m tests.bench.stalls`.

It needs a running cluster without other requests, such as `kvroute serve --replicas 2
--max-model-len 6000`, with or without `--slo-tpot-ms 200 --slo-ttft-ms 120000`.
"""

import argparse
import asyncio
import os
from functools import partial
from itertools import pairwise

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.bench.report import Row, Section
from tests.bench.timed_chat import TimedAnswer, timed_chat
from tests.support.waiting import until

STREAMS = 8
TOKENS = 150  # of each stream
WORDS = 700  # of the long prompt: about 4,100 tokens
ROUNDS = 2
WAIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stalls")
    parser.add_argument("--url", default=os.environ.get("KVROUTE_URL", "http://127.0.0.1:8000"))
    options = parser.parse_args()
    rows = [asyncio.run(measured(options.url, number)) for number in range(ROUNDS)]
    print(Section(f"{STREAMS} answers, and a long prompt", rows).markdown())


async def measured(url: str, number: int) -> Row:
    """Begin the answers, send the long prompt, and return the longest gaps.

    Args:
        number: the number of the round, so that no prompt is cached.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S) as client:
        model = (await client.models.list()).data[0].id
        begun = list[str]()

        async def ask(content: str, tokens: int) -> TimedAnswer:
            message: ChatCompletionMessageParam = {"role": "user", "content": content}
            on_begin = partial(begun.append, content)
            return await timed_chat(client, model, [message], tokens, on_begin=on_begin)

        stories = (f"{number} {story} tell a story" for story in range(STREAMS))
        answers = [asyncio.create_task(ask(story, TOKENS)) for story in stories]
        await until(lambda: len(begun) == STREAMS, within_s=WAIT_S)
        long = await ask(" ".join(f"{number}w{word}" for word in range(WORDS)), 1)
        gaps_s = [b - a for answer in answers for a, b in pairwise((await answer).times_s)]
    return {
        "prompt tokens": long.usage.prompt_tokens if long.usage else None,
        "first token of the prompt, s": long.times_s[0] - long.begun_s,
        "longest gap, s": max(gaps_s),
        "median gap, s": sorted(gaps_s)[len(gaps_s) // 2],
    }


if __name__ == "__main__":
    main()
