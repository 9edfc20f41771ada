"""HAProxy repeats the requests that may run twice if their router ends without an answer."""

import asyncio
from collections.abc import AsyncIterator

from kvroute.features import ONCE, PATHS
from kvroute.local.haproxy.error_replies import BUFFER_BYTES
from kvroute.local.haproxy.repeats import REPEATED
from kvroute.router.application import core_routes, feature_routes
from tests.support.haproxy_front import Routers, in_front_of
from tests.support.routes import routes

HEADS_BYTES = 4096  # more than a request's head and the space that HAProxy reserves in a buffer


LARGEST = b"x" * (BUFFER_BYTES - HEADS_BYTES)
CASES = (  # method, path, body, and how often a router gets the request
    ("GET", "/v1/models", b"", 2),
    ("POST", "/v1/chat/completions", b"{}", 2),
    ("POST", "/v1/completions?largest", LARGEST, 2),
    ("POST", "/v1/completions?larger", LARGEST + b"x" * HEADS_BYTES, 1),
    ("POST", "/v1/responses?stored", b'{"input": "\\"background\\"", "store": true}', 2),
    *(
        ("POST", f"{path}?{field}", f'{{"{field}": 1}}'.encode(), 1)
        for path, fields in ONCE.items()
        for field in fields
    ),
)


async def in_parts() -> AsyncIterator[bytes]:
    for _ in range(3):
        await asyncio.sleep(0.01)
        yield b"x"


async def test_a_request_is_repeated_if_it_may_run_twice_and_haproxy_can_hold_it() -> None:
    routers, answers = Routers(), {}
    async with in_front_of(routers) as client:
        for method, path, body, _ in CASES:
            answers[path] = (await client.request(method, path, content=body)).status_code
        head, slow = {"content-length": "3"}, "/tokenize"
        answers[slow] = (await client.post(slow, content=in_parts(), headers=head)).status_code
    tries = {path: tries for _, path, _, tries in CASES} | {slow: 2}
    assert {path: routers.received[path] for path in tries} == tries
    assert answers == {path: 200 if tries[path] == 2 else 503 for path in tries}


def test_for_each_route_it_is_decided_whether_its_requests_may_run_twice() -> None:
    posts = {path for method, path in routes(core_routes()) if method == "POST"}
    assert posts | {*PATHS.repeated} == {*REPEATED}


def test_requests_to_routes_of_features_are_sent_once_unless_the_feature_says_more() -> None:
    paths = {path for _, path in routes(feature_routes())}
    assert {*REPEATED} & paths == {*PATHS.repeated}
