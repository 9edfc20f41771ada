"""Typical traffic of users, and the hits that an unlimited cache would have had."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from kvroute.blocks.fingerprint import Fingerprint, fingerprints, reusable_blocks, root
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.prompts.tokenizer import Prompts

ADAPTERS = ("sql", "law")
ENGLISH = "You are a careful lawyer. Answer in one sentence and name the law. " * 80
CHINESE = "你是一名细心的律师。请用一句话回答，并说出法律的名称。" * 30  # noqa: RUF001
TASKS = [{"task_id": 1, "prompt": ENGLISH}, {"task_id": "法律", "prompt": CHINESE}]

BLOCK = 32
WORDS = (
    "alpha river mountain house garden letter music simple answer question people market window "
    "paper number table season water forest bridge engine harbour silver morning evening"
).split()
FIRST_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Iris", "Jan")
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito")
JOBS = ("baker", "pilot", "nurse", "painter", "lawyer")


def people_table(rows: int = 30) -> str:
    """Return a table of people. A row has about 80 tokens."""
    rng = random.Random(1)
    lines = ["| number | name | age | city | job | telephone | remark |"]
    for number in range(rows):
        remark = " ".join(rng.choice(WORDS) for _ in range(30))
        lines.append(
            f"| {number} | {FIRST_NAMES[number % 10]} {WORDS[number % 20].title()} "
            f"| {20 + number} | {CITIES[number % 6]} | {JOBS[number % 5]} "
            f"| +47 555 {number:04d} | {remark} |"
        )
    return "\n".join(lines)


def table_questions() -> list[str]:
    return [f"What is the job of the person in row {3 * i + 1}?" for i in range(10)]


class UnboundedCache:
    """A cache with all full blocks of all prompts so far."""

    def __init__(self) -> None:
        self._prompts = Prompts(resolve(BUILTIN_MODEL))
        self._root = root(model=BUILTIN_MODEL, block_size=BLOCK)
        self._seen: set[Fingerprint] = set()

    def reusable_tokens(self, messages: list[dict[str, str]]) -> int:
        """Return the tokens in full blocks that earlier prompts also had, then add the prompt."""
        text = asyncio.run(self._prompts.chat_text({"messages": messages}, "string"))
        token_ids = asyncio.run(self._prompts.rendered(text))
        chain = fingerprints(token_ids, block_size=BLOCK, parent=self._root)
        blocks = 0
        for fingerprint in chain[: reusable_blocks(len(token_ids), BLOCK)]:
            if fingerprint not in self._seen:
                break
            blocks += 1
        self._seen.update(chain)
        return blocks * BLOCK


@dataclass
class Outcome:
    reusable_tokens: int = 0
    cached_tokens: int = 0  # number of the reusable tokens that were cached
    computed_tokens: Counter[str] = field(default_factory=Counter)  # by replica

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.reusable_tokens

    @property
    def imbalance(self) -> float:
        """Return the largest number of tokens that a replica computed, divided by the smallest."""
        work = sorted(self.computed_tokens.values())
        return work[-1] / work[0] if len(work) > 1 else float("inf")


def interleaved_chats(
    client: OpenAI,
    *,
    chats: int,
    turns: int,
    system_words: int,
    user_words: int,
    seed: int,
    max_tokens: int = 24,
) -> Outcome:
    """Send the first turns of all chats, then all second turns, and so on."""
    rng, cache, outcome = random.Random(seed), UnboundedCache(), Outcome()
    system = {"role": "system", "content": _text(rng, system_words)}
    histories = [[system] if system_words else [] for _ in range(chats)]
    for history in _in_turns(histories, turns):
        history.append({"role": "user", "content": _text(rng, user_words)})
        reusable = cache.reusable_tokens(history)
        answer = ask(client, history, max_tokens=max_tokens)
        outcome.reusable_tokens += reusable
        outcome.cached_tokens += min(reusable, answer.cached_tokens)
        outcome.computed_tokens[answer.replica] += answer.prompt_tokens - answer.cached_tokens
        history.append({"role": "assistant", "content": answer.text})
    return outcome


@dataclass(frozen=True)
class Answer:
    text: str
    replica: str
    expected_tokens: int
    prompt_tokens: int
    cached_tokens: int
    receipt: Any  # why the prompt went to this replica


def ask(
    client: OpenAI,
    messages: list[dict[str, str]],
    *,
    max_tokens: int = 16,
    model: str = BUILTIN_MODEL,
) -> Answer:
    """Send a greedy chat request, and return the answer."""
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=max_tokens,
        extra_headers={"x-kvroute-receipt": "1"},
    )
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Answer(
        text=raw.parse().choices[0].message.content or "",
        replica=raw.headers["x-kvroute-replica"],
        expected_tokens=int(raw.headers["x-kvroute-expected-tokens"]),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        receipt=(raw.parse().model_extra or {}).get("kvroute_receipts"),
    )


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _in_turns(histories: list[list[dict[str, str]]], turns: int) -> Iterator[list[dict[str, str]]]:
    for _ in range(turns):
        yield from histories


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))
