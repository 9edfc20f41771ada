"""Reads the tools and the blocks of /v1/messages.

vLLM's application knows texts, images, reasoning, tools of the client, and their calls and results.
Everything else is written as text, left out, or refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvroute.router.api.calls import objects
from kvroute.router.api.errors import invalid, shown
from kvroute.router.history.block_texts import FAILED, text_of, unknown_type
from kvroute.router.history.rewritten import Rewritten, same

# Blocks that are written by or for Anthropic's servers, and that nothing here can run.
SERVER_BLOCK = re.compile(
    r"[a-z0-9_]{1,40}_tool_(?:use|result|listing)|compaction|container_upload|fallback"
)
# Tools that Anthropic's servers run, or whose schemas only Anthropic's models know.
SERVER_TOOL = re.compile(r"[a-z0-9_]{1,40}_\d{8}|mcp_toolset")
INLINED = ("document", "search_result")  # blocks that are written as text
RESULT_BLOCKS = ("text", "image", *INLINED, "tool_reference")  # blocks of a tool's result
BLOCKS = (
    *("text", "image", *INLINED, "tool_use", "tool_result", "thinking", "redacted_thinking"),
    "tool_reference",
)
TOOL_CHANGES = ("tool_addition", "tool_removal")  # blocks of system messages
IMAGE_SOURCES = ("base64", "url")
Block = Mapping[str, Any]


def read_messages(body: Mapping[str, Any]) -> Rewritten:
    """Return what changes in a body of /v1/messages.

    Raises:
        ApiError: a block cannot be read.
    """
    rewritten = Rewritten()
    if isinstance(messages := body.get("messages"), list):
        read = [
            _message(message, f"messages.{index}", rewritten)
            for index, message in enumerate(messages)
        ]
        rewritten.put("messages", messages, read)
    if isinstance(system := body.get("system"), list):
        read = [*_blocks(system, "system", rewritten)]
        for index, block in enumerate(read):
            if isinstance(block, dict) and block.get("type") not in ("text", *TOOL_CHANGES):
                raise unknown_type(f"system.{index}", block.get("type"), ("text",))
        rewritten.put("system", system, read)
    _read_tools(body, rewritten)
    if body.get("mcp_servers"):
        rewritten.leave_out("mcp_servers")
    return rewritten


def _read_tools(body: Mapping[str, Any], rewritten: Rewritten) -> None:
    kept, removed = [], []
    for index, tool in enumerate(objects(tools := body.get("tools"))):
        kind = tool.get("type")
        if "input_schema" in tool or kind in (None, "custom"):
            kept.append(tool)
        elif isinstance(kind, str) and SERVER_TOOL.fullmatch(kind):
            removed.append(tool)
            rewritten.leave_out(kind)
        else:
            raise invalid(
                f"tools.{index}",
                f"tools.{index} has the type {shown(kind)}; expected custom, with an input_schema",
            )
    if removed and isinstance(tools, list):
        names = [None, *(tool.get("name") for tool in kept)]
        choice = body.get("tool_choice")
        is_possible = isinstance(choice, dict) and choice.get("name") in names
        rewritten.put_tools(kept, keeps_choice=is_possible)


def _message(message: Any, where: str, rewritten: Rewritten) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    blocks = [*_blocks(content, f"{where}.content", rewritten)]
    if same(blocks, content):
        return message
    return {**message, "content": blocks or ""}  # the roles of the messages still alternate


def _blocks(content: list[Any], where: str, rewritten: Rewritten) -> Iterator[Any]:
    for index, block in enumerate(content):
        yield from _block(block, f"{where}.{index}", rewritten)


def _block(block: Any, where: str, rewritten: Rewritten) -> Iterator[Any]:
    """Yield the blocks that stand for one block of a message."""
    kind = block.get("type") if isinstance(block, dict) else ""
    if kind == "tool_result":
        yield _tool_result(block, where)
    elif isinstance(kind, str) and SERVER_BLOCK.fullmatch(kind):
        rewritten.leave_out(kind)
        if text := text_of(block.get("content")):
            yield _text(text)
    elif kind in BLOCKS or kind in TOOL_CHANGES:
        yield from _readable(block, where)
    elif isinstance(block, dict):
        raise unknown_type(where, kind, BLOCKS)
    else:
        yield block  # vLLM's application says what is expected


def _tool_result(result: Block, where: str) -> Block:
    """Return the result of a tool call with blocks that vLLM knows. It says if the call failed."""
    content = result.get("content")
    parts = [_text(content)] if isinstance(content, str) and content else content or []
    if not isinstance(parts, list):
        return result
    read: list[Block] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in RESULT_BLOCKS:
            raise unknown_type(f"{where}.content.{index}", kind, RESULT_BLOCKS)
        read += _readable(part, f"{where}.content.{index}")
    if result.get("is_error") is True:
        read.insert(0, _text(FAILED))
    return result if same(read, parts) else {**result, "content": read}


def _readable(block: Block, where: str) -> Iterator[Block]:
    """Yield a block, or what stands for a document or a search result.

    Raises:
        ApiError: a document is no text, or an image is not in the body.
    """
    kind, source = block["type"], block.get("source")
    if kind == "search_result":
        yield _text(text_of(block))
    elif kind == "document":
        yield from _document(block, source if isinstance(source, dict) else {}, where)
    elif kind == "image" and isinstance(source, dict):
        if source.get("type", "base64") not in IMAGE_SOURCES:
            raise unknown_type(f"{where}.source", source.get("type"), IMAGE_SOURCES)
        yield block
    else:
        yield block


def _document(block: Block, source: Block, where: str) -> Iterator[Block]:
    kind, content = source.get("type"), source.get("content")
    head = {name: block.get(name) for name in ("title", "context")}
    if kind == "text" or (kind == "content" and isinstance(content, str)):
        yield _text(text_of({**head, "source": source}))
    elif kind == "content" and isinstance(content, list):
        if title := text_of(head):
            yield _text(title)
        for index, part in enumerate(content):
            inner = part.get("type") if isinstance(part, dict) else None
            if inner not in ("text", "image"):
                raise unknown_type(f"{where}.source.content.{index}", inner, ("text", "image"))
            yield from _readable(part, f"{where}.source.content.{index}")
    else:
        media = source.get("media_type", "unknown")
        raise invalid(
            f"{where}.source",
            f"{where} is a document whose source has the type {shown(kind)} (media type "
            f"{shown(media)}); expected text or content. Send the document's text, or its pages as "
            "images",
        )


def _text(text: str) -> Block:
    return {"type": "text", "text": text}
