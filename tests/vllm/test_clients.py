"""The official client libraries call a cluster as they call OpenAI and Anthropic.

The model is too small to choose a tool or to write JSON by itself: these requests leave it no other
answer. The tests look at shapes, not at what the model says.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster
from tests.support.waiting import wait_until
from tests.support.weather import CITIES, ENOUGH, QUESTION, TIMEOUT_S, Booking

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}  # its calls are forced, so it is strict
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PARAMETERS}

USER = {"role": "user", "content": QUESTION}
CHAT: Any = {"model": BUILTIN_MODEL, "messages": [USER], "temperature": 0, "max_tokens": 12}
RESPONSE: Any = {
    "model": BUILTIN_MODEL,
    "input": QUESTION,
    "temperature": 0,
    "max_output_tokens": 12,
}
# Anthropic's client has no name for the temperature.
MESSAGE: Any = {
    "model": BUILTIN_MODEL,
    "messages": [USER],
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}


# openai


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    url = f"{cluster.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = client.chat.completions.create(**CHAT, **usage)
    choices = [event.choices[0] for event in events]
    assert (
        "".join(choice.delta.content or "" for choice in choices)
        == whole.choices[0].message.content
    )
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({event.id for event in (*events, last)}) == 1
    assert whole.id.startswith("chatcmpl-")


def test_a_streamed_response_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.responses.create(**RESPONSE)
    events = list(client.responses.create(**RESPONSE, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert "".join(deltas) == final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].response.id == final.id
    assert final.id.startswith("resp_")
    assert final.status == whole.status == "incomplete"
    assert final.usage.output_tokens == whole.usage.output_tokens == 12


def test_a_chat_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    asked = {**CHAT, "max_tokens": ENOUGH, "response_format": Booking}
    whole = client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, Booking)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_a_response_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    asked = {**RESPONSE, "max_output_tokens": ENOUGH, "text_format": Booking}
    whole = client.responses.parse(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    assert isinstance(whole.output_parsed, Booking)
    assert streamed.output_parsed == whole.output_parsed
    assert streamed.status == whole.status == "completed"


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "weather"}}, "required"],
    ids=["named", "required"],
)
def test_a_chat_calls_a_tool_and_takes_its_answer(client: openai.OpenAI, choice: Any) -> None:
    tools = {"tools": [CHAT_TOOL], "tool_choice": choice, "max_tokens": ENOUGH}
    whole = client.chat.completions.create(**{**CHAT, **tools}).choices[0]
    with client.chat.completions.stream(**{**CHAT, **tools}) as stream:
        streamed = stream.get_final_completion().choices[0]
    calls = streamed.message.tool_calls
    assert calls is not None
    (call,) = calls
    assert arguments(call.function) == arguments(whole.message.tool_calls[0].function)
    assert streamed.finish_reason == whole.finish_reason
    answered = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "Rain"}
    messages = [USER, whole.message, answered]
    after = client.chat.completions.create(**{**CHAT, "messages": messages, "tools": [CHAT_TOOL]})
    assert after.choices[0].message.content


@pytest.mark.parametrize(
    "choice", [{"type": "function", "name": "weather"}, "required"], ids=["named", "required"]
)
def test_a_response_calls_a_tool_and_takes_its_answer(client: openai.OpenAI, choice: Any) -> None:
    tools = {"tools": [RESPONSES_TOOL], "tool_choice": choice, "max_output_tokens": ENOUGH}
    (whole,) = client.responses.create(**{**RESPONSE, **tools}).output
    with client.responses.stream(**{**RESPONSE, **tools}) as stream:
        (streamed,) = stream.get_final_response().output
    assert whole.type == streamed.type == "function_call"
    assert arguments(streamed) == arguments(whole)
    answered = {"type": "function_call_output", "call_id": whole.call_id, "output": "Rain"}
    conversation = [USER, whole, answered]
    after = client.responses.create(
        **{**RESPONSE, "input": conversation, "tools": [RESPONSES_TOOL]}
    )
    assert after.output_text


def arguments(call: Any) -> dict[str, str]:
    """Of a call of the tool, which is what it should be."""
    assert call.name == "weather"
    given: dict[str, str] = json.loads(call.arguments)
    assert given["city"] in CITIES
    return given


def test_a_chat_says_one_of_the_given_choices(client: openai.OpenAI) -> None:
    choices = {"structured_outputs": {"choice": ["red", "blue"]}}
    answer = client.chat.completions.create(**CHAT, extra_body=choices)
    assert answer.choices[0].message.content in ("red", "blue")


def test_a_refusal_is_the_error_that_the_openai_client_has_for_it(client: openai.OpenAI) -> None:
    for create, asked in (
        (client.chat.completions.create, CHAT),
        (client.responses.create, RESPONSE),
    ):
        with pytest.raises(openai.NotFoundError):
            create(**{**asked, "model": "nobody"})
        with pytest.raises(openai.BadRequestError, match="temperature"):
            create(**{**asked, "temperature": -4})


# anthropic


@pytest.fixture
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=cluster.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


def test_a_streamed_message_adds_up_to_the_whole_one(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**MESSAGE)
    with claude.messages.stream(**MESSAGE) as stream:
        texts = [*stream.text_stream]
        streamed = stream.get_final_message()
    assert "".join(texts) == text_of(streamed) == text_of(whole)
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 12
    assert whole.role == streamed.role == "assistant"


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "weather"}, {"type": "any"}], ids=["named", "any"]
)
def test_a_message_uses_a_tool_and_takes_its_result(
    claude: anthropic.Anthropic, choice: Any
) -> None:
    tools = {"tools": [ANTHROPIC_TOOL], "tool_choice": choice, "max_tokens": ENOUGH}
    whole = claude.messages.create(**{**MESSAGE, **tools})
    with claude.messages.stream(**{**MESSAGE, **tools}) as stream:
        streamed = stream.get_final_message()
    (use,), (streamed_use,) = whole.content, streamed.content
    assert use.type == streamed_use.type == "tool_use"
    assert streamed_use.input == use.input
    assert use.input["city"] in CITIES
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain"}
    messages = [
        USER,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(**{**MESSAGE, "messages": messages, "tools": [ANTHROPIC_TOOL]})
    assert text_of(after)


def text_of(message: anthropic.types.Message) -> str:
    """Fails where there is anything but one text."""
    (block,) = message.content
    assert block.type == "text"
    text: str = block.text
    return text


def test_tokens_are_counted_as_a_message_uses_them(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=BUILTIN_MODEL, messages=MESSAGE["messages"])
    usage = claude.messages.create(**MESSAGE).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_changing_first_line_of_claude_code_costs_no_cache(claude: anthropic.Anthropic) -> None:
    """It stands before the instructions; vLLM leaves it out."""
    instructions = {"type": "text", "text": "You write programs. " * 100}

    def cached_tokens(line: str) -> int | None:
        first = {"type": "text", "text": f"x-anthropic-billing-header: {line}"}
        asked = {**MESSAGE, "system": [first, instructions]}
        tokens: int | None = claude.messages.create(**asked).usage.cache_read_input_tokens
        return tokens

    assert cached_tokens("cc_version=2.1.39.c39; cch=56445;") == 0
    assert (cached_tokens("cc_version=2.1.39.d47; cch=91120;") or 0) > 400


def test_models_are_listed_in_the_form_of_anthropics_api(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()
    assert model.id == claude.models.retrieve(model.id).id == BUILTIN_MODEL
    assert model.type == "model"


def test_a_stream_counts_the_prompt_as_often_as_the_whole_message(
    claude: anthropic.Anthropic,
) -> None:
    asked = {**MESSAGE, "system": "You write tests. " * 50}
    whole = claude.messages.create(**asked).usage

    def is_counted_once() -> bool:
        """Return whether the prompt was cached, which it is not where a replica was just lost."""
        events = list(claude.messages.create(**asked, stream=True))
        first, last = (each for each in events if each.type in ("message_start", "message_delta"))
        for usage in (first.message.usage, last.usage):
            assert usage.input_tokens == whole.input_tokens
            assert cached_and_written(usage) == cached_and_written(whole)
        assert first.message.usage.cache_read_input_tokens == last.usage.cache_read_input_tokens
        return bool(last.usage.cache_read_input_tokens)

    wait_until(is_counted_once)


def cached_and_written(usage: Any) -> int:
    """Return the tokens of a prompt that were in the cache, or are in it now."""
    return int(usage.cache_read_input_tokens or 0) + int(usage.cache_creation_input_tokens or 0)


def test_a_session_of_anthropics_servers_goes_on(claude: anthropic.Anthropic) -> None:
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    found = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x"}]
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": found}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, ANTHROPIC_TOOL]
    messages = [USER, {"role": "assistant", "content": [used, result]}, USER]
    asked = {**MESSAGE, "messages": messages, "tools": tools}
    answer = claude.messages.with_raw_response.create(**asked)
    left_out = "server_tool_use, web_search_tool_result, web_search_20250305"
    assert answer.headers["x-kvroute-left-out"] == left_out
    counted = claude.messages.count_tokens(model=BUILTIN_MODEL, messages=messages, tools=tools)
    usage = answer.parse().usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_call_without_a_schema_has_an_object_as_its_arguments(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    function = {"name": "f", "parameters": {"properties": {"n": {"enum": [1, 2]}}}}
    tools = [{"type": "function", "function": function}]
    asked: Any = {**CHAT, "tools": tools, "tool_choice": "required", "max_tokens": ENOUGH}
    calls: Any = client.chat.completions.create(**asked).choices[0].message.tool_calls
    (call,) = calls
    assert isinstance(json.loads(call.function.arguments), dict)
    cut: Any = {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 9}
    message = claude.messages.create(**{**MESSAGE, **cut})
    assert message.stop_reason == "max_tokens"
    assert all(isinstance(block.input, dict) for block in message.content if block.type != "text")


def test_what_claude_code_says_of_its_session_is_understood(
    claude: anthropic.Anthropic, cluster: Cluster
) -> None:
    kept: Any = {"type": "ephemeral", "ttl": "1h"}
    asked = {
        **MESSAGE,
        "system": [{"type": "text", "text": "You write programs.", "cache_control": kept}],
        "tools": [{**ANTHROPIC_TOOL, "cache_control": kept}],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s-1"})},
        "extra_headers": {"x-claude-code-session-id": "s-1"},
    }
    assert text_of(claude.messages.create(**asked))
    ended = httpx.delete(f"{cluster.url}/v1/sessions/s-1", timeout=TIMEOUT_S)
    assert (ended.status_code, ended.json()["unanswered"]) == (200, {})
    asked["extra_body"] = {**MESSAGE["extra_body"], "session_end": "yes"}
    with pytest.raises(anthropic.BadRequestError, match="session_end"):
        claude.messages.create(**asked)


def test_a_refusal_is_the_error_that_anthropics_client_has_for_it(
    claude: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(**{**MESSAGE, "model": "nobody"})
    assert refused.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**{**MESSAGE, "extra_body": {"temperature": -4}})
