"""An answer whose attached server is lost goes on at the next token on another one."""

import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.blocks.chain import Space
from kvroute.contract.generation import GenerateRequest, NotBegunError
from kvroute.contract.http_call import HttpCall
from kvroute.contract.records import EngineFacts
from kvroute.replica.attached_engine.attached import AttachedEngine
from kvroute.replica.attached_engine.resumption.joined_text import JoinedText, held_characters
from kvroute.replica.attached_engine.resumption.plain_stream import plain_stream
from kvroute.replica.attached_engine.server_connection import ServerConnection
from kvroute.replica.attached_engine.server_facts import RankFacts, ServerFacts
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from tests.support.event_streams import Joined
from tests.support.token_server import CHAT, COMPLETIONS, CONTEXT, NAME, TokenServer, ids_of_text
from tests.support.wired import Wired, dispatcher_of

PROMPT = ids_of_text("Once upon a time, there was")
TEXT = " a büg in 日本, and 🤣🤣 nobody\nfound it. The END of the story? No, it went on."
ANSWER = ids_of_text(TEXT)
OWN: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell!"}]},
    COMPLETIONS: {"prompt": "Once"},
}
USAGE = {"stream_options": {"include_usage": True}}
ALL_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ID = "request"


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    limit = {} if path == CHAT else {"max_tokens": 500}
    return {"model": NAME, "stream": True, "temperature": 0, **limit, **OWN[path], **fields}


class Servers:
    """Attached servers behind a router."""

    def __init__(self) -> None:
        self.all = [TokenServer(PROMPT, 100 + number) for number in range(3)]
        engines = {f"r{number}": _engine(server) for number, server in enumerate(self.all)}
        fleet = Fleet(model=NAME, revision="", block_size=32, rng=random.Random(0))
        self.wired = Wired({id_: engine.generate for id_, engine in engines.items()})
        self._dispatcher = dispatcher_of(self.wired, fleet)

    def start(self, *lives: int) -> None:
        """Start all servers again.

        Args:
            lives: The number of bytes after which the server of the first response is lost, then
                that of the second one, and so on.
        """
        left = [*lives]
        for server in self.all:
            server.start(ANSWER, left)

    @property
    def first(self) -> TokenServer:
        """Return the server that has begun the answer."""
        return next(server for server in self.all if server.requests and not server.continues)

    @property
    def rest(self) -> list[Any]:
        """Return the bodies of the requests that continue the answer."""
        return [body for server in self.all if server.continues for _, body in server.requests]

    async def ask(self, path: str, body: Mapping[str, Any]) -> str:
        """Return the stream that a client gets. Raises ApiError where it gets an error event."""
        call, data = HttpCall(path, json.dumps(body).encode(), 5.0), b""
        context = RequestContext(time.monotonic(), request_id=ID)
        prompt = np.array(PROMPT, np.uint32)
        generation = await self._dispatcher.generate(prompt, call, context)
        while chunk := await generation.next():
            assert chunk.http
            if chunk.http.status >= 400:
                raise ApiError(chunk.http.status, "the answer could not be continued")
            data += chunk.http.data
        return data.decode()

    def undisturbed(self, path: str, body: Mapping[str, Any]) -> str:
        """Return the stream that a client of the first server gets without kvroute."""
        return b"".join(self.first.events(path, dict(body), ID)).decode()


def _engine(server: TokenServer) -> AttachedEngine:
    connection = ServerConnection(server.url, {})
    connection.client = server.client
    rank = RankFacts(
        block_size=32,
        capacity_blocks=100,
        prefix_caching=True,
        prefill_tokens_per_s=1000.0,
        events=None,
    )
    facts = EngineFacts(
        block_size=32, capacity_blocks=100, max_model_len=CONTEXT, prefill_tokens_per_s=1000.0
    )
    return AttachedEngine(
        connection, facts, ServerFacts(NAME, NAME, CONTEXT, "", [rank]), 0, Space(NAME, "", 32)
    )


def events_of(stream: str) -> list[Any]:
    *events, end, rest = stream.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    servers.start()
    async with servers.wired:
        yield servers


def ends(servers: Servers, path: str, body: Mapping[str, Any]) -> list[int]:
    """Return the number of bytes after each event of the response that kvroute gets."""
    asked = {**body, "return_token_ids": True}
    return [*accumulate(map(len, servers.all[0].events(path, asked, ID)))]


async def check(servers: Servers, path: str, *lives: int, **fields: Any) -> None:
    """Lose servers; the client must not notice."""
    body = body_of(path, **fields)
    servers.start(*lives)
    got = events_of(await servers.ask(path, body))
    assert got == events_of(servers.undisturbed(path, body))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, USAGE, ALL_USAGE, {"return_token_ids": True}])
