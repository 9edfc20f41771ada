"""What agents' clients send is rewritten so that vLLM's application can read it."""

import base64
import json
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.router.api.calls import parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.history.readable import left_out, readable

MESSAGES, RESPONSES, CHATS = "/v1/messages", "/v1/responses", "/v1/chat/completions"
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
TEXT = {"type": "text", "text": "Hi"}
SEARCH = {"type": "search_result", "source": "a.org", "title": "A", "content": [TEXT]}
DOCUMENT = {
    "type": "document",
    "title": "T",
    "source": {"type": "text", "media_type": "text/plain", "data": "Body"},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
}
SERVER_USE = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
FOUND = {"type": "web_search_result", "title": "A", "url": "http://a", "encrypted_content": "xyz"}
SERVER_RESULT = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [FOUND]}
NOTES = base64.b64encode("Süß".encode()).decode()
FILE = {"filename": "n.txt", "file_data": f"data:text/plain;charset=utf-8;base64,{NOTES}"}


def read(path: str, **body: Any) -> dict[str, Any]:
    """Return the body that a replica gets, which is also what the router renders."""
    call = readable(parse_call(path, json.dumps(body).encode()))
    raw: dict[str, Any] = json.loads(call.raw)
    assert raw == call.body
    return raw


def header(path: str, **body: Any) -> str:
    return ", ".join(left_out(parse_call(path, json.dumps(body).encode())))


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def content(*blocks: Any, role: str = "user") -> Any:
    """Return the content that a message of /v1/messages with these blocks gets."""
    return read(MESSAGES, messages=[message(*blocks, role=role)])["messages"][0]["content"]


def text(*lines: str) -> dict[str, Any]:
    return {"type": "text", "text": "\n".join(lines)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("oops", [text("The tool call failed."), text("oops")]),
        ([TEXT, IMAGE], [text("The tool call failed."), TEXT, IMAGE]),
        ("", [text("The tool call failed.")]),
        (None, [text("The tool call failed.")]),
    ],
)
def test_a_failed_tool_call_says_so_to_the_model(given: Any, expected: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": given}
    (failed,) = content({**result, "is_error": True})
    assert failed["content"] == expected
    assert content({**result, "is_error": False}) == [{**result, "is_error": False}]


def test_documents_and_search_results_are_text_in_messages_and_in_results() -> None:
    inlined = [text("T", "Body"), text("A", "a.org", "Hi")]
    assert content(DOCUMENT, SEARCH, TEXT) == [*inlined, TEXT]
    (result,) = content(
        {"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT, IMAGE, SEARCH]}
    )
    assert result["content"] == [inlined[0], IMAGE, inlined[1]]
    parts = {
        "type": "document",
        "title": "T",
        "source": {"type": "content", "content": [TEXT, IMAGE]},
    }
    assert content(parts) == [text("T"), TEXT, IMAGE]
    body = read(MESSAGES, messages=[message(TEXT)], system=[TEXT, DOCUMENT])
    assert body["system"] == [TEXT, inlined[0]]


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (PDF, ["messages.1.content.1 is a document", '"base64"', '"application/pdf"', "text"]),
        ({"type": "video"}, ['messages.1.content.1 has the type "video"', "search_result"]),
        ({"text": "Hi"}, ["messages.1.content.1 has no type", "expected text, image"]),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            ['messages.1.content.1.source has the type "file"', "expected base64, url"],
        ),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, {"type": "audio"}]},
            ['messages.1.content.1.content.1 has the type "audio"', "tool_reference"],
        ),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": [PDF]},
            ["messages.1.content.1.content.0 is a document"],
        ),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_a_block_that_cannot_be_read_is_refused_by_its_place_and_type(
    path: str, block: Any, names: list[str]
) -> None:
    with pytest.raises(ApiError) as refused:
        header(path, messages=[message(TEXT), message(TEXT, block)])
    assert refused.value.status == 400
    assert all(name in refused.value.message for name in names), refused.value.message


def test_blocks_of_the_vendors_servers_are_left_out_and_their_text_stays() -> None:
    compaction = {"type": "compaction", "content": "So far: nothing.", "encrypted_content": "x"}
    fetched = {"type": "web_fetch_result", "url": "http://b", "content": DOCUMENT}
    blocks: list[Any] = [
        *(TEXT, SERVER_USE, SERVER_RESULT, compaction, {**USE, "type": "mcp_tool_use"}),
        {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": fetched},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": [TEXT]},
        {
            "type": "bash_code_execution_tool_result",
            "content": {"stdout": "out", "stderr": "err", "content": [{"file_id": "f"}]},
        },
        {"type": "container_upload", "file_id": "f"},
    ]
    assert content(*blocks, role="assistant") == [
        *(TEXT, text("A", "http://a"), text("So far: nothing."), text("http://b", "T", "Body")),
        *(TEXT, text("out", "err")),
    ]
    names = header(MESSAGES, messages=[message(*blocks, role="assistant")])
    assert names.split(", ") == [block["type"] for block in blocks[1:]]
    assert content(SERVER_USE, role="assistant") == ""


def test_tools_of_the_vendors_servers_are_left_out() -> None:
    own = {"name": "f", "input_schema": {"type": "object"}}
    given = [{"type": "web_search_20250305", "name": "web_search"}, own, {"type": "mcp_toolset"}]
    asks = {"messages": [message(TEXT)], "tools": given}
    body = read(MESSAGES, **asks, tool_choice={"type": "any"})
    assert (body["tools"], body["tool_choice"]) == ([own], {"type": "any"})
    forced = {"type": "tool", "name": "web_search"}
    assert "tool_choice" not in read(MESSAGES, **asks, tool_choice=forced)
    none_left = read(MESSAGES, **(asks | {"tools": given[:1]}), tool_choice={"type": "any"})
    assert none_left.keys() == {"messages"}
    names = header(MESSAGES, **asks, mcp_servers=[{"type": "url"}])
    assert names == "web_search_20250305, mcp_toolset, mcp_servers"
    with pytest.raises(ApiError, match=r'tools.1 has the type "nothing"; expected custom'):
        header(MESSAGES, messages=[], tools=[own, {"type": "nothing", "name": "n"}])


