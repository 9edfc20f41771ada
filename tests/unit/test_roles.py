"""Every route needs one role."""

import pytest

from kvroute.features.gate import ROLES
from kvroute.router.application import core_routes
from kvroute.router.middleware.caller_check import roles_for
from tests.support.routes import routes

EXPECTED: dict[str, list[str]] = {  # by role: all routes of the core
    "none": [
        "GET /docs",
        "GET /health",
        "GET /openapi.json",
        "GET /ping",
        "POST /ping",
    ],
    "any": [
        "GET /v1/models",
        "GET /v1/models/{name:path}",
        "GET /version",
    ],
    "use": [
        "POST /classify",
        "POST /detokenize",
        "POST /generative_scoring",
        "POST /invocations",
        "POST /pooling",
        "POST /rerank",
        "POST /score",
        "POST /tokenize",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/batch",
        "POST /v1/completions",
        "POST /v1/embeddings",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/rerank",
        "POST /v1/responses",
        "POST /v1/responses/input_tokens",
        "POST /v1/route",
        "POST /v1/score",
        "POST /v2/embed",
        "POST /v2/rerank",
    ],
    "observe": [
        "GET /metrics",
        "GET /v1/cluster",
        "GET /v1/cluster/diagnosis",
        "GET /v1/metrics/targets",
    ],
    "manage": [],
}


def test_each_route_has_its_role() -> None:
    found: dict[str, list[str]] = {name: [] for name in EXPECTED}
    for method, path in routes(core_routes()):
        roles = roles_for(method, path)
        name = {0: "none", 1: roles[0] if roles else "", len(ROLES): "any"}[len(roles)]
        found[name].append(f"{method} {path}")
    assert {role: sorted(each) for role, each in found.items()} == EXPECTED


@pytest.mark.parametrize(
    "path",
    ["/v1", "", "/v1/adaptersx", "//v1/models", "/v1/modelsx", "/V1/models", "/healthz"],
)
def test_an_unknown_route_needs_the_role_manage(path: str) -> None:
    assert roles_for("GET", path) == ("manage",)
