"""The store of chats recognises a chat by its messages and finds changes in its history."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.generation import TokenIds
from kvroute.features.changes.chats import Chats
from kvroute.features.changes.router_changes import conversation
from kvroute.router.sessions.breaks import Break

Message = dict[str, Any]
LONG = "You are an agent that reads code and answers in plain words. " * 12
TOOLS = [{"type": "function", "function": {"name": "search", "description": "finds " * 30}}]


def render(messages: list[Any], tools: Any = None) -> TokenIds:
    """Return a token per character. The tools follow the first message, as in most templates."""
    texts = [f"<{message['role']}>{message['content']}<end>" for message in messages]
    whole = "".join([texts[0], f"<tools>{tools}", *texts[1:]]) + "<assistant>"
    return np.frombuffer(whole.encode("utf-32-le"), np.uint32)


class Client:
    """A client that sends the turns of one chat through one router."""

    def __init__(self, chats: Chats | None = None, **options: Any) -> None:
        self.chats = Chats(seed=5) if chats is None else chats
        self.messages: list[Message] = []
        self.options = options

    def ask(self, system: str, question: str, **options: Any) -> Break | None:
        """Send the next turn."""
        self.messages[:1] = [{"role": "system", "content": system}]
        self.messages.append({"role": "user", "content": question})
        options = self.options | options
        tokens = render(self.messages, options.get("tools"))
        broken = self.chats.store(self.messages, tokens, **options)
        answer = f"Here is what I know about {question!r}: {len(self.messages)}"
        self.messages.append({"role": "assistant", "content": answer})
        return broken


def system(nonce: str) -> str:
    return f"{LONG[:300]} Request {nonce}. {LONG}"


def test_a_chat_that_continues_is_not_broken() -> None:
    client = Client()
    questions = ("What does the function main do?", "And what does it return?", "Why is that so?")
    assert [client.ask(LONG, question) for question in questions] == [None] * 3
    assert len(client.chats) == 1


def test_a_nonce_in_the_system_message_breaks_each_turn_at_its_place() -> None:
    client = Client()
    assert client.ask(system("8c1f"), "What does the function main do?") is None
    for nonce in ("03ab", "77de"):
        before = render(client.messages[:-1])
        broken = client.ask(system(nonce), "And what does it return then?")
        assert broken is not None
        assert (broken.role, broken.message) == ("system", 0)
        assert broken.difference.token == len("<system>" + LONG[:300] + " Request ")
        assert (broken.difference.before.tokens, broken.difference.after.tokens) == (4, 4)
        assert broken.lost.start == broken.difference.token + 4
        assert len(before) - 20 < broken.lost.stop <= len(before)
    assert len(client.chats) == 1, "a chat has one record"


def test_a_rewritten_message_of_the_history_is_reported_with_its_number() -> None:
    client = Client()
    client.ask(LONG, "What does the function main do?")
    client.ask(LONG, "And what does it return then? And where is that used in turn? Say more.")
    client.messages[2]["content"] = "[an answer that was summarised]"
    broken = client.ask(LONG, "Who wrote all of this code?")
    assert broken is not None
    assert (broken.role, broken.message) == ("assistant", 2)


def test_messages_dropped_from_the_history_break_it() -> None:
    client = Client()
    for question in ("the function main", "the class Router", "the module chats"):
        client.ask(LONG, f"What is {question}?")
    del client.messages[1:3]
    broken = client.ask(LONG, "And what else is there to know?")
    assert broken is not None
    assert (broken.role, broken.message) == ("user", 1)
    assert broken.difference.before.tokens > 0


def test_other_tools_break_a_chat_with_the_same_messages() -> None:
    client = Client()
    client.ask(LONG, "What does the function main do?", tools=TOOLS)
    broken = client.ask(LONG, "And what does it return then?", tools=[*TOOLS, *TOOLS])
    assert broken is not None
    assert (broken.role, broken.message) == ("tools", None)


def test_another_rendering_of_the_same_messages_is_blamed_on_the_template() -> None:
    chats, messages = Chats(seed=5), [{"role": "user", "content": LONG}] * 2
    chats.store(messages, render(messages, "one way"))
    broken = chats.compare(messages, render(messages, "and another way"))
    assert broken is not None
    assert (broken.role, broken.message) == ("template", None)


def test_a_rewritten_last_message_is_no_break() -> None:
    client = Client()
    client.ask(LONG, "What does the function main do? [the time is 12:01]")
    client.messages[1]["content"] = "What does the function main do?"
    assert client.ask(LONG, "And what does it return then? [the time is 12:02]") is None


def test_two_chats_with_the_same_beginning_are_stored_separately() -> None:
    chats = Chats(seed=5)
    first, second = Client(chats), Client(chats)
    for question in ("What does the function main do?", "And what does it return then?"):
        assert first.ask(LONG, question) is None
        assert second.ask(LONG, f"In another file: {question}") is None
    assert len(chats) == 2


def test_two_agents_with_the_same_question_have_two_chats() -> None:
    chats = Chats(seed=5)
    first, second = Client(chats), Client(chats)
    assert first.ask(LONG, "What does it do?") is None
    assert second.ask(LONG[::-1], "What does it do?") is None
    assert first.ask(LONG, "And what does it return then?") is None


def test_chats_with_different_salts_are_not_compared() -> None:
    chats = Chats(seed=5)
    Client(chats, scope="mine").ask(system("8c1f"), "What does the function main do?")
    theirs = Client(chats, scope="yours")
    assert theirs.ask(system("03ab"), "What does the function main do?") is None
    assert len(chats) == 2


def test_comparing_a_chat_does_not_store_it() -> None:
    chats, messages = Chats(seed=5), [{"role": "user", "content": LONG}]
    assert chats.compare(messages, render(messages)) is None
    assert (len(chats), chats.used_tokens) == (0, 0)


def test_a_moved_cache_control_and_a_text_in_a_list_are_no_change() -> None:
    chats = Chats(seed=5)
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG[5:]}]
    listed = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"], **mark}]}
        for message in plain
    ]
    chats.store(listed, render(plain, "one way"))
    broken = chats.compare([*plain, *listed], render(plain, "and another way"))
    assert broken is not None
    assert broken.role == "template", "no message changed"


def test_the_store_is_bounded_and_drops_the_oldest_chat_first() -> None:
    chats = Chats(capacity_tokens=20_000, seed=5)
    clients = [Client(chats) for _ in range(40)]
    for number, client in enumerate(clients):
        client.ask(system("8c1f"), f"What does the function number {number} do in this file?")
        assert chats.used_tokens <= 20_000
    assert 0 < len(chats) < 40
    assert clients[0].ask(system("03ab"), "And why is that so?") is None
    assert clients[-1].ask(system("03ab"), "And why is that so?") is not None
    assert len(chats._by_message) <= 8 * len(chats)


def test_a_chat_of_short_messages_only_is_not_stored() -> None:
    client = Client()
    client.ask("Hi.", "Hello?")
    assert len(client.chats) == 0


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user", "content": LONG}] * 5000, [{"role": "user", "content": LONG}]],
)
def test_a_chat_that_is_too_long_is_not_stored(messages: list[Any]) -> None:
    chats = Chats(capacity_tokens=1000, seed=5)
    assert chats.store(messages, np.arange(900, dtype=np.uint32)) is None
    assert len(chats) == 0


def test_instructions_of_every_api_come_first_and_billing_lines_do_not_count() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    billed = [{"type": "text", "text": "x-anthropic-billing-header: 7"}]
    text = [{"type": "text", "text": LONG}]
    expected = [{"role": "system", "content": text}, *messages]
    chat = [{"role": "system", "content": [*billed, *text]}, *messages]
    assert conversation("/v1/chat/completions", {"messages": chat}) == expected
    anthropic = {"system": [*billed, *text], "messages": messages}
    assert conversation("/v1/messages", anthropic) == expected
    assert conversation("/v1/messages", {"messages": messages}) == messages
    response = {"instructions": LONG, "input": "Hello"}
    assert conversation("/v1/responses", response) == expected


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"input": {}, "messages": None}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_body_without_messages_is_no_chat(path: str, body: dict[str, Any]) -> None:
    assert conversation(path, body) is None


def test_a_completion_is_no_chat() -> None:
    assert conversation("/v1/completions", {"prompt": "Hello", "messages": []}) is None


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.sampled_from([LONG, LONG[7:], LONG[31:], "short", "\ud800" * 20])
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "nobody"])
CONTENTS = TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS)) | JSON
MESSAGES = st.builds(lambda role, content: {"role": role, "content": content}, ROLES, CONTENTS)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES | JSON, max_size=5) | JSON},
    optional={"tools": JSON, "system": JSON, "input": JSON, "instructions": JSON},
)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/messages", "/v1/responses"])


@given(st.lists(st.tuples(PATHS, BODIES, st.integers(0, 4)), max_size=8))
def test_no_sequence_of_bodies_raises_or_exceeds_the_bound(
    asked: list[tuple[str, dict[str, Any], int]],
) -> None:
    chats = Chats(capacity_tokens=4000, seed=5)
    for path, body, seed in asked:
        messages = conversation(path, body)
        if messages is None:
            continue
        count = random.Random(seed).randrange(400)
        tokens = np.resize(np.arange(200 + seed, dtype=np.uint32), count)
        broken = chats.store(
            messages, tokens, tools=body.get("tools"), scope=str(body.get("system"))
        )
        assert chats.used_tokens <= 4000
        assert chats.used_tokens == sum(turn.size_tokens for turn in chats._turns)
        kept = {turn for turns in chats._by_message.values() for turn in turns}
        assert kept <= set(chats._turns)
        if broken is not None:
            assert broken.role in (
                "system",
                "user",
                "assistant",
                "tool",
                "tools",
                "template",
                "other",
            )
            assert 0 <= broken.lost.start < broken.lost.stop <= count
