"""Libraries for agents call a cluster as they call OpenAI and Anthropic.

The model is too small to choose a tool or to write JSON by itself: these requests leave it no other
answer. The tests look at shapes, not at what the model says.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import reduce
from operator import add
from typing import Any

import anthropic
import httpx
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
from tests.support.documents import CLIENTS, Block, steps
from tests.support.serving import Cluster
from tests.support.weather import CITIES, ENOUGH, QUESTION, TIMEOUT_S, Booking, City

# langchain-openai


@tool  # type: ignore[untyped-decorator]
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


@function_tool(name_override="weather")  # type: ignore[untyped-decorator]
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


@pytest.mark.parametrize("step", [step for step in steps(CLIENTS) if step.language == "python"])
def test_the_program_works(step: Block, cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", step.text],
        env={**os.environ, "KVROUTE_URL": cluster.url},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{step.text}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip()
