"""Web pages of other sites cannot change or read a cluster; other clients are not restricted."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from kvroute.features import PATHS
from kvroute.router.middleware.origins import guard, is_local, is_own
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load
from tests.support.routes import routes

OWN = "http://127.0.0.1:8000"
FOREIGN = "https://elsewhere.example"
ROUTES = [*routes()]
names = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,8}){0,3}", fullmatch=True)
ports = st.sampled_from(["", ":80", ":443"]) | st.integers(1, 65535).map(":{}".format)
schemes = st.sampled_from(["http", "https"])


class Guarded:
    """Counts the requests that reach it."""

    def __init__(self, *allowed: str, local_only: bool = False, url: str = OWN) -> None:
        self.refused: list[str | None] = []
        self.came = 0
        http = FastAPI(docs_url=None, openapi_url=None)
        http.mount("/", self._app)
        guard(
            http,
            allowed=allowed,
            local_only=local_only,
            refused=lambda error: self.refused.append(error.code),
        )
        transport = httpx.ASGITransport(http)
        self.client = httpx.AsyncClient(transport=transport, base_url=url)

    async def status(self, method: str = "POST", path: str = "/v1/prefixes", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return (await self.client.request(method, path, headers=named)).status_code

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.came += 1
        await JSONResponse("ok")(scope, receive, send)


@pytest.mark.parametrize(
    "origin", [FOREIGN, "null", "http://127.0.0.1:8001", "http://localhost:8000"]
)
async def test_pages_of_other_origins_reach_no_route(origin: str) -> None:
    guarded = Guarded()
    for method, path in ROUTES:
        answer = await guarded.client.request(method, path, headers={"origin": origin})
        assert answer.status_code == 403, (method, path)
        if path.startswith("/v1/messages"):
            assert answer.json()["error"]["type"] == "permission_error"
        else:
            assert answer.json()["error"]["code"] == "foreign_origin"
        assert origin in answer.text
    assert guarded.came == 0
    assert guarded.refused == ["foreign_origin"] * len(ROUTES)


async def test_our_own_page_and_clients_without_a_browser_reach_every_route() -> None:
    guarded = Guarded()
    for method, path in ROUTES:
        for headers in (
            {},
            {"origin": OWN},
            {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
            {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
            {"sec-fetch-mode": "cors"},  # of Node
        ):
            assert (await guarded.client.request(method, path, headers=headers)).is_success
    assert guarded.came == 5 * len(ROUTES)


async def test_our_page_behind_a_proxy_with_another_host_name_is_our_own() -> None:
    guarded = Guarded()
    assert await guarded.status(origin="https://chat.example", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_embedding_in_a_page_is_refused_and_following_a_link_is_allowed(site: str) -> None:
    guarded = Guarded()
    embedded = (
        ("no-cors", "image"),
        ("no-cors", "script"),
        ("navigate", "iframe"),
        ("cors", "empty"),
    )
    for mode, dest in embedded:
        fetch = {"sec_fetch_site": site, "sec_fetch_mode": mode, "sec_fetch_dest": dest}
        assert await guarded.status("GET", "/v1/cluster", **fetch) == 403
    link = {"sec_fetch_site": site, "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert await guarded.status("GET", "/ui", **link) == 200
    assert await guarded.status("POST", "/v1/cluster/canary", **link) == 403


@given(names, ports, schemes, schemes)
def test_a_host_is_its_own_origin_with_and_without_tls(
    name: str, port: str, scheme: str, other: str
) -> None:
    assert is_own(f"{scheme}://{name}{port}", f"{name.upper()}{port}")
    if port in ("", ":80", ":443"):
        assert is_own(f"{scheme}://{name}", f"{name}{port}")
        assert is_own(f"{other}://{name}{port}", name)


@given(names, names, ports, ports, schemes)
def test_another_host_or_port_is_another_origin(
    name: str, other: str, port: str, another: str, scheme: str
) -> None:
    default = {"", ":80", ":443"}
    if name != other:
        assert not is_own(f"{scheme}://{other}{port}", f"{name}{port}")
    if port != another and not {port, another} <= default:
        assert not is_own(f"{scheme}://{name}{port}", f"{name}{another}")
    assert not is_own(f"{scheme}://{name}.{other}{port}", f"{name}{port}")
    assert not is_own(f"{scheme}://{other}@{name}{port}", f"{name}{port}")


@given(st.text(max_size=30))
def test_an_invalid_origin_is_not_our_own(text: str) -> None:
    if "://" not in text:
        assert not is_own(text, text)


OURS = (
    *("localhost", "LOCALHOST:8000", "a.localhost:1", "localhost.:1", "127.0.0.1", "127.9.9.9:80"),
    *("[::1]:8000", "[::1]", "10.1.2.3:8000"),
)
STRANGERS = (
    *("elsewhere.example", "elsewhere.example:8000", "router:80", "localhost.example", "1.2.3"),
    *("notlocalhost", "127.0.0.1.nip.io:8000", "[localhost.example]", "localhost:80:x"),
)


@pytest.mark.parametrize(
    ("host", "is_ours"), [(each, each in OURS) for each in (*OURS, *STRANGERS)]
)
async def test_a_local_server_without_keys_rejects_unknown_host_names(
    host: str, is_ours: bool
) -> None:
    assert is_local(host) is is_ours
    guarded = Guarded(local_only=True)
    own = {"host": host, "origin": f"http://{host}", "sec_fetch_site": "same-origin"}
    for method in ("GET", "POST"):
        assert await guarded.status(method, **own) == (200 if is_ours else 403)
    assert await guarded.status("GET", "/health", host=host) == 200
    assert guarded.refused == [] if is_ours else ["unknown_host"] * 2
    assert await Guarded().status(host=host) == 200


async def test_the_host_of_an_allowed_origin_is_accepted() -> None:
    """A container, for example, has its own name for this machine."""
    guarded = Guarded("http://host.docker.internal:8000", local_only=True)
    for host in ("host.docker.internal:8000", "Host.Docker.Internal", "host.docker.internal.:1"):
        assert await guarded.status(host=host) == 200
    for host in ("docker.internal", "a.host.docker.internal", "elsewhere.example"):
        assert await guarded.status(host=host) == 403
    refused = await Guarded("*", local_only=True).client.get("/", headers={"host": "a.example"})
    assert refused.status_code == 403
    assert "--allow-origin http://host.docker.internal:PORT" in refused.json()["error"]["message"]


@given(names)
def test_a_name_that_can_be_registered_is_not_local(name: str) -> None:
    assert is_local(name) is (name == "localhost" or name.endswith(".localhost"))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_json_is_accepted_and_content_types_without_a_preflight_are_not(method: str) -> None:
    guarded = Guarded()
    for kind in ("application/json", "application/json; charset=utf-8", "application/x+json", ""):
        assert await guarded.status(method, content_type=kind) == 200
        assert await guarded.status(method, content_type=kind, origin=OWN) == 200
    for kind in ("text/plain", "Text/Plain;charset=UTF-8", "multipart/form-data; boundary=x"):
        assert await guarded.status(method, content_type=kind) == 415
        assert await guarded.status("GET", content_type=kind) == 200


@pytest.mark.parametrize("path", PATHS.forms)
async def test_a_form_with_a_file_is_accepted_where_a_route_takes_files(path: str) -> None:
    guarded, form = Guarded(), {"content-type": "multipart/form-data; boundary=x"}
    assert (await guarded.client.post(path, headers=form)).status_code == 200
    foreign = {**form, "origin": FOREIGN, "sec-fetch-site": "cross-site"}
    assert (await guarded.client.post(path, headers=foreign)).status_code == 403


async def test_a_form_is_accepted_from_curl_and_refused_from_browsers() -> None:
    guarded, form = Guarded(), "application/x-www-form-urlencoded"
    assert await guarded.status(content_type=form) == 200
    assert await guarded.status(content_type=form, origin=OWN) == 415
    assert await guarded.status(content_type=form, sec_fetch_site="same-origin") == 415
    answer = await guarded.client.post(
        "/v1/chat/completions", headers={"content-type": "text/plain"}
    )
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-kvroute-receipt, x-api-key",
}


@pytest.mark.parametrize("allowed", [(FOREIGN,), ("*",)])
async def test_pages_of_an_allowed_origin_may_send_and_read(allowed: Sequence[str]) -> None:
    guarded = Guarded(*allowed)
    own = {"origin": FOREIGN, "access-control-request-private-network": "true", **PREFLIGHT}
    asked = await guarded.client.options("/v1/chat/completions", headers=own)
    assert (asked.status_code, guarded.came) == (200, 0)
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert asked.headers["access-control-allow-origin"] in (FOREIGN, "*")
    assert "x-kvroute-receipt" in asked.headers["access-control-allow-headers"]
    fetch = {"origin": FOREIGN, "sec-fetch-site": "cross-site"}
    answer = await guarded.client.post("/v1/chat/completions", headers=fetch)
    assert answer.json() == "ok"
    assert answer.headers["access-control-allow-origin"] in (FOREIGN, "*")
    assert answer.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


async def test_other_origins_learn_nothing_from_a_preflight() -> None:
    for guarded in (Guarded(), Guarded("https://chat.example")):
        answer = await guarded.client.options(
            "/v1/chat/completions", headers={"origin": FOREIGN, **PREFLIGHT}
        )
        assert answer.status_code == 403
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert guarded.came == 0


def test_origins_are_written_as_browsers_write_them() -> None:
    settings = load({"allow_origin": ["https://Chat.example:443/", "http://a:8080", "*"]})
    assert settings.allow_origin == ["https://chat.example", "http://a:8080", "*"]


@pytest.mark.parametrize("origin", ["chat.example", "null", "https://a/b", "https://", ""])
def test_an_invalid_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(
        SettingsError, match=r"--allow-origin .* such as https://chat\.example\.com"
    ):
        load({"allow_origin": [origin]})
