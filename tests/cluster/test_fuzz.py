"""Whatever is asked of any route, the answer comes, has the shape of its API and blames no server.

`make fuzz` asks simulated and vLLM replicas 24,000 times, `make test` some hundred times. Other
tests do so with API keys.
"""

import json
import os
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import BASES, PATHS, bodies, changed, check, fuzzing, texts
from tests.support.serving import Cluster

CLUSTER = os.environ.get("KVROUTE_FUZZ_CLUSTER", "simulated_cluster")  # a fixture's name
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures(CLUSTER),  # so that this module's place is among its other tests
]


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    cluster: Cluster = request.getfixturevalue(CLUSTER)
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", BASES)
@fuzzing
@given(data=st.data())
def test_a_body_with_changed_fields(http: httpx.Client, path: str, data: st.DataObject) -> None:
    content = json.dumps(changed(data, path)).encode()
    check(http.post(path, content=content))


@fuzzing
@given(
    path=st.sampled_from(sorted(BASES)),
    content=bodies,
)
def test_any_bytes_for_a_body(http: httpx.Client, path: str, content: bytes) -> None:
    check(http.post(path, content=content))


@fuzzing
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]),
    path=st.sampled_from(PATHS),
    name=texts,
    query=st.dictionaries(st.sampled_from(["model", "x"]), texts, max_size=2),
)
def test_any_name_in_a_path(
    http: httpx.Client, method: str, path: str, name: str, query: dict[str, str]
) -> None:
    check(http.request(method, path.format(quote(name, safe="")), params=query))
