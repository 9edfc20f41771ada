"""Client libraries call a cluster as they call OpenAI and Anthropic.

The model is too small to choose a tool or to write JSON by itself: these requests leave it no other
answer. The tests look at shapes, not at what the model says.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import reduce
from operator import add
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.items import ToolCallOutputItem
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings as PydanticSettings

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.documents import ADDRESS, CLIENTS, Block, steps
from tests.support.serving import Cluster

TIMEOUT_S = 120.0
QUESTION = "What is the weather in Oslo?"
City = Literal["Oslo", "Lima"]
CITIES = ("Oslo", "Lima")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
# vLLM holds the model to the parameters of a strict tool only.
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PARAMETERS, "strict": True}

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
ENOUGH = 120  # tokens for a call of the tool, or for a booking, with the spaces between


class Booking(BaseModel):
    """What a client wants instead of text."""

    city: City
    is_return: bool


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
    assert "".join(each.delta.content or "" for each in choices) == whole.choices[0].message.content
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
    assert call.function.parsed_arguments == arguments(whole.message.tool_calls[0].function)
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
    return block.text


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
        usage: anthropic.types.Usage = claude.messages.create(**asked).usage
        return usage.cache_read_input_tokens

    assert cached_tokens("cc_version=2.1.39.c39; cch=56445;") == 0
    assert (cached_tokens("cc_version=2.1.39.d47; cch=91120;") or 0) > 400


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


# langchain-openai


@tool
def weather(city: City) -> str:
    """The weather in a city."""
    return f"Rain in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def langchain(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[ChatOpenAI]:
    with httpx.Client(timeout=TIMEOUT_S) as http:
        yield ChatOpenAI(
            base_url=f"{cluster.url}/v1",
            api_key="none",
            model=BUILTIN_MODEL,
            temperature=0,
            max_tokens=ENOUGH,
            max_retries=0,
            stream_usage=True,
            use_responses_api=request.param,
            http_client=http,
        )


def test_langchain_streams_what_it_gets_whole(langchain: ChatOpenAI) -> None:
    brief = langchain.model_copy(update={"max_tokens": 12})
    whole = brief.invoke(QUESTION)
    streamed = reduce(add, brief.stream(QUESTION))
    assert streamed.text == whole.text
    assert streamed.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_langchain_calls_a_tool_and_takes_its_answer(langchain: ChatOpenAI) -> None:
    forced = langchain.bind_tools([weather], tool_choice="any", strict=True)
    whole = forced.invoke(QUESTION)
    streamed = reduce(add, forced.stream(QUESTION))
    (call,), (streamed_call,) = whole.tool_calls, streamed.tool_calls
    assert call["name"] == streamed_call["name"] == "weather"
    assert call["args"] == streamed_call["args"]
    answered = weather.invoke(call)
    assert answered.tool_call_id == call["id"]
    free = langchain.bind_tools([weather], strict=True)
    assert free.invoke([HumanMessage(QUESTION), whole, answered]).text


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # LangChain's
def test_langchain_makes_structured_output(langchain: ChatOpenAI) -> None:
    structured = langchain.with_structured_output(Booking, method="json_schema")
    assert isinstance(structured.invoke("Book a flight."), Booking)


# pydantic-ai


@pytest.fixture(params=["chat", "responses", "messages"])
async def model(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Model]:
    async with (
        async_openai_client(cluster.url, timeout_s=TIMEOUT_S) as client,
        anthropic.AsyncAnthropic(
            base_url=cluster.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as claude,
    ):
        provider = OpenAIProvider(openai_client=client)
        if request.param == "chat":
            yield OpenAIChatModel(BUILTIN_MODEL, provider=provider)
        elif request.param == "responses":
            yield PydanticResponsesModel(BUILTIN_MODEL, provider=provider)
        else:
            yield AnthropicModel(BUILTIN_MODEL, provider=AnthropicProvider(anthropic_client=claude))


async def test_pydantic_ai_streams_what_it_gets_whole(model: Model) -> None:
    agent = PydanticAgent(model, model_settings=PydanticSettings(temperature=0, max_tokens=12))
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output
    assert whole.usage.output_tokens == stream.usage.output_tokens == 12


@pytest.mark.parametrize("model", ["chat", "responses"], indirect=True)
@pytest.mark.parametrize(
    "output", [NativeOutput(Booking), ToolOutput(Booking, strict=True)], ids=["native", "tool"]
)
async def test_pydantic_ai_makes_structured_output(model: Model, output: Any) -> None:
    settings = PydanticSettings(temperature=0, max_tokens=ENOUGH)
    agent = PydanticAgent(model, output_type=output, model_settings=settings, retries=0)
    whole = await agent.run("Book a flight.")
    async with agent.run_stream("Book a flight.") as stream:
        streamed = await stream.get_output()
    assert isinstance(whole.output, Booking)
    assert streamed == whole.output


# openai-agents


@function_tool(name_override="weather")
def agents_weather(city: City) -> str:
    """The weather in a city."""
    return f"Rain in {city}"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def agent(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Agent[None]]:
    async with async_openai_client(cluster.url, timeout_s=TIMEOUT_S) as client:
        yield Agent(
            name="Weather",
            instructions="Say what the weather is.",
            model=request.param(model=BUILTIN_MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=ENOUGH, tool_choice="required"),
            tools=[agents_weather],
            tool_use_behavior="stop_on_first_tool",
        )


UNTRACED = RunConfig(tracing_disabled=True)  # traces would go to OpenAI


async def test_an_agent_uses_its_tool(agent: Agent[None]) -> None:
    whole = await Runner.run(agent, QUESTION, run_config=UNTRACED)
    streamed = Runner.run_streamed(agent, QUESTION, run_config=UNTRACED)
    events = [event.type async for event in streamed.stream_events()]
    assert whole.final_output in [f"Rain in {city}" for city in CITIES]
    assert streamed.final_output == whole.final_output
    assert isinstance(whole.new_items[-1], ToolCallOutputItem)
    assert {"raw_response_event", "run_item_stream_event"} <= {*events}


@pytest.mark.parametrize("agent", [OpenAIChatCompletionsModel], indirect=True)
async def test_an_agent_goes_on_after_its_tool(agent: Agent[None]) -> None:
    """A response that its longest length cuts short is an error to the library, a chat is none."""
    talking = agent.clone(tool_use_behavior="run_llm_again")
    whole = await Runner.run(talking, QUESTION, run_config=UNTRACED)
    assert [type(item).__name__ for item in whole.new_items] == [
        "ToolCallItem",
        "ToolCallOutputItem",
        "MessageOutputItem",
    ]
    assert whole.final_output


async def test_an_agent_makes_structured_output(agent: Agent[None]) -> None:
    settings = ModelSettings(temperature=0, max_tokens=ENOUGH)
    booking = agent.clone(tools=[], output_type=Booking, model_settings=settings)
    whole = await Runner.run(booking, "Book a flight.", run_config=UNTRACED)
    assert isinstance(whole.final_output, Booking)


# What docs/clients.md shows.


@pytest.mark.parametrize("step", [each for each in steps(CLIENTS) if each.language == "python"])
def test_the_program_works(step: Block, cluster: Cluster) -> None:
    program = step.text.replace(ADDRESS, cluster.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip()
