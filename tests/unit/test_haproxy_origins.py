"""Web pages of allowed origins can read the errors that HAProxy sends itself."""

import httpx
import pytest

from kvroute.local.haproxy.error_replies import MAX_URL_BYTES
from kvroute.local.haproxy.wrapper import ALLOW_ORIGIN
from tests.support.haproxy_front import Routers, in_front_of

PAGE, OTHER = "https://chat.example", "https://elsewhere.example"
HEADER = "access-control-allow-origin"
LONG = f"/v1/models?{'x' * MAX_URL_BYTES}"


async def allowed_by(client: httpx.AsyncClient, origin: str) -> list[str | None]:
    """Return the header in a refusal of HAProxy, in its error for a lost router, and in an answer.

    The answer is that of a router, which adds the header itself.
    """
    sent = {"origin": origin} if origin else {}
    refused = await client.get(LONG, headers=sent)
    lost = await client.post("/v1/batches", headers=sent)
    answered = await client.get("/v1/models", headers=sent)
    assert [each.status_code for each in (refused, lost, answered)] == [414, 503, 200]
    assert (refused.headers.get("vary") == "Origin") == (HEADER in refused.headers)
    return [each.headers.get(HEADER) for each in (refused, lost, answered)]


@pytest.mark.parametrize("listed", [f"http://a:8080,{PAGE}", "*", ""])
async def test_pages_of_allowed_origins_read_errors(
    listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_ORIGIN, listed)
    routers = Routers(origin="http://router")
    async with in_front_of(routers) as client:
        for origin in (PAGE, OTHER, ""):
            is_allowed = origin == PAGE if listed != "*" else bool(origin)
            own = origin if listed and is_allowed else None
            routers.received.clear()
            assert await allowed_by(client, origin) == [own, own, "http://router"]
