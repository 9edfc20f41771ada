"""Valid and invalid bodies of requests, for every route that vLLM answers."""

import re
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# A text with two calls. With tool_choice `required`, the model chooses the number of calls.
CALLED_TWICE = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>' * 2
GRAMMAR = 'root ::= "SELECT " column " FROM t;"\ncolumn ::= "a" | "b, " column\n'
HISTORY = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "20 C"},
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}
NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}

# Chats whose responses another engine can continue, wherever they are cut.
CONTINUED: dict[str, Body] = {
    "plain": {},
    "named tool": {"tools": [STRICT], "tool_choice": NAMED},
    "required tool": {"tools": [STRICT], "tool_choice": "required", "max_tokens": 24},
    "auto tool": {"tools": [TOOL], "structured_outputs": {"choice": [CALLED]}, "max_tokens": 24},
    "json schema": {"response_format": SCHEMA, "max_tokens": 24},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "regex": {"structured_outputs": {"regex": "[a-z]{12,20}"}},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "choice": {"structured_outputs": {"choice": ["yes, of course it is", "no, it is not"]}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["e"], "min_tokens": 4},
    "frequency penalty": {"frequency_penalty": 0.5},
    "no end": {"ignore_eos": True},
}

# Requests to other routes whose responses can be continued, too.
OTHERS: dict[str, Body] = {
    COMPLETIONS: {"prompt": "One, two,", "max_tokens": 14, "logprobs": 2},
    RESPONSES: {"input": "Say hi", "max_output_tokens": 14},
    MESSAGES: {
        "messages": ASK,
        "max_tokens": 20,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    },
}

# Requests for which an engine returns many outputs, even if an output has several tokens.
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 400, "maxLength": 400}},
    "required": ["text"],
    "additionalProperties": False,
}
MANY_OUTPUTS: dict[str, tuple[str, Body]] = {
    "chat": (CHATS, {"messages": ASK, "max_tokens": 96, "ignore_eos": True}),
    "two tools": (
        CHATS,
        {
            "messages": ASK,
            "max_tokens": 120,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "structured_outputs": {"choice": [CALLED_TWICE]},
        },
    ),
    "response": (RESPONSES, {"input": ASK, "max_output_tokens": 96, "ignore_eos": True}),
    "message": (
        MESSAGES,
        {
            "messages": ASK,
            "max_tokens": 96,
            "tools": [{"name": "write", "input_schema": TEXT}],
            "tool_choice": {"type": "tool", "name": "write"},
        },
    ),
}

# For each route, a body, and the same body with fields about its conversation that vLLM may not
# know.
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MARKED = [{"role": "user", "content": [{"type": "text", "text": "Say hi", **MARK}]}]
UNMARKED = [{"role": "user", "content": [{"type": "text", "text": "Say hi"}]}]
HINTS: Body = {
    "session_id": "s-1",
    "session_end": True,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
    "metadata": {"user_id": "user_0a_account__session_s-1"},
}
CONVERSATIONS: list[tuple[str, Body, Body]] = [
    (CHATS, {"messages": UNMARKED}, {"messages": MARKED, **HINTS}),
    (COMPLETIONS, {"prompt": "One, two,"}, HINTS),
    (RESPONSES, {"input": "Say hi"}, HINTS),
    (
        MESSAGES,
        {"messages": UNMARKED, "max_tokens": 12, "system": [{"type": "text", "text": "Hi"}]},
        {
            "messages": MARKED,
            "system": [{"type": "text", "text": "Hi", **MARK}],
            **MARK,
            **HINTS,
        },
    ),
]

