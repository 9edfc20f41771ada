"""Chats of several assistants at once, for the picture of the live page."""

import asyncio
import math
import random
import time

import httpx

from kvroute.process.builtin_model import BUILTIN_MODEL

OPENING = "You work for Northwind Travel. Be polite, and never promise what you cannot know. "
ASSISTANTS = {
    "booking": "Help customers to book trains and hotels. Ask for dates, then offer choices. ",
    "refunds": "Decide about refunds. A ticket that was not used is refunded within thirty days. ",
    "translator": "Translate letters between English and Norwegian, and keep names as they are. ",
    "reviewer": "Review Python code. Name the line of each problem, then propose a better one. ",
}
NAMED = ("booking", "refunds")  # assistants whose beginning is a named prefix
SENTENCES = (
    "The train to Bergen leaves at seven in the morning.",
    "My luggage was lost somewhere between two stations.",
    "I should like a quiet room with a view of the harbour.",
    "Please compare this with what you said before.",
    "The weather is going to change before the weekend.",
)
REPEATS = 12  # of an assistant's rules, which makes about 200 tokens
TURNS = 6
BUSIEST = 10  # chats at a time, at the top of a wave
WAVE_S = 120.0
PAUSE_S = 1.0  # between two turns


def rules(assistant: str) -> str:
    """Return the system message of an assistant."""
    return OPENING + ASSISTANTS[assistant] * REPEATS


async def declare(url: str) -> None:
    """Declare the named prefixes."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for name in NAMED:
            messages = [{"role": "system", "content": rules(name)}]
            answer = await client.post("/v1/prefixes", json={"id": name, "messages": messages})
            answer.raise_for_status()


async def talk(url: str, for_s: float) -> None:
    """Hold chats for that long, more and fewer of them in waves."""
    begin_s, rng = time.monotonic(), random.Random(7)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        chats = set[asyncio.Task[None]]()
        while (passed_s := time.monotonic() - begin_s) < for_s:
            wave = (1 - math.cos(2 * math.pi * passed_s / WAVE_S)) / 2
            if len(chats) < 1 + BUSIEST * wave:
                chat = tasks.create_task(_chat(client, random.Random(rng.random())))
                chats.add(chat)
                chat.add_done_callback(chats.discard)
            await asyncio.sleep(0.2)
        for chat in chats:
            chat.cancel()


async def _chat(client: httpx.AsyncClient, rng: random.Random) -> None:
    assistant = rng.choice([*ASSISTANTS])
    is_named = assistant in NAMED  # then the cluster puts the rules before the messages
    messages = [] if is_named else [{"role": "system", "content": rules(assistant)}]
    for turn in range(TURNS):
        words = " ".join(rng.choices(SENTENCES, k=rng.randint(2, 12)))
        messages.append({"role": "user", "content": f"Question {turn + 1}: {words}"})
        body = {"model": BUILTIN_MODEL, "messages": messages, "max_tokens": rng.randint(20, 80)}
        prefix = {"prefix_id": assistant} if is_named else {}
        answer = await client.post("/v1/chat/completions", json=body | prefix)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        await asyncio.sleep(PAUSE_S)
