"""The check of a body's list ends at its first bad item; all else is checked as in vLLM."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from tests.support import bodies
from tests.support.bodies import ASK, CHATS, COMPLETIONS, MESSAGES, RESPONSES, Body

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

MANY = 3000
PART = {"type": "nothing"}


Checks = dict[str, "TypeAdapter[Any]"]  # of bodies, by route


class _Model:
    """As much as vLLM's application asks of a model's configuration before it has an engine."""

    hf_config = None

    def get_pooling_task(self, _: Any) -> str:
        return "embed"


def checks(task: str, install: Callable[[Any], object]) -> Checks:
    """Those of vLLM's application for a model that can do this."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments, tasks, model = make_arg_parser(FlexibleArgumentParser()), (task,), _Model()
    app: Any = build_app(arguments.parse_args([]), tasks, model)
    install(app)
    return {
        route.path: route.dependant.body_params[0]._type_adapter
        for route in app.routes
        if isinstance(route, APIRoute) and route.dependant.body_params
    }


@pytest.fixture(scope="module")
def stock() -> Checks:
    return checks("embed", bool) | checks("generate", bool)


@pytest.fixture(scope="module")
def ours() -> Checks:
    from kvroute.replica.vllm_engine.http import fail_fast

    return checks("embed", fail_fast.install) | checks("generate", fail_fast.install)


def errors(check: "TypeAdapter[Any]", body: Body) -> list[str]:
    from vllm.exceptions import VLLMValidationError

    try:
        check.validate_python(deepcopy(body))  # vLLM adds to it
    except ValidationError as error:
        return [f"{each['loc']}: {each['msg']}" for each in error.errors()]
    except VLLMValidationError as error:
        return [str(error)]
    return []


BAD: list[tuple[str, Callable[[int], Body]]] = [
    (CHATS, lambda many: {"messages": [{"role": 1}] * many}),
    (CHATS, lambda many: {"messages": ASK, "tools": [{}] * many}),
    (COMPLETIONS, lambda many: {"prompt": [1] + ["a"] * many}),
    (RESPONSES, lambda many: {"input": [PART] * many}),
    (RESPONSES, lambda many: {"input": [{"role": "user", "content": [PART] * many}]}),
    (RESPONSES, lambda many: {"input": "a", "tools": [PART] * many}),
    (MESSAGES, lambda many: {"messages": [{"role": "user", "content": [PART] * many}]}),
    (MESSAGES, lambda many: {"messages": [], "system": [{"type": 1}] * many}),
    ("/rerank", lambda many: {"query": "a", "documents": [1] * many}),
    ("/score", lambda many: {"queries": "a", "documents": [{"content": [PART] * many}]}),
    ("/v1/embeddings", lambda many: {"input": ["a"] + [PART] * many}),
]


@pytest.mark.parametrize(("path", "body"), BAD)
def test_many_bad_items_have_no_more_errors_than_one(
    stock: Checks, ours: Checks, path: str, body: Callable[[int], Body]
) -> None:
    base = {"model": "m", "max_tokens": 3}
    one, all_ = [len(errors(ours[path], base | body(many))) for many in (1, MANY)]
    assert one == all_ > 0
    assert len(errors(stock[path], base | body(MANY))) >= MANY


def test_other_errors_are_vllms(stock: Checks, ours: Checks) -> None:
    for path, body in bodies.calls("m"):
        assert errors(ours[path], body) == errors(stock[path], body), (path, body)
