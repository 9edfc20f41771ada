"""Reads the tools, items and parts of chats and of the Responses API.

vLLM's application knows messages, reasoning, and the calls of functions and custom tools. The calls
of other tools are left out; what they returned stays as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvroute.router.api.calls import MEDIA, objects
from kvroute.router.api.errors import invalid
from kvroute.router.history.block_texts import (
    FAILED,
    UNFINISHED,
    text_file,
    text_of,
    unknown_type,
)
from kvroute.router.history.rewritten import Rewritten, same

_HOSTED = (
    "web_search|file_search|computer|code_interpreter|image_generation|local_shell|shell|"
    "apply_patch|mcp|tool_search|programmatic_tool_calling"
)
# Tools that OpenAI's servers run, or that only OpenAI's models know.
HOSTED_TOOL = re.compile(rf"(?:{_HOSTED})(?:_[a-z0-9_]{{1,40}})?")
# The calls of such tools, and what belongs to them.
HOSTED_ITEM = re.compile(
    rf"(?:{_HOSTED})_(?:call|call_output|output|list_tools|approval_request|approval_response)"
    "|program|program_output"
)
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
TEXTS = ("output_text", "refusal", "text", "input_text")  # parts of messages that have text
# Parts of a chat's messages that vLLM's application knows, and files.
CHAT_PARTS = ("text", "refusal", *MEDIA, "prompt_embeds", "file")
OTHER_CHAT_PARTS = ("thinking", "input_text", "output_text", "input_image", "tool_reference")
NOTES = {"incomplete": UNFINISHED, "failed": FAILED}  # status of a call's output -> its first line
Item = Mapping[str, Any]


def read_chat(body: Mapping[str, Any]) -> Rewritten:
    """Return what changes in a body of /v1/chat/completions.

    Raises:
        ApiError: a part of a message cannot be read.
    """
    rewritten = Rewritten()
    if isinstance(messages := body.get("messages"), list):
        read = [
            _chat_message(message, f"messages.{index}") for index, message in enumerate(messages)
        ]
        rewritten.put("messages", messages, read)
    _read_tools(body, rewritten)
    if body.get("web_search_options") is not None:
        rewritten.leave_out("web_search_options")
    return rewritten


def read_response(body: Mapping[str, Any]) -> Rewritten:
    """Return what changes in a body of /v1/responses.

    Raises:
        ApiError: a part of an item cannot be read.
    """
    rewritten = Rewritten()
    if isinstance(items := body.get("input"), list):
        read: list[Any] = []
        for index, item in enumerate(items):
            read += _items(item, f"input.{index}", rewritten)
        rewritten.put("input", items, read)
    _read_tools(body, rewritten)
    return rewritten


def _read_tools(body: Mapping[str, Any], rewritten: Rewritten) -> None:
    tools = [*objects(body.get("tools"))]
    kept = []
    for tool in tools:
        if isinstance(kind := tool.get("type"), str) and HOSTED_TOOL.fullmatch(kind):
            rewritten.leave_out(kind)
        else:
            kept.append(tool)
    if len(kept) < len(tools):
        choice = body.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else None
        is_hosted = isinstance(kind, str) and HOSTED_TOOL.fullmatch(kind) is not None
        rewritten.put_tools(kept, keeps_choice=choice is not None and not is_hosted)


def _items(item: Any, where: str, rewritten: Rewritten) -> Iterator[Any]:
    """Yield the items that stand for one item of the input."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        yield from _message(item, where)
    elif kind == "reasoning":
        yield _reasoning(item)
    elif kind in CALL_OUTPUTS:
        yield _call_output(item, f"{where}.output")
    elif isinstance(kind, str) and HOSTED_ITEM.fullmatch(kind):
        rewritten.leave_out(kind)
        if text := text_of([NOTES.get(str(item.get("status"))), item]):
            yield {"type": "message", "role": "assistant", "content": text}
    else:
        yield item


def _message(item: Item, where: str) -> Iterator[Item]:
    """Yield a message.

    vLLM reads only the first part of an assistant message, so its parts are joined.
    """
    content = item.get("content")
    if not isinstance(content, list):
        yield item
    elif item.get("role") != "assistant":
        read = _parts(content, f"{where}.content", "input_text")
        yield item if same(read, content) else {**item, "content": read}
    elif content:
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind is not None and kind not in TEXTS:
                raise unknown_type(f"{where}.content.{index}", kind, TEXTS[:2])
        joined = _joined(content, "output_text")
        if joined is content and "type" in item:
            yield item
        elif joined is content:  # without a type, vLLM accepts only plain text or a user's parts
            yield {**item, "type": "message"}
        else:
            part = {**joined[0], "annotations": []}
            yield {**item, "type": "message", "content": [part]}


def _reasoning(item: Item) -> Item:
    """Return reasoning whose content and summary have one part each, as vLLM reads no more."""
    given = {name: item.get(name) for name in ("content", "summary")}
    kinds = {"content": "reasoning_text", "summary": "summary_text"}
    parts = {
        name: _joined(value, kinds[name], (kinds[name],))
        for name, value in given.items()
        if isinstance(value, list) and value
    }
    changed = {name: value for name, value in parts.items() if value is not given[name]}
    return {**item, **changed} if changed else item


def _joined(
    parts: Sequence[Any], kind: str, kinds: Sequence[str] = TEXTS
) -> Sequence[Mapping[str, Any]]:
    """Return a list with one part of this type, which has the texts of all parts.

    Return the parts themselves if they are a single part of this type, or if one is not text.
    """
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == kind:
        return parts
    if not all(isinstance(part, dict) and part.get("type") in kinds for part in parts):
        return parts
    return [{"type": kind, "text": text_of(list(parts))}]


def _call_output(item: Item, where: str) -> Item:
    """Return the output of a call. It says if the call did not complete."""
    output, note = item.get("output"), NOTES.get(str(item.get("status")))
    if isinstance(output, list):
        read = _parts(output, where, "input_text")
        if note:
            read.insert(0, {"type": "input_text", "text": note})
        return item if same(read, output) else {**item, "output": read}
    if note and isinstance(output, str):
        return {**item, "output": f"{note}\n{output}" if output else note}
    return item


def _chat_message(message: Any, where: str) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in CHAT_PARTS and kind not in OTHER_CHAT_PARTS:
            raise unknown_type(f"{where}.content.{index}", kind, CHAT_PARTS)
        if kind == "text" and "text" not in part:
            field = f"{where}.content.{index}.text"
            raise invalid(field, f"{field} is missing")
    read = _parts(content, f"{where}.content", "text")
    return message if same(read, content) else {**message, "content": read}


def _parts(parts: Sequence[Any], where: str, kind: str) -> list[Any]:
    """Return the parts of a message, with the texts of files in place of the files.

    Args:
        where: the place of the parts in the body.
        kind: the type of a part with text.
    """
    read = []
    for index, part in enumerate(parts):
        given = part.get("type") if isinstance(part, dict) else None
        if given in ("file", "input_file"):
            file = part.get("file") if given == "file" else part
            text = text_file(file if isinstance(file, dict) else {}, f"{where}.{index}")
            read.append({"type": kind, "text": text})
        else:
            read.append(part)
    return read