# Changes to a valid body, for any route and for each one.
_ANY: list[Body] = [
    {"top_p": 0.5, "temperature": 0.7, "seed": 3},
    {"top_k": 5, "temperature": 1.0, "seed": 4},
    {"min_p": 0.1, "temperature": 1.0, "seed": 5},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"logit_bias": {"100": 5}},
    {"stop_token_ids": [100]},
    {"include_stop_str_in_output": True, "stop": ["e"]},
    {"skip_special_tokens": False},
    {"return_token_ids": True},
    {"add_special_tokens": False},
    {"cache_salt": "mine"},
    {"user": "somebody", "unknown_field": 1},
    # rejected:
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 100_000},
    {"n": 0},
    {"seed": "x"},
    {"stop": [""]},
    {"model": "other"},
    {"stream": "maybe"},
    {"response_format": NONSENSE},
    {"structured_outputs": {"regex": "("}},
    {"logit_bias": {"9999999": 1}},
    {"truncate_prompt_tokens": 8},
]
_CHATS: list[Body] = [
    *CONTINUED.values(),
    {"messages": HISTORY, "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "Be brief."}, *ASK]},
    {"messages": [{"role": "developer", "content": "Be brief."}, *ASK]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "parallel_tool_calls": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "low"},
    {"max_completion_tokens": 3},
    {"echo": True},
    {"messages": [*ASK, {"role": "assistant", "content": "It"}], "add_generation_prompt": False},
    # rejected:
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "nobody", "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"tool_choice": NAMED},
    {"tools": [{"type": "function"}]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"top_logprobs": 2},
    {"chat_template": "{{ messages }}"},
]
_COMPLETIONS: list[Body] = [
    {},
    {"logprobs": 2},
    {"echo": True},
    {"prompt": [100, 200, 300]},
    {"prompt": ["only one"]},
    {"max_tokens": 3},
    {"response_format": SCHEMA, "max_tokens": 24},
    # rejected:
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": {"a": 1}},
    {"prompt": [10_000_000]},
    {"logprobs": -1},
]
_RESPONSES: list[Body] = [
    {},
    {"instructions": "Be brief."},
    {"input": [{"role": "user", "content": "Say hi"}]},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto"},
    {"text": {"format": {"type": "json_schema", **SCHEMA["json_schema"]}}},  # type: ignore[dict-item]
    {"metadata": {"a": "b"}, "store": False},
    # rejected:
    {"input": 5},
    {"temperature": "hot"},
    {"previous_response_id": "resp_unknown"},
    {"model": "other"},
]
_MESSAGES: list[Body] = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "Be brief."}]},
    {"stop_sequences": ["e"]},
    {
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 24,
    },
    # rejected:
    {"max_tokens": None},
    {"messages": []},
    {"messages": "hi"},
    {"model": "other"},
]


def calls(model: str) -> Iterator[tuple[str, Body]]:
    """Yield the path and body of all requests, each with and without streaming."""
    routes: list[tuple[str, Body, list[Body]]] = [
        (CHATS, {"messages": ASK, "max_tokens": 8}, [*_CHATS, *_ANY]),
        (COMPLETIONS, {"prompt": "One, two,", "max_tokens": 6}, [*_COMPLETIONS, *_ANY]),
        (RESPONSES, {"input": "Say hi", "max_output_tokens": 12}, _RESPONSES),
        (MESSAGES, {"messages": ASK, "max_tokens": 12}, _MESSAGES),
    ]
    for path, base, changes in routes:
        for change in changes:
            for stream in (False, True):
                yield path, {"model": model, "temperature": 0, **base, "stream": stream, **change}


TRUST = "--trust-request-chat-template"  # vLLM names it in chats up to 0.31


def comparable(data: bytes | str) -> str:
    """Remove random ids, times, and numbers that depend on the cache.

    vLLM counts all of the prompt in the first event of a message, and kvroute not the cached part.
    """
    text = data if isinstance(data, str) else data.decode()
    text = re.sub(r'"(created|created_at|completed_at)":\s?[\d.]+', r'"\1":0', text)
    text = re.sub(r"\b(chatcmpl-tool|call_|msg_|resp_|rs_|fc_|chatcmpl|cmpl)[-\w]+", r"\1", text)
    text = re.sub(r'"(id|item_id)":"[0-9a-f]{16}"', r'"\1":""', text)  # vLLM 0.31's item ids
    text = text.replace("--engine-arg trust_request_chat_template=true", TRUST)
    text = re.sub(r'"signature":"\w+"', '"signature":""', text)
    text = re.sub(r'("type":"message_start".*?"usage":)\{[^}]*\}', r"\1{}", text)
    text = re.sub(r"-?\d+\.\d{3,}(e-?\d+)?", "0.0", text)  # the last digits depend on the cache
    return re.sub(r'"(\w*cached_tokens|\w*cache_\w+)":\s?(\d+|null)', r'"\1":0', text)


def texts(data: bytes) -> list[str]:
    """Return all texts that the model has generated."""
    return [text for text in _TEXT.findall(data.decode()) if text]


_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TEXT = re.compile(rf'"(?:text|content|delta|partial_json|arguments)":\s?{_STRING.pattern}')
