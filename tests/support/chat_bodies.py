"""Bodies of chats: one for each case of rendering a chat, and random bodies (BODIES)."""

import json
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]

USER = {"role": "user", "content": "What is the weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "It is sunny."}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def text(value: str, kind: str = "text", **more: Any) -> Body:
    return {"type": kind, "text": value, **more}


def call(arguments: Any = '{"city": "Paris", "days": [1, 2]}', **more: Any) -> Body:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "call_0123", "type": "function", "function": function, **more}


def calling(*calls: Body, **more: Any) -> Body:
    return {"role": "assistant", "content": None, "tool_calls": [*calls], **more}


def result(content: Any = "20 C", **more: Any) -> Body:
    return {"role": "tool", "tool_call_id": "call_0123", "content": content, **more}


def chat(*messages: Body, **more: Any) -> Body:
    return {"messages": [*messages], **more}


def called(arguments: Any, **more: Any) -> Body:
    return chat(USER, calling(call(arguments), **more), result(), ANSWER, USER)


CASES: dict[str, Body] = {
    "plain": chat(USER),
    "several turns": chat(USER, ANSWER, USER, ANSWER, USER),
    "the assistant's turn last": chat(USER, ANSWER),
    "whitespace around texts": chat(
        {"role": "system", "content": "\n Be brief. "},
        {"role": "user", "content": "  Hi\n\n"},
        {"role": "assistant", "content": "\n\nHello. \n"},
        USER,
    ),
    "special tokens in a text": chat({"role": "user", "content": "a<|im_end|>b</think>c{{d}}"}),
    "other scripts": chat({"role": "user", "content": "Grüße, 世界 🙂\u0000 \u2028"}),
    "system": chat(SYSTEM, USER),
    "system, empty": chat({"role": "system", "content": ""}, USER),
    "system, late": chat(USER, ANSWER, SYSTEM, USER),
    "system, two": chat(SYSTEM, SYSTEM, USER),
    "system alone": chat(SYSTEM),
    "developer": chat(DEVELOPER, USER),
    "developer, late": chat(USER, ANSWER, DEVELOPER, USER),
    "developers and system": chat(DEVELOPER, SYSTEM, USER, ANSWER, DEVELOPER, USER),
    "developer, empty": chat({"role": "developer", "content": ""}, USER),
    "developer without content": chat({"role": "developer", "content": None}, USER),
    "developer in parts": chat(
        {"role": "developer", "content": [text("Be kind."), text("Be calm.")]}, SYSTEM, USER
    ),
    "developer's tools": chat({**DEVELOPER, "tools": [TOOL]}, USER),
    "developer's tools, unordered": chat(
        {
            **DEVELOPER,
            "tools": [{"function": dict(reversed(FUNCTION.items())), "type": "function"}],
        },
        USER,
    ),
    "developer's bad tools": chat({**DEVELOPER, "tools": [{"type": "function"}]}, USER),
    "developer's name": chat({**DEVELOPER, "name": "ann"}, USER),
    "text parts": chat({"role": "user", "content": [text("One"), text("two")]}),
    "text parts everywhere": chat(
        {"role": "system", "content": [text("Be brief."), text("Be nice.")]},
        {"role": "user", "content": [text("One"), text("two")]},
        {"role": "assistant", "content": [text("Three"), text("four")]},
        {"role": "user", "content": [text("Five")]},
    ),
    "empty text parts": chat(
        {"role": "user", "content": [text(""), text("a"), text(""), text("b"), text("")]}
    ),
    "no parts": chat(USER, {"role": "assistant", "content": []}, USER),
    "strings as parts": chat({"role": "user", "content": ["One", text("two"), ""]}),
    "input_text parts": chat({"role": "user", "content": [text("One", "input_text"), text("two")]}),
    "output_text parts": chat(
        USER, {"role": "assistant", "content": [text("One", "output_text")]}, USER
    ),
    "refusal part": chat(
        USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER
    ),
    "thinking part": chat(
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, text("Yes")]},
        USER,
    ),
    "thinking part, closed": chat(
        USER,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm", "closed": True}, text("Yes")],
        },
        USER,
    ),
    "part without type": chat({"role": "user", "content": [{"text": "One"}]}),
    "part with text null": chat({"role": "user", "content": [{"type": "text", "text": None}]}),
    "part with a number": chat({"role": "user", "content": [{"type": "text", "text": 1}]}),
    "part of another type": chat({"role": "user", "content": [{"type": "zzz", "text": "One"}]}),
    "part with cache_control": chat(
        {"role": "user", "content": [text("One", cache_control={"type": "ephemeral"})]}
    ),
    "part with name": chat({"role": "user", "content": [text("One", name="bob", detail="x")]}),
    "part with uuid": chat({"role": "user", "content": [text("One", uuid="u")]}),
    "image": chat(
        {
            "role": "user",
            "content": [text("a"), {"type": "image_url", "image_url": {"url": "data:,"}}],
        }
    ),
    "content null": chat(USER, {"role": "assistant", "content": None}, USER),
    "content missing": chat(USER, {"role": "assistant"}, USER),
    "user's content null": chat({"role": "user", "content": None}),
    "user's content missing": chat({"role": "user"}),
    "content is a number": chat({"role": "user", "content": 1}),
    "content is an object": chat({"role": "user", "content": text("One")}),
    "tool calls with JSON": chat(USER, calling(call()), result()),
    "tool calls, then an answer": called('{"city": "Paris"}'),
    "tool calls, two": chat(
        USER, calling(call(), call('{"city": "Rom"}')), result(), result("30 C"), ANSWER, USER
    ),
    "tool calls with tools": chat(USER, calling(call()), result(), tools=[TOOL]),
    "tool calls and content": called('{"city": "Paris"}', content="I look."),
    "tool calls and empty content": called('{"city": "Paris"}', content=""),
    "tool calls and parts": called('{"city": "Paris"}', content=[text("I"), text("look.")]),
    "tool calls, content missing": chat(
        USER, {"role": "assistant", "tool_calls": [call()]}, result(), ANSWER, USER
    ),
    "tool calls, bad JSON": called("{oh"),
    "tool calls, JSON list": called("[1]"),
    "tool calls, JSON null": called("null"),
    "tool calls, JSON with NaN": called('{"a": NaN, "b": 1e400}'),
    "tool calls, JSON with an escape": called('{"city": "\\u00e9\\ud83d\\ude42"}'),
    "tool calls, JSON twice the same": called('{"a": 1, "a": 2}'),
    "tool calls, empty arguments": called(""),
    "tool calls, no arguments": called("{}"),
    "tool calls, null arguments": called(None),
    "tool calls, object": called({"city": "Paris"}),
    "tool calls, list": called([1]),
    "tool calls, arguments missing": chat(
        USER, calling({"id": "c", "type": "function", "function": {"name": "f"}}), result()
    ),
    "tool calls empty": chat(USER, {**ANSWER, "tool_calls": []}, USER),
    "tool calls null": chat(USER, {**ANSWER, "tool_calls": None}, USER),
    "tool calls, no list": chat(USER, {**ANSWER, "tool_calls": {"a": 1}}, USER),
    "tool calls, string": chat(USER, {**ANSWER, "tool_calls": "abc"}, USER),
    "tool calls without type": chat(
        USER, calling({"id": "c", "function": call()["function"]}), result()
    ),
    "tool calls without id": chat(
        USER, calling({"type": "function", "function": call()["function"]}), result()
    ),
    "tool calls without name": chat(
        USER, calling({"id": "c", "type": "function", "function": {"arguments": "{}"}}), result()
    ),
    "tool calls without function": chat(USER, calling({"id": "c", "type": "function"}), result()),
    "tool calls of another type": chat(
        USER,
        calling({"id": "c", "type": "custom", "custom": {"name": "f", "input": "a"}}),
        result(),
    ),
    "tool calls with extra fields": chat(
        USER,
        calling(
            {
                "zzz": 1,
                "type": "function",
                "index": 0,
                "id": "call_0123",
                "function": {"arguments": '{"city": "Paris"}', "yyy": 1, "name": "get_weather"},
            }
        ),
        result(),
    ),
    "tool calls of a user": chat({**USER, "tool_calls": [call()]}),
    "tool results in parts": chat(
        USER, calling(call()), result([text("20 C"), text(""), text("sunny")])
    ),
    "tool results, strings as parts": chat(USER, calling(call()), result(["20 C", "sunny"])),
    "tool results, no parts": chat(USER, calling(call()), result([])),
    "tool results, empty": chat(USER, calling(call()), result("")),
    "tool results, null": chat(USER, calling(call()), result(None)),
    "tool results, JSON": chat(USER, calling(call()), result('{"t": 20}'), ANSWER, USER),
    "tool results, object": chat(USER, calling(call()), result({"t": 20})),
    "tool results with name": chat(USER, calling(call()), result(name="get_weather")),
    "tool results without id": chat(USER, calling(call()), {"role": "tool", "content": "20 C"}),
    "tool results with null id": chat(USER, calling(call()), result(tool_call_id=None)),
    "tool reference": chat(
        USER, calling(call()), result([{"type": "tool_reference", "name": "get_weather"}])
    ),
    "tools": chat(USER, tools=[TOOL]),
    "tools and system": chat(SYSTEM, USER, ANSWER, USER, tools=[TOOL, TOOL]),
    "tools and developer": chat(DEVELOPER, USER, tools=[TOOL]),
    "tools auto": chat(USER, tools=[TOOL], tool_choice="auto"),
    "tools none": chat(USER, tools=[TOOL], tool_choice="none"),
    "tools none, with calls": chat(
        USER, calling(call()), result(), tools=[TOOL], tool_choice="none"
    ),
    "tools null choice": chat(USER, tools=[TOOL], tool_choice=None),
    "tools required": chat(USER, tools=[TOOL], tool_choice="required"),
    "tools named": chat(USER, tools=[TOOL], tool_choice=NAMED),
    "tools empty": chat(USER, tools=[]),
    "tools null": chat(USER, tools=None),
    "tools are an object": chat(USER, tools={"a": 1}),
    "tool choice without tools": chat(USER, tool_choice="auto"),
    "tool with extra fields": chat(
        USER, tools=[{"yyy": 2, "function": {"zzz": 1, **FUNCTION}, "type": "function"}]
    ),
    "tool in another order": chat(
        USER, tools=[{"function": dict(reversed(FUNCTION.items())), "type": "function"}]
    ),
    "tool with its name alone": chat(USER, tools=[{"type": "function", "function": {"name": "f"}}]),
    "tool with nulls": chat(
        USER,
        tools=[
            {"function": {"name": "f", "description": None, "parameters": None, "strict": None}}
        ],
    ),
    "tool without type": chat(USER, tools=[{"function": FUNCTION}]),
    "tool of another type": chat(USER, tools=[{"type": "custom", "function": FUNCTION}]),
    "tool of null type": chat(USER, tools=[{"type": None, "function": FUNCTION}]),
    "tool, strict": chat(
        USER, tools=[{"type": "function", "function": FUNCTION | {"strict": True}}]
    ),
    "tool, strict is a string": chat(USER, tools=[{"function": FUNCTION | {"strict": "yes"}}]),
    "tool, deferred": chat(USER, tools=[TOOL | {"defer_loading": True}]),
    "tool, its function deferred": chat(
        USER, tools=[{"type": "function", "function": FUNCTION | {"defer_loading": False}}]
    ),
    "tool without a name": chat(USER, tools=[{"type": "function", "function": {}}]),
    "tool with bad parameters": chat(
        USER, tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]
    ),
    "tool with bad description": chat(
        USER, tools=[{"type": "function", "function": {"name": "f", "description": 1}}]
    ),
    "tool is null": chat(USER, tools=[None]),
    "tool with other scripts": chat(
        USER, tools=[{"type": "function", "function": {"name": "f", "description": "<é>'&\"\n"}}]
    ),
    "continue the final message": chat(
        USER, ANSWER, continue_final_message=True, add_generation_prompt=False
    ),
    "continue the final message in parts": chat(
        USER,
        {"role": "assistant", "content": [text("It"), text("is")]},
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "continue the final message with whitespace": chat(
        USER,
        {"role": "assistant", "content": " It is "},
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "continue an empty message": chat(
        USER,
        {"role": "assistant", "content": ""},
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "continue a user's message": chat(
        USER, continue_final_message=True, add_generation_prompt=False
    ),
    "continue a call": chat(
        USER, calling(call()), continue_final_message=True, add_generation_prompt=False
    ),
    "continue with reasoning": chat(
        USER,
        {**ANSWER, "reasoning": "Hm"},
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "continue, generation prompt by default": chat(USER, ANSWER, continue_final_message=True),
    "continue and generation prompt": chat(
        USER, ANSWER, continue_final_message=True, add_generation_prompt=True
    ),
    "continue by a string": chat(
        USER, ANSWER, continue_final_message="true", add_generation_prompt="false"
    ),
    "continue by a false string": chat(
        USER, ANSWER, continue_final_message="false", add_generation_prompt=False
    ),
    "no generation prompt": chat(USER, add_generation_prompt=False),
    "no generation prompt after an answer": chat(USER, ANSWER, add_generation_prompt=False),
    "generation prompt null": chat(USER, add_generation_prompt=None),
    "generation prompt 0": chat(USER, add_generation_prompt=0),
    "thinking off": chat(USER, chat_template_kwargs={"enable_thinking": False}),
    "thinking on": chat(USER, ANSWER, USER, chat_template_kwargs={"enable_thinking": True}),
    "thinking null": chat(USER, chat_template_kwargs={"enable_thinking": None}),
    "thinking by its other name": chat(USER, chat_template_kwargs={"thinking": True}),
    "unknown options": chat(USER, chat_template_kwargs={"zzz": 1, "enable_thinking": False}),
    "options null": chat(USER, chat_template_kwargs=None),
    "options are a list": chat(USER, chat_template_kwargs=[]),
    "options are a text": chat(USER, chat_template_kwargs="abc"),
    "generation prompt as an option": chat(
        USER, chat_template_kwargs={"add_generation_prompt": False}
    ),
    "continue as an option": chat(
        USER,
        ANSWER,
        chat_template_kwargs={"continue_final_message": True, "add_generation_prompt": False},
    ),
    "tools as an option": chat(USER, chat_template_kwargs={"tools": [TOOL]}),
    "tools as an option too": chat(USER, tools=[TOOL], chat_template_kwargs={"tools": []}),
    "messages as an option": chat(USER, chat_template_kwargs={"messages": [SYSTEM]}),
    "conversation as an option": chat(USER, chat_template_kwargs={"conversation": [SYSTEM]}),
    "template as an option": chat(USER, chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    "null template as an option": chat(USER, chat_template_kwargs={"chat_template": None}),
    "tokenize as an option": chat(USER, chat_template_kwargs={"tokenize": True}),
    "no tokenize as an option": chat(USER, chat_template_kwargs={"tokenize": False}),
    "tokens' mask as an option": chat(
        USER, chat_template_kwargs={"return_assistant_tokens_mask": True}
    ),
    "dict as an option": chat(USER, chat_template_kwargs={"return_dict": True}),
    "lengths as options": chat(
        USER, chat_template_kwargs={"max_length": 3, "truncation": True, "padding": True}
    ),
    "tokens as options": chat(
        USER, chat_template_kwargs={"bos_token": "B", "eos_token": "E", "pad_token": "P"}
    ),
    "functions as options": chat(
        USER, chat_template_kwargs={"strftime_now": 1, "raise_exception": 1, "self": 1}
    ),
    "date as an option": chat(
        SYSTEM, USER, chat_template_kwargs={"date_string": "1 Jan 2026", "xml_tools": []}
    ),
    "template's own options": chat(
        USER,
        tools=[TOOL],
        chat_template_kwargs={
            "tools_in_user_message": False,
            "custom_tools": [TOOL],
            "builtin_tools": ["python"],
            "model_identity": "A router.",
            "controls": {"length": "long"},
        },
    ),
    "reasoning_effort": chat(USER, reasoning_effort="low"),
    "reasoning_effort high": chat(USER, ANSWER, USER, reasoning_effort="high"),
    "reasoning_effort none": chat(USER, reasoning_effort="none"),
    "reasoning_effort and thinking": chat(
        USER, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    ),
    "reasoning_effort twice": chat(
        USER, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}
    ),
    "reasoning_effort auto": chat(USER, chat_template_kwargs={"reasoning_effort": "auto"}),
    "reasoning_effort unknown": chat(USER, reasoning_effort="zzz"),
    "reasoning": chat(USER, {**ANSWER, "reasoning": "Hm"}, USER),
    "reasoning_content": chat(USER, {**ANSWER, "reasoning_content": "Hm"}, USER),
    "reasoning twice": chat(USER, {**ANSWER, "reasoning": "Hm", "reasoning_content": "Oh"}, USER),
    "reasoning null": chat(USER, {**ANSWER, "reasoning": None, "reasoning_content": "Oh"}, USER),
    "reasoning empty": chat(USER, {**ANSWER, "reasoning": "", "reasoning_content": "Oh"}, USER),
    "reasoning last": chat(USER, {**ANSWER, "reasoning": "Hm"}),
    "reasoning of calls": chat(USER, calling(call(), reasoning="Hm"), result()),
    "reasoning of a call in parts": chat(
        USER, calling(call(), content=[text("a")], reasoning_content="Hm"), result()
    ),
    "reasoning is a list": chat(USER, {**ANSWER, "reasoning": ["Hm"]}, USER),
    "reasoning of a user": chat({**USER, "reasoning": "Hm", "reasoning_content": "Oh"}),
    "reasoning in the text": chat(
        USER, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}, USER
    ),
    "reasoning and a refusal": chat(USER, {**ANSWER, "refusal": "No", "reasoning": "Hm"}, USER),
    "reasoning and audio": chat(USER, {**ANSWER, "audio": None, "reasoning": "Hm"}, USER),
    "refusal beside the content": chat(USER, {**ANSWER, "refusal": None}, USER),
    "refusal without content": chat(USER, {"role": "assistant", "refusal": "No"}, USER),
    "function call": chat(
        USER, {**ANSWER, "function_call": {"name": "f", "arguments": "{}"}}, USER
    ),
    "name": chat({**USER, "name": "bob"}),
    "name of all": chat(
        {**SYSTEM, "name": "a"},
        {**USER, "name": "b"},
        {**ANSWER, "name": "c"},
        {**USER, "name": ""},
    ),
    "name is a number": chat({**USER, "name": 1}),
    "name null": chat({**USER, "name": None}),
    "task": chat({**USER, "task": "query"}),
    "extra field of a message": chat({**USER, "zzz": 1, "tool_call_id": "c"}),
    "extra fields of the body": chat(USER, zzz=1, user="bob", metadata={"a": "b"}),
    "prefix and thinking fields": chat(
        USER, {**ANSWER, "prefix": True, "thinking": "Hm", "partial": True}
    ),
    "another role": chat({"role": "zzz", "content": "Hi"}, USER),
    "function role": chat(USER, {"role": "function", "name": "f", "content": "20 C"}),
    "role missing": chat({"content": "Hi"}),
    "role is a number": chat({"role": 1, "content": "Hi"}),
    "message is a string": chat("Hi"),  # type: ignore[arg-type]
    "billing header": chat(
        {"role": "system", "content": "x-anthropic-billing-header: a\nBe brief."}, USER
    ),
    "billing header alone": chat(
        {"role": "system", "content": "x-anthropic-billing-header: a"}, USER
    ),
    "billing header in parts": chat(
        {
            "role": "system",
            "content": [text("x-anthropic-billing-header: a"), text("Be brief."), text("Be nice.")],
        },
        USER,
    ),
    "billing header in a string part": chat(
        {"role": "system", "content": ["x-anthropic-billing-header: a\nBe brief."]}, USER
    ),
    "billing header in an input_text": chat(
        {"role": "system", "content": [text("x-anthropic-billing-header: a\nB", "input_text")]},
        USER,
    ),
    "billing header in a refusal": chat(
        {
            "role": "system",
            "content": [{"type": "refusal", "refusal": "x-anthropic-billing-header"}],
        },
        USER,
    ),
    "billing header of a developer": chat(
        {"role": "developer", "content": "x-anthropic-billing-header: a\nBe brief."}, USER
    ),
    "billing header of a user": chat(
        {"role": "user", "content": "x-anthropic-billing-header: a\nBe brief."}
    ),
    "documents": chat(USER, documents=[{"title": "A", "text": "b"}]),
    "documents and tools": chat(
        SYSTEM, USER, documents=[{"doc_id": "1", "text": "b"}], tools=[TOOL]
    ),
    "documents empty": chat(USER, documents=[]),
    "documents as an option": chat(
        USER, chat_template_kwargs={"documents": [{"doc_id": 1, "text": "b"}]}
    ),
    "documents are no objects": chat(USER, documents=["b"]),
    "special tokens added": chat(USER, add_special_tokens=True),
    "no special tokens added": chat(USER, add_special_tokens=False),
    "truncated": chat(USER, truncate_prompt_tokens=5),
    "template of its own": chat(USER, chat_template="{{ messages[0].content }}"),
    "processor's options": chat(USER, mm_processor_kwargs={}),
    "no messages": chat(),
    "messages missing": {},
}

LEFT = "left to a replica"  # result for a body that the router leaves to a replica
# Names of the cases that vLLM renders, but that the router leaves to a replica. Cases that vLLM
# rejects are not listed.
ONLY_REPLICAS = {
    "developer's tools",
    "developer's tools, unordered",
    "developer's bad tools",
    "strings as parts",
    "input_text parts",
    "thinking part",
    "thinking part, closed",
    "part with name",
    "tool reference",
    "tool, strict is a string",
    "continue by a false string",
    "generation prompt 0",
    "tools as an option",
    "tools as an option too",
    "tokenize as an option",
    "no tokenize as an option",
    "another role",
    "function role",
    "special tokens added",
    "no special tokens added",
    "truncated",
    "processor's options",
}

TEXTS = st.text(max_size=4) | st.sampled_from(
    ["\n a\n", "<think>\nb</think>\n\nc", "<|im_end|>", "x-anthropic-billing-header: d\ne"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CONTENTS = (
    TEXTS
    | st.lists(st.builds(text, TEXTS), max_size=3)
    | st.lists(st.builds(lambda value: text(value, cache_control={}), TEXTS), max_size=2)
)
NAMED_BY = {"name": TEXTS, "zzz": VALUES}
CALLS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXTS, "arguments": OBJECTS.map(json.dumps) | VALUES.map(json.dumps) | TEXTS},
            optional={"extra": VALUES},
        ),
    },
    optional={"index": st.integers()},
).flatmap(lambda call: st.permutations([*call.items()]).map(dict))
ASSISTANTS = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        **NAMED_BY,
        "content": st.none() | CONTENTS,
        "tool_calls": st.none() | st.lists(CALLS, max_size=2),
        "reasoning": st.none() | TEXTS,
        "reasoning_content": st.none() | TEXTS,
        "refusal": st.none() | TEXTS,
    },
)
RESULTS = st.fixed_dictionaries(
    {"role": st.just("tool"), "tool_call_id": TEXTS, "content": CONTENTS}, optional=NAMED_BY
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user"]), "content": CONTENTS},
    optional=NAMED_BY,
)
TOOLS = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": TEXTS},
            optional={
                "description": st.none() | TEXTS,
                "parameters": st.none() | OBJECTS,
                "strict": st.none() | st.booleans(),
                "defer_loading": st.none() | st.booleans(),
                "zzz": VALUES,
            },
        )
    },
    optional={"type": st.just("function"), "defer_loading": st.booleans(), "zzz": VALUES},
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(OTHERS | ASSISTANTS | RESULTS, min_size=1, max_size=5)},
    optional={
        "tools": st.lists(TOOLS, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(["none", "auto", "required"]),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "reasoning_effort": st.sampled_from(["none", "low", "high"]),
        "chat_template_kwargs": st.none()
        | st.dictionaries(st.sampled_from(["enable_thinking", "thinking", "zzz"]), VALUES),
        "documents": st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2),
    },
)