async def test_a_stream_without_a_loss_has_the_servers_own_bytes(
    servers: Servers, path: str, fields: dict[str, Any]
) -> None:
    body = body_of(path, **fields)
    assert await servers.ask(path, body) == servers.undisturbed(path, body)
    assert servers.first.requests[0][1]["return_token_ids"] is True


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [ALL_USAGE, {"max_tokens": 30, "min_tokens": 5, "seed": 7}])
async def test_every_event_is_as_without_the_loss(
    servers: Servers, path: str, fields: dict[str, Any]
) -> None:
    """The loss comes after each event, or in the middle of it."""
    servers.start()
    continued = 0
    for number, end in enumerate(ends(servers, path, body_of(path, **fields))[:-1]):
        await check(servers, path, end - 9 * (number % 2), **fields)
        continued += bool(servers.rest)
    assert continued > 20


STOPS = ["The END", "END of the", "nope"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("includes_stop", [True, False])
async def test_a_stop_string_ends_the_answer_wherever_it_was_cut(
    servers: Servers, path: str, includes_stop: bool
) -> None:
    fields = {"stop": STOPS, "include_stop_str_in_output": includes_stop, **USAGE}
    closed = 0
    servers.start()
    for end in ends(servers, path, body_of(path, **fields))[:-1]:
        await check(servers, path, end, **fields)
        closed += len(servers.rest) > 1
    assert closed > 1, "some stop strings began before the cut and ended after it"


async def test_several_tokens_of_an_event_may_end_within_a_character(servers: Servers) -> None:
    body, continued = body_of(COMPLETIONS, **USAGE), 0
    for tokens in (2, 3):
        for part in range(1, 8):
            servers.start(part * 600)
            for server in servers.all:
                server.tokens_per_event = tokens
            got = await servers.ask(COMPLETIONS, body)
            assert Joined(got) == Joined(servers.undisturbed(COMPLETIONS, body))
            continued += bool(servers.rest)
    assert continued > 6


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_survives_two_losses(servers: Servers, path: str) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, **ALL_USAGE}
    whole = ends(servers, path, body_of(path, **fields))[-1]
    await check(servers, path, whole // 2, whole // 4, **fields)
    assert len(servers.rest) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_request_that_no_server_could_be_sent_waits_and_is_not_blamed(
    servers: Servers, path: str
) -> None:
    """All servers were killed at once, and come back before the router knows of the loss."""
    for server in servers.all:
        server.refusals = 2
    body = body_of(path)
    assert await servers.ask(path, body) == servers.undisturbed(path, body)
    assert not any(server.refusals for server in servers.all)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_goes_on_though_the_other_servers_cannot_be_reached_at_once(
    servers: Servers, path: str
) -> None:
    body = body_of(path)
    half = ends(servers, path, body)[-1] // 2
    servers.start(half)
    for server in servers.all[1:]:
        server.refusals = 1
    got = events_of(await servers.ask(path, body))
    assert got == events_of(servers.undisturbed(path, body))


async def test_a_loss_before_the_first_token_sends_the_clients_own_request_again(
    servers: Servers,
) -> None:
    role, *_ = ends(servers, CHAT, body_of(CHAT))
    await check(servers, CHAT, role)
    assert [path for server in servers.all for path, _ in server.requests] == [CHAT, CHAT]


async def test_the_rest_is_asked_for_with_the_clients_own_parameters(servers: Servers) -> None:
    own: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "cache_salt": "s",
        "priority": 2,
    }
    limits = {"max_completion_tokens": 400, "min_tokens": 300}
    await check(servers, CHAT, 4000, **own, **limits)
    (rest,) = servers.rest
    answered = len(rest["prompt"]) - len(PROMPT)
    assert answered > 5
    assert rest["max_tokens"] == 400 - answered
    assert rest["min_tokens"] == 300 - answered
    assert rest["seed"] not in (None, 7)
    assert {name: rest[name] for name in own} == own | {"seed": rest["seed"]}


async def test_the_usage_has_the_cached_tokens_that_the_client_was_told(servers: Servers) -> None:
    servers.start(3000)
    for server in servers.all:
        server.has_details = True
    *_, last = events_of(await servers.ask(COMPLETIONS, body_of(COMPLETIONS, **USAGE)))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_an_error_of_a_server_is_a_loss_if_the_server_is_not_healthy_any_more(
    servers: Servers, is_healthy: bool
) -> None:
    body = body_of(COMPLETIONS)
    for server in servers.all:
        server.error_at, server.is_healthy = 10, is_healthy
    got = await servers.ask(COMPLETIONS, body)
    assert ('{"error"' in got) == is_healthy
    if not is_healthy:
        servers.first.error_at = None
        assert events_of(got) == events_of(servers.undisturbed(COMPLETIONS, body))


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (CHAT, b'"token_ids":[', b'"tokens":['),
        (CHAT, b'"delta":{"content"', b'"delta":{"reasoning"'),
        (COMPLETIONS, b'"id":"cmpl-', b'"id":"'),
        (COMPLETIONS, b'"index":0', b'"index":1'),
        (COMPLETIONS, b'"prompt_token_ids":[', b'"prompt_token_ids":[1,'),
        (COMPLETIONS, b'"logprobs":null', b'"logprobs":{"tokens":[]}'),
        (COMPLETIONS, b'{"id"', b'"id"'),
    ],
)
async def test_a_stream_of_another_form_passes_but_is_not_continued(
    servers: Servers, path: str, old: bytes, new: bytes
) -> None:
    body = body_of(path)
    for server in servers.all:
        server.replaced = old, new
    got = await servers.ask(path, body)
    assert len(got.split("\n\n")) == len(servers.undisturbed(path, body).split("\n\n"))
    servers.start(3000)
    for server in servers.all:
        server.replaced = old, new
    with pytest.raises(ApiError, match="no other replica can continue"):
        await servers.ask(path, body)


