"""Whatever a body has that takes long, a replica's loop goes on."""

import asyncio
import json
import time
from typing import Any

import pytest

from kvroute.router.api.calls import CHAT_COMPLETIONS, parse_call
from kvroute.router.api.errors import ApiError
from tests.support import hostile
from tests.support.answers import data_of, status_of
from tests.support.applications import chunks_of, request_of
from tests.support.engines import Running

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.parametrize("running", ["vllm"], indirect=True),
]
# CPU time of the loop's longest step, which others wait for; twice what was measured at most.
LONGEST_S = 0.2
BODIES = dict(hostile.bodies())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the CPU time of each step of the event loop."""
    taken: list[float] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> Any:
        before_s = time.thread_time()
        run(handle)
        taken.append(time.thread_time() - before_s)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return taken


def refusal(raw: bytes) -> int | None:
    """Return the status with which a router refuses the body; None if a replica gets it."""
    try:
        parse_call(CHAT_COMPLETIONS, raw)
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_holds_up_nobody(
    running: Running, steps: list[float], name: str
) -> None:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 4, **BODIES[name]}
    raw = json.dumps({"model": "m", **body}).encode()
    if (status := refusal(raw)) is not None:
        assert status in (400, 413)
        return
    for _ in range(2):
        chunks = await chunks_of(running, request_of(CHAT_COMPLETIONS, raw))
        assert status_of(chunks) in (200, 400), data_of(chunks)[:300]
        assert max(steps) < LONGEST_S
