"""A process that answers agents as a vLLM server would, with a script in place of a model.

It calls the agent's shell tool once in each turn until it has seen enough results, or its own
summary of them, and then says that it is done. Its usage counts the prompt's blocks that came in an
earlier prompt as cached, as vLLM's prefix cache would.
`python -m tests.support.scripted_model PORT TURNS LOG` runs one.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from kvroute.local.ports import free_port
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
NAME = "scripted"  # the name of the model at the servers
BLOCK_SIZE = 32  # tokens of a block
BLOCK_CHARACTERS = 4 * BLOCK_SIZE  # characters that count as a block
SAID = "The work is done."  # the last answer
SUMMARY = "Summary: some commands were run."  # the answer to a prompt without tools
METRICS = (
    f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",enable_prefix_caching="True",'
    'num_gpu_blocks="20000",engine="0"} 1.0\n'
)

Json = dict[str, Any]


class Turn(NamedTuple):
    """A prompt with tools that a server has answered."""

    prompt: int  # tokens
    cached: int  # tokens with which an earlier prompt began


class ScriptedServer:
    """One server, which can be killed and started again with an empty cache."""

    def __init__(self, turns: int, log: Path) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self._arguments = (str(self._port), str(turns), str(log))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, without turns; end the process before it, if any."""
        self.kill()
        self._log.unlink(missing_ok=True)
        command = [sys.executable, "-m", __name__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(self._log.exists)

    def turns(self) -> list[Turn]:
        """Return the turns since the start."""
        return [Turn(*json.loads(line)) for line in self._log.read_text().splitlines()]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def scripted_servers(count: int, *, turns: int, folder: Path) -> Iterator[list[ScriptedServer]]:
    """Run servers, and kill them at the end."""
    servers = [ScriptedServer(turns, folder / f"{number}.jsonl") for number in range(count)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


class Script:
    """What the model says, by the number of results of tools in the prompt.

    Args:
        turns: results of tools after which the work is done.
        log: the file to which each Turn is added.
    """

    def __init__(self, turns: int, log: Path) -> None:
        self._turns = turns
        self._log = log.open("a", buffering=1)
        self._cached = set[bytes]()

    def usage(self, body: Json) -> Turn:
        """Return the numbers of tokens of a prompt."""
        text = json.dumps([body.get(name) for name in ("system", "instructions", "tools")])
        text += json.dumps(body.get("input") or body.get("messages"))
        chain, hits, is_hit = sha256(), 0, True
        for begin in range(0, len(text) - BLOCK_CHARACTERS, BLOCK_CHARACTERS):
            chain.update(text[begin : begin + BLOCK_CHARACTERS].encode())
            is_hit = is_hit and chain.digest() in self._cached
            hits += is_hit
            self._cached.add(chain.digest())
        turn = Turn(len(text) // 4, hits * BLOCK_SIZE)
        if body.get("tools"):
            self._log.write(json.dumps(turn) + "\n")
        return turn

    def call(self, body: Json, results: int) -> tuple[str, Json] | None:
        """Return the name and the arguments of the tool to call; None: the work is done."""
        tools: Sequence[Json] = body.get("tools") or []
        is_summarised = SUMMARY in json.dumps(body.get("input") or body.get("messages"))
        command = f"echo step {results}"
        shells: dict[str, Json] = {
            "shell": {"command": ["bash", "-lc", command]},
            "shell_command": {"command": command},
            "exec_command": {"cmd": command},
            "Bash": {"command": command, "description": "Say which step this is"},
            "run": {"command": command},
        }
        names = [tool.get("name") or tool.get("function", {}).get("name") for tool in tools]
        name = next((name for name in shells if name in names), None)
        is_done = name is None or is_summarised or results >= self._turns
        return None if is_done or name is None else (name, shells[name])


def responses(script: Script, body: Json) -> Iterator[Json]:
    """Yield the events of POST /v1/responses."""
    items = body["input"] if isinstance(body["input"], list) else []
    results = sum(item.get("type") == "function_call_output" for item in items)
    called, tools = script.call(body, results), body.get("tools")
    prompt, cached = script.usage(body)
    head: Json = {
        "id": f"resp_{time.time_ns()}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body["model"],
        "status": "in_progress",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    yield {"type": "response.created", "response": head}
    if called:
        name, arguments = called
        item: Json = {
            "type": "function_call",
            "id": f"fc_{time.time_ns()}",
            "call_id": f"call_{results}",
            "name": name,
            "arguments": json.dumps(arguments),
            "status": "completed",
        }
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
    else:
        text = SAID if tools else SUMMARY
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{time.time_ns()}", "role": "assistant"}
        item |= {"status": "completed", "content": [part]}
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        empty = item | {"status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": 0, "item": empty}
        yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 10,
    }
    whole = head | {"status": "completed", "output": [item], "usage": usage}
    yield {"type": "response.completed", "response": whole}


def messages(script: Script, body: Json) -> Iterator[Json]:
    """Yield the events of POST /v1/messages."""
    contents = [message["content"] for message in body["messages"]]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = sum(block.get("type") == "tool_result" for block in blocks)
    called = script.call(body, results)
    prompt, cached = script.usage(body)
    usage = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
    usage |= {"cache_creation_input_tokens": 0, "output_tokens": 1}
    message: Json = {
        "id": f"msg_{time.time_ns()}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield {"type": "message_start", "message": message}
    if called:
        name, arguments = called
        block: Json = {"type": "tool_use", "id": f"toolu_{results}", "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
    else:
        block = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": SAID if body.get("tools") else SUMMARY}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    end = {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": 10}}
    yield {"type": "message_stop"}


def whole_message(events: Sequence[Json]) -> Json:
    """Return the message of the events of POST /v1/messages."""
    message: Json = events[0]["message"] | events[-2]["delta"]
    block, delta = events[1]["content_block"], events[2]["delta"]
    if block["type"] == "text":
        block["text"] = delta["text"]
    else:
        block["input"] = json.loads(delta["partial_json"])
    return message | {"content": [block]}


class Handler(BaseHTTPRequestHandler):
    """Serves the script of the server that it belongs to."""

    protocol_version = "HTTP/1.1"
    script: Script

    def do_GET(self) -> None:
        models = [{"id": NAME, "root": resolve(BUILTIN_MODEL), "max_model_len": 400_000}]
        answers = {
            "/health": "",
            "/metrics": METRICS,
            "/v1/models": json.dumps({"data": models}),
            "/version": json.dumps({"version": "0.32.0"}),
        }
        found = answers.get(self.path)
        self._send(200 if found is not None else 404, (found or "").encode())

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def respond(self, body: Json) -> None:
        """Send the answer to the body of a request."""
        if self.path == "/v1/responses":
            events = [*responses(self.script, body)]
            whole = events[-1]["response"]
            for number, event in enumerate(events):
                event["sequence_number"] = number
        elif self.path == "/v1/messages":
            events = [*messages(self.script, body)]
            whole = whole_message(events)
        else:
            self._send(404, b"{}")
            return
        if not body.get("stream"):
            self._send(200, json.dumps(whole).encode())
            return
        lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        self._send(200, "".join(lines).encode(), kind="text/event-stream; charset=utf-8")

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def main(port: str, turns: str, log: str) -> None:
    server = ThreadingHTTPServer((HOST, int(port)), Handler)
    Handler.script = Script(int(turns), Path(log))
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