async def test_text_that_the_tokens_do_not_have_is_not_continued(servers: Servers) -> None:
    """A parser of the server may have changed the text."""
    servers.start(6000)
    for server in servers.all:
        server.replaced = b" nobody", b" somebody"
    with pytest.raises(ApiError, match="could not be continued"):
        await servers.ask(COMPLETIONS, body_of(COMPLETIONS))


async def test_an_answer_that_another_kind_of_replica_has_begun_is_not_continued() -> None:
    call = HttpCall(COMPLETIONS, json.dumps(body_of(COMPLETIONS)).encode(), 5.0, deltas=(1, 1))
    request = GenerateRequest("a-1", np.array([*PROMPT, *ANSWER[:2]], np.uint32), call=call)
    engine = _engine(TokenServer(PROMPT, 100))
    with pytest.raises(NotBegunError, match="cannot continue"):
        await engine.generate(replace(request, answered=2), print)


CHANGES: Sequence[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (COMPLETIONS, {"logprobs": 0}),
    (COMPLETIONS, {"structured_outputs": {"regex": "a"}}),
    (COMPLETIONS, {"n": 2}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"stream": False}),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"presence_penalty": 0.1}),
    (COMPLETIONS, {"frequency_penalty": -1}),
    (COMPLETIONS, {"bad_words": ["a"]}),
    (COMPLETIONS, {"thinking_token_budget": 5}),
    (COMPLETIONS, {"min_tokens": 3, "stop": ["a"]}),
    (COMPLETIONS, {"stop": [""]}),
    (COMPLETIONS, {"max_tokens": "5"}),
    (COMPLETIONS, {"spaces_between_special_tokens": False}),
    (COMPLETIONS, {"vllm_xargs": {"own": 1}}),
    (COMPLETIONS, {"a_field_of_tomorrow": 1}),
    ("/v1/messages", {}),
]


@pytest.mark.parametrize(("path", "fields"), CHANGES)
def test_requests_that_cannot_be_continued_are_known_before(
    path: str, fields: dict[str, Any]
) -> None:
    body = body_of(path if path in OWN else CHAT) | fields
    assert plain_stream(HttpCall(path, json.dumps(body).encode(), 0.0), CONTEXT) is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_without_an_effect_do_not_matter(path: str) -> None:
    harmless: dict[str, Any] = {
        "n": 1,
        "logprobs": None,
        "tools": None,
        "presence_penalty": 0.0,
        "stop": [],
    }
    harmless |= {"response_format": {"type": "text"}, "vllm_xargs": {}, "echo": False, "user": "u"}
    body = body_of(path, **harmless)
    assert plain_stream(HttpCall(path, json.dumps(body).encode(), 0.0), CONTEXT)


def test_a_chat_without_a_limit_needs_a_known_context() -> None:
    call = HttpCall(CHAT, json.dumps(body_of(CHAT)).encode(), 0.0)
    assert plain_stream(call, 0) is None
    limited = HttpCall(CHAT, json.dumps(body_of(CHAT, max_tokens=5)).encode(), 0.0)
    assert plain_stream(limited, 0)


@example(text="ba", stops=["a", "ba"], cut=1, includes_stop=False)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cut=st.integers(0, 12),
    includes_stop=st.booleans(),
)
def test_joined_text_is_that_of_one_server(
    text: str, stops: list[str], cut: int, includes_stop: bool
) -> None:
    """One character is a token here."""
    whole = [*_pieces(text, stops, includes_stop=includes_stop)]
    if len(whole) <= cut:  # the answer had ended before the cut
        return
    before = text[:cut]
    joined = JoinedText(
        before[max(0, cut - held_characters(stops)) :], stops, includes_stop=includes_stop
    )
    pieces = whole[:cut]
    for piece, stop in _pieces(text[cut:], stops, includes_stop=True):
        is_last = stop is not None
        sent = joined.add(piece, is_last=is_last, stop_reason=stop)
        pieces.append((sent, joined.ended_by or stop))
        if joined.ended_by is not None:
            break
    assert pieces == whole


def _pieces(
    text: str, stops: Sequence[str], *, includes_stop: bool
) -> Iterator[tuple[str, str | None]]:
    """Yield the text of each event of a server, and what ends the answer."""
    held = 0 if includes_stop else held_characters(stops)
    sent = 0
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            until_ = end if includes_stop else end - len(found[0])
            yield text[sent:until_], found[0]
            return
        upto = len(text) if end == len(text) else max(sent, end - held)
        yield text[sent:upto], "" if end == len(text) else None
        sent = upto