def items(*given: Any) -> Any:
    return read(RESPONSES, input=[*given])["input"]


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_the_output_of_a_call_says_that_it_is_incomplete(kind: str) -> None:
    output = {"type": kind, "call_id": "c", "output": "half", "status": "incomplete"}
    note = "The tool call did not complete."
    assert items(output) == [{**output, "output": f"{note}\nhalf"}]
    parts = [{"type": "input_text", "text": "half"}]
    first = {"type": "input_text", "text": note}
    assert items({**output, "output": parts}) == [{**output, "output": [first, *parts]}]
    whole = {**output, "status": "completed"}
    assert items(whole) == [whole]


def test_all_texts_of_an_assistants_message_and_of_reasoning_reach_the_model() -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "Well."}]
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    joined = [{"type": "output_text", "text": "No.\nWell.", "annotations": []}]
    assert items({**said, "content": parts}) == [{**said, "content": joined}]
    typed = {"type": "message", "role": "assistant"}
    assert items({"role": "assistant", "content": parts}) == [{**typed, "content": joined}]
    assert items({"role": "assistant", "content": parts[1:]}) == [{**typed, "content": parts[1:]}]
    assert items({**said, "content": []}, {"role": "user", "content": "Hi"})[0]["role"] == "user"
    steps = [{"type": "reasoning_text", "text": step} for step in ("one", "two")]
    summary = [{"type": "summary_text", "text": step} for step in ("three", "four")]
    (reasoning,) = items({"type": "reasoning", "id": "r", "summary": summary, "content": steps})
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "one\ntwo"}]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "three\nfour"}]


def test_items_of_the_vendors_servers_are_left_out_and_their_text_stays() -> None:
    user = {"role": "user", "content": "Go on"}
    searched = {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}
    ran = {"type": "local_shell_call_output", "id": "l", "output": "1 file", "status": "incomplete"}
    asked = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "output": "42"}
    assert items(searched, ran, asked, user) == [
        {
            "type": "message",
            "role": "assistant",
            "content": "The tool call did not complete.\n1 file",
        },
        {"type": "message", "role": "assistant", "content": "42"},
        user,
    ]
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "local_shell"}]
    body = read(RESPONSES, input="Hi", tools=tools, tool_choice={"type": "web_search"})
    assert body == {"input": "Hi", "tools": tools[1:2]}
    assert read(RESPONSES, input="Hi", tools=tools[:1], tool_choice="required") == {"input": "Hi"}
    names = header(RESPONSES, input=[searched, ran, asked], tools=tools)
    assert names == "web_search_call, local_shell_call_output, mcp_call, web_search, local_shell"
    assert header(CHATS, messages=[user], web_search_options={}) == "web_search_options"
    assert header(RESPONSES, input=[user], tools=tools[1:2]) == ""


def test_files_with_text_are_read_and_others_are_refused_by_their_place() -> None:
    named = {"type": "input_text", "text": "n.txt\nSüß"}
    (asked,) = items({"role": "user", "content": [{"type": "input_file", **FILE}]})
    assert asked["content"] == [named]
    output = {"type": "function_call_output", "call_id": "c"}
    (answered,) = items({**output, "output": [{"type": "input_file", **FILE}]})
    assert answered["output"] == [named]
    chat = read(CHATS, messages=[message({"type": "file", "file": FILE})])
    assert chat["messages"] == [message(text("n.txt", "Süß"))]
    stored = [named, {"type": "input_file", "file_id": "f"}]
    with pytest.raises(ApiError, match=r"input\.1\.content\.1 is a file .*file_id"):
        header(RESPONSES, input=[message(), message(*stored)])
    pdf = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}}
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0 is a file .*pdf"):
        header(CHATS, messages=[message(pdf)])
    with pytest.raises(ApiError, match=r'messages\.0\.content\.1 has the type "movie"; expected'):
        header(CHATS, messages=[message(TEXT, {"type": "movie"})])
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0\.text is missing"):
        header(CHATS, messages=[message({"type": "text"})])
    said = message({"type": "movie"}, role="assistant")
    with pytest.raises(
        ApiError, match=r'input\.0\.content\.0 has .*"movie"; .* output_text, refus'
    ):
        header(RESPONSES, input=[said])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"messages": [message(TEXT, IMAGE), message(USE, role="assistant")]}),
        (CHATS, {"messages": [message(TEXT), {"role": "assistant", "content": None}, 5]}),
        (RESPONSES, {"input": [message(), {"type": "item_reference", "id": "i"}, "x"]}),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "unknown"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
def test_a_body_that_can_be_read_keeps_its_bytes(path: str, body: Any) -> None:
    raw = json.dumps(body, indent=1).encode()
    call = parse_call(path, raw)
    assert readable(call) is call
    assert left_out(call) == []


def test_earlier_turns_are_read_too_and_the_calls_own_input_stays() -> None:
    own = {"role": "user", "content": "And now?"}
    call = parse_call(RESPONSES, json.dumps({"input": [own]}).encode())
    earlier = {"type": "mcp_call", "output": "42"}
    whole = replace(call, raw=json.dumps({"input": [earlier, own]}).encode())
    read = readable(whole, has_more_messages=True)
    assert json.loads(read.raw)["input"][0]["content"] == "42"
    assert read.body == call.body
