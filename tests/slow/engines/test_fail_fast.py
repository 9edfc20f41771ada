"""The check of a body's list ends at its first bad item; all else is checked as in vLLM."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from kvroute.router.dispatch.replica_errors import parsed_error
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


USER = {"role": "user"}
TEXT = [{"type": "input_text", "text": "a"}]
PARTS = [*TEXT, PART]
CAUSES: list[tuple[str, Body, str]] = [
    (MESSAGES, {"messages": [USER | {"content": [PART]}]}, "messages.0.content.0.type is nothing"),
    (RESPONSES, {"input": [USER | {"content": PARTS}]}, "input.0.content.1.type is nothing"),
    (RESPONSES, {"input": [USER | {"content": 5}]}, "input.0.content is 5"),
    (RESPONSES, {"input": [PART]}, "input.0.type is nothing; expected 'message', 'file_search"),
    (RESPONSES, {"input": [{"role": "x", "content": TEXT}]}, "input.0.role is x; expected 'user'"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input.0.output is 5; expected a valid string",
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
        "input.0.arguments is missing",
    ),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name is missing"),
    (CHATS, {"messages": [USER | {"content": 5}]}, "messages.0.content is 5; expected a valid str"),
    (CHATS, {"messages": ASK, "stop": ["a", 5]}, "stop.1 is 5; expected a valid string"),
]


@pytest.mark.parametrize(("path", "body", "expected"), CAUSES)
async def test_the_innermost_cause_of_an_error_is_told(
    ours: Checks, monkeypatch: pytest.MonkeyPatch, path: str, body: Body, expected: str
) -> None:
    from vllm.entrypoints.serve.exception_handling.handlers import validation

    from kvroute.replica.vllm_engine.http.fail_fast import MAX_ERRORS

    monkeypatch.setattr(validation, "_MAX_REPORTED_ERRORS", MAX_ERRORS)
    with pytest.raises(ValidationError) as raised:
        ours[path].validate_python({"model": "m", "max_tokens": 3} | deepcopy(body))
    found = raised.value.errors(include_url=False)
    listed = [{**each, "loc": ("body", *each["loc"])} for each in found]
    app: Any = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False)))
    answer = await validation.validation_exception_handler(
        SimpleNamespace(app=app), RequestValidationError(listed)
    )
    assert parsed_error(bytes(answer.body), 400, path=path).message.startswith(expected)


def test_other_errors_are_vllms(stock: Checks, ours: Checks) -> None:
    for path, body in bodies.calls("m"):
        assert errors(ours[path], body) == errors(stock[path], body), (path, body)
