"""Conversations with their state in Redis: a client goes on with them at either of two routers."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.scraping import scrape, targets
from tests.support.serving import Cluster
from tests.support.waiting import wait_until

BLOCK = 32  # tokens
TURNS = 8
LONG = "You plan journeys for people who like trains. Answer in one sentence. " * 40
NAME = "My name is Zebulon. Say hello."
ASKED: Any = {"model": BUILTIN_MODEL, "temperature": 0, "max_output_tokens": 12}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"], "previous_response_id": None}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    """One that makes a connection for each request, which may thus go to any router."""
    limits: Any = httpx.Limits(max_keepalive_connections=0)
    with OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultHttpxClient(limits=limits),
    ) as client:
        yield client


def ended(client: OpenAI, **asked: Any) -> Any:
    """Return a streamed response, and check what its events say of it."""
    events = list(client.responses.create(**{**ASKED, **asked}, stream=True))
    told = [event.response for event in events if hasattr(event, "response")]
    assert [each.previous_response_id for each in told] == [asked.get("previous_response_id")] * 3
    assert {each.id for each in told} == {told[0].id}
    return told[-1]


def whole(client: OpenAI, **asked: Any) -> Any:
    return client.responses.create(**{**ASKED, **asked})


@pytest.mark.parametrize("ask", [whole, ended])
def test_a_conversation_goes_on_as_if_all_of_it_was_sent(client: OpenAI, ask: Any) -> None:
    first = ask(client, input=NAME)
    second = ask(client, input="What is my name?", previous_response_id=first.id)
    sent = ask(
        client,
        input=[
            {"role": "user", "content": NAME},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert second.previous_response_id == first.id
    assert second.output_text == sent.output_text
    assert second.usage.input_tokens == sent.usage.input_tokens > first.usage.input_tokens


def test_any_router_goes_on_and_finds_the_conversation_cached(
    cluster: Cluster, client: OpenAI
) -> None:
    last, cached = whole(client, input=LONG), []
    for number in range(TURNS):
        ask = ended if number % 2 else whole
        last = ask(client, input=f"And {number}?", previous_response_id=last.id)
        cached.append(last.usage.input_tokens_details.cached_tokens)
    assert max(cached) > 400
    assert sum(each > 400 for each in cached) >= TURNS - 2  # an idle fleet may make a second copy
    routers = [scrape(address) for address in targets(cluster, "router").values()]
    assert len(routers) == 2
    assert all(router["kvroute_stored_responses_total{stored}"] > 0 for router in routers)


def test_instructions_are_not_carried_over(client: OpenAI) -> None:
    first = whole(client, input="Hi", instructions="You speak like a pirate." * 20)
    second = whole(client, input="Hi", previous_response_id=first.id)
    assert second.usage.input_tokens < first.usage.input_tokens
    assert second.instructions is None


def test_a_tool_is_called_and_its_answer_taken(client: OpenAI) -> None:
    tools: Any = {"tools": [WEATHER]}
    enough: Any = {"tool_choice": "required", "max_output_tokens": 120}
    for ask in (whole, ended):
        first = ask(client, input="Rain?", **enough, **tools)
        (call,) = first.output
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        second = ask(client, input=[answer], previous_response_id=first.id, **tools)
        third = ask(client, input="Why?", previous_response_id=second.id, **tools)
        assert third.output_text
        assert second.tools == first.tools


def test_a_response_is_retrieved_listed_and_deleted(client: OpenAI) -> None:
    first = whole(client, input=NAME)
    second = ended(
        client, input=[{"role": "user", "content": "Bye"}], previous_response_id=first.id
    )
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    items: Any = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in items] == [NAME, first.output_text, "Bye"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, input="And?", previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="has not run in the background"):
        client.responses.cancel(second.id)


def test_log_probabilities_in_events_are_those_of_the_whole_response(client: OpenAI) -> None:
    asked: Any = {"input": NAME, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    streamed = [
        logprob.to_dict()
        for event in client.responses.create(**ASKED, **asked, stream=True)
        if event.type == "response.output_text.delta"
        for logprob in event.logprobs
    ]
    (part,) = whole(client, **asked).output[0].content
    assert [each["bytes"] for each in streamed] == [logprob.bytes for logprob in part.logprobs]
    likeliest = [[top.bytes for top in logprob.top_logprobs] for logprob in part.logprobs]
    assert [[top["bytes"] for top in each["top_logprobs"]] for each in streamed] == likeliest


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    first = whole(client, input=NAME, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_conversation_belongs_to_its_salt(client: OpenAI) -> None:
    salted: Any = {"extra_body": {"cache_salt": "mine"}}
    first = whole(client, input=NAME, **salted)
    second = ended(client, input="And?", previous_response_id=first.id, **salted)
    with pytest.raises(openai.BadRequestError):
        whole(client, input="And?", previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert client.responses.retrieve(second.id, extra_query={"cache_salt": "mine"}).id == second.id


def test_receipts_are_not_stored(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        **ASKED, input=NAME, extra_headers={"x-kvroute-receipt": "1"}
    )
    body = json.loads(raw.text)
    assert body.pop("kvroute_receipts")
    found = client.responses.with_raw_response.retrieve(body["id"])
    assert json.loads(found.text) == body


def test_a_route_is_explained_with_its_conversation(cluster: Cluster, client: OpenAI) -> None:
    first = whole(client, input=NAME)
    body = {"model": BUILTIN_MODEL, "input": "And?", "previous_response_id": first.id}
    answer = httpx.post(f"{cluster.url}/v1/route", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (receipt,) = answer.json()["receipts"]
    assert receipt["prompt_tokens"] > first.usage.input_tokens


def test_the_tokens_of_a_conversation_are_counted_without_an_answer(client: OpenAI) -> None:
    first = whole(client, input=NAME)
    asked: Any = {
        "model": BUILTIN_MODEL,
        "input": "What is my name?",
        "previous_response_id": first.id,
        "tools": [WEATHER],
    }
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == whole(client, **asked).usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(**{**asked, "previous_response_id": "resp_none"})
    assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("ask", [whole, ended])
def test_a_conversation_object_is_read_and_extended(client: OpenAI, ask: Any) -> None:
    conversation = client.conversations.create(items=[{"role": "user", "content": NAME}])
    first = ask(client, input="What is my name?", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    sent = whole(
        client, input=[{"role": "user", "content": text} for text in (NAME, "What is my name?")]
    )
    assert first.output_text == sent.output_text
    second = ask(client, input="Why?", conversation=conversation.id, store=False)
    assert second.usage.input_tokens > first.usage.total_tokens - first.usage.output_tokens
    listed = client.conversations.items.list(conversation.id, order="asc")
    assert [getattr(item, "role", "") for item in listed] == [
        "user",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def after_its_end(client: OpenAI, id_: str) -> Any:
    """Return a background response when it has ended."""
    wait_until(lambda: client.responses.retrieve(id_).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id_)


def test_a_response_runs_in_the_background(client: OpenAI) -> None:
    key = {"extra_headers": {"Idempotency-Key": uuid.uuid4().hex}}
    begun = whole(client, input=NAME, background=True, **key)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    assert whole(client, input=NAME, background=True, **key).id == begun.id  # it is sent again
    with pytest.raises(openai.BadRequestError, match=f"has created {begun.id}"):
        whole(client, input="Another one.", background=True, **key)
    ended = after_its_end(client, begun.id)
    expected = whole(client, input=NAME)
    assert (ended.id, ended.status, ended.background) == (begun.id, expected.status, True)
    assert ended.output_text == expected.output_text
    assert ended.usage.total_tokens == expected.usage.total_tokens
    next_ = whole(client, input="What is my name?", previous_response_id=begun.id)
    assert next_.usage.input_tokens > ended.usage.total_tokens
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_the_events_of_a_background_response_are_streamed_again(client: OpenAI) -> None:
    conversation = client.conversations.create()
    asked: Any = {**ASKED, "input": NAME, "background": True, "conversation": conversation.id}
    events = list(client.responses.create(**asked, stream=True))
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    created: Any = events[0]
    assert (created.type, created.response.background) == ("response.created", True)
    assert [event.type for event in events[1:3]] == ["response.queued", "response.in_progress"]
    begun: Any = events[2]
    assert begun.response.to_dict().keys() <= created.response.to_dict().keys()
    assert created.response.conversation.id == conversation.id
    for number in (0, 3, numbers[-2]):
        again = client.responses.retrieve(created.response.id, stream=True, starting_after=number)
        assert list(again) == events[number + 1 :]
    items = client.conversations.items.list(conversation.id, order="asc")
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant"]


def test_a_background_response_is_cancelled(client: OpenAI) -> None:
    asked: Any = {**ASKED, "input": NAME, "max_output_tokens": 2000, "background": True}
    id_ = client.responses.create(**asked, extra_body={"ignore_eos": True}).id
    (item,) = client.responses.input_items.list(id_)
    assert getattr(item, "content", [])[0].text == NAME
    with pytest.raises(openai.BadRequestError, match="cannot be continued yet"):
        whole(client, input="What is my name?", previous_response_id=id_)
    assert client.responses.cancel(id_).status == "cancelled"
    assert [*client.responses.retrieve(id_, stream=True)][-1].type == "response.cancelled"
    again = whole(client, input="What is my name?", previous_response_id=id_)
    assert again.usage.input_tokens > whole(client, input="What is my name?").usage.input_tokens
    assert len([*client.responses.input_items.list(again.id)]) == 2
    assert client.responses.retrieve(id_).status == "cancelled"
    assert client.responses.cancel(id_).status == "cancelled"


def test_a_background_response_is_checked_before_it_runs(client: OpenAI) -> None:
    for wrong in ({"temperature": 9}, {"store": False}, {"input": "word " * 5000}):
        with pytest.raises(openai.BadRequestError) as refused:
            whole(client, **{"input": NAME, "background": True, **wrong})
        assert refused.value.param in ("temperature", "store", "input")
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, input=NAME, background=True, previous_response_id="resp_none")
    assert refused.value.code == "previous_response_not_found"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_client_that_keeps_the_history_sends_items_that_only_the_router_knows(
    client: OpenAI,
) -> None:
    first = whole(client, input=NAME)
    (message,) = first.output
    asked: Any = [user(NAME), {"id": message.id, "type": "item_reference"}, user("Who am I?")]
    inline: Any = [user(NAME), message.to_dict(), user("Who am I?")]
    counts = {
        client.responses.input_tokens.count(model=BUILTIN_MODEL, input=items).input_tokens
        for items in (asked, inline)
    }
    assert counts == {ask(client, input=asked).usage.input_tokens for ask in (whole, ended)}
    foreign: Any = {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAAAA"}
    summary: Any = {"summary": [{"type": "summary_text", "text": "Hm."}]}
    assert whole(client, input=[user(NAME), {**foreign, **summary}, user("Who?")]).output_text
    with pytest.raises(openai.NotFoundError, match="msg_none"):
        whole(client, input=[{"id": "msg_none"}])


def test_a_long_conversation_goes_on_from_its_summary(client: OpenAI) -> None:
    history: Any = [user(LONG), {"role": "assistant", "content": LONG}, user("And?")]
    compacted = client.responses.compact(
        model=BUILTIN_MODEL, input=history, extra_body={"max_output_tokens": 40}
    )
    *kept, item = (each.to_dict(warnings=False) for each in compacted.output)
    assert [each["role"] for each in kept] == ["user", "user"]
    assert item["type"] == "compaction"
    later = whole(client, input=[*kept, item, user("So?")])
    assert 0 < later.usage.input_tokens < compacted.usage.input_tokens
    trigger: Any = [*history, {"type": "compaction_trigger"}]
    events = list(client.responses.create(**ASKED, input=trigger, stream=True))
    (made,) = events[-1].response.output
    assert made.type == "compaction"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    managed: Any = [{"type": "compaction", "compact_threshold": 400}]
    for ask in (whole, ended):
        first, second = ask(client, input=history, context_management=managed).output
        assert (first.type, second.type) == ("compaction", "message")
