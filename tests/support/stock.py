"""vLLM's own server, for comparisons. Importing this imports vLLM."""

import asyncio
import json
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask
from vllm.v1.engine import async_llm, output_processor

from kvroute.replica.vllm_engine.http import app as http_app
from kvroute.replica.vllm_engine.http import request_run as http_run
from tests.support.bodies import Body

Tasks = tuple[SupportedTask, ...]

COLLECTORS = (async_llm, output_processor)  # modules that use RequestOutputCollector by this name


class Unmerged(output_processor.RequestOutputCollector):
    """Does not merge outputs that arrive together. Merged outputs would depend on timing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, output: Any) -> None:
        self._outputs.put_nowait(output)

    async def get(self) -> Any:
        output = await self._outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    def get_nowait(self) -> None:
        return None


async def stock_app(llm: Any, tasks: Tasks = ("generate",), **front_args: Any) -> Any:
    """Return vLLM's application on an engine, as in vLLM's server.

    `tasks` are the tasks that the engine supports.
    """
    arguments = http_app._arguments(llm, {"enable_prompt_tokens_details": True, **front_args})
    app = build_app(arguments, tasks, llm.model_config)
    await init_app_state(llm, app.state, arguments, tasks)
    return app


async def stock_answer(
    app: Any,
    path: str,
    body: Body | bytes,
    *,
    request_id: str = "id",
    content_type: str = "application/json",
) -> tuple[int, bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given: list[dict[str, Any]] = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not given:
            await asyncio.Event().wait()
        return given.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = {"x-request-id": request_id, "content-type": content_type}
    await app(http_run.scope(path, headers), receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
