"""A session like Claude Code's keeps its cached prefix with the templates of many models."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.vllm_engine.http.system_places import Place, place_for, put_in_place

TEMPLATES = Path(__file__).parents[1] / "templates"
PLACES: dict[str, Place] = {
    "qwen3": "system",
    "qwen3_5": "joined",  # after a user message, the template leaves out earlier reasoning
    "llama3_1": "system",
    "glm4_moe": "system",
    "mistral_nemo": "joined",
    "mistral_small_3_2": "joined",
    "gpt_oss": "user",
    "gemma3": "joined",
    "granite_4": "system",
    "deepseek_v3_1": "user",
}
TURNS = 8
READ = {"name": "read", "description": "Reads a file"}
TOOL = {"type": "function", "function": {**READ, "parameters": {"type": "object"}}}
Render = Callable[[Sequence[Any]], str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(resolve(BUILTIN_MODEL))


def renderer(tokenizer: Any, name: str) -> Render:
    """Return a function that renders chats with this template."""
    template = (TEMPLATES / f"{name}.jinja").read_text()

    def render(messages: Sequence[Any]) -> str:
        has_tools = any(message["role"] == "tool" for message in messages)
        tools = [TOOL] if has_tools else None
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=template, tokenize=False
            )
        )

    return render


def session() -> list[list[dict[str, Any]]]:
    """Return the messages of each request of a session: tool results, each with a reminder."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that writes programs. " * 40},
        {"role": "user", "content": "Find the bug in parser.py."},
    ]
    requests = []
    for turn in range(TURNS):
        left = f"<total_tokens>{180_000 - 1_234 * turn} tokens left</total_tokens>"
        messages = [*messages, {"role": "system", "content": left}]
        requests.append(messages)
        function = {"name": "read", "arguments": {"path": f"file{turn}.py"}}
        call = {"id": f"call{turn:05}", "type": "function", "function": function}
        result = {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": f"def f{turn}(): ... " * 20,
        }
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    return requests


@pytest.mark.parametrize("name", PLACES)
def test_a_template_decides_where_inline_system_messages_go(tokenizer: Any, name: str) -> None:
    assert place_for(renderer(tokenizer, name)) == PLACES[name]


@pytest.mark.parametrize("name", sorted(PLACES.keys() - {"gemma3"}))  # its template has no tools
def test_each_turn_finds_what_the_turn_before_it_has_sent(tokenizer: Any, name: str) -> None:
    render, place = renderer(tokenizer, name), PLACES[name]
    prompts = [render(put_in_place(messages, place)) for messages in session()]
    for before, after in pairwise(prompts[1:]):
        kept = len(common_prefix(tokens(tokenizer, before), tokens(tokenizer, after)))
        assert kept >= 0.95 * len(tokens(tokenizer, before))


def tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def common_prefix(one: list[int], other: list[int]) -> list[int]:
    """Return the tokens at the beginning of both."""
    ends = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(ends, min(len(one), len(other)))]


def test_no_text_is_lost_or_moved(tokenizer: Any) -> None:
    for name, place in PLACES.items():
        (*_, last) = session()
        texts = [message["content"] for message in last if message["content"]]
        joined = json.dumps(put_in_place(last, place))
        places = [joined.index(json.dumps(text)[1:-1]) for text in texts]
        assert places == sorted(places), name


def test_consecutive_reminders_and_the_next_question_are_one_message() -> None:
    """Templates reject two consecutive messages of the user."""
    roles = ("system", "user", "assistant", "system", "system", "user")
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    *_, last = put_in_place(messages, "joined")
    assert last == {"role": "user", "content": "3\n\n4\n\n5"}


def test_content_in_parts_is_joined_part_by_part() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "e"}]},
    ]
    first, _, last = put_in_place(messages, "joined")
    assert first == {"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}
    assert [part["text"] for part in last["content"]] == ["d", "e"]
