"""Checks a user's --engine-args against vLLM's own types and constraints.

The user may set arguments of vLLM's engine and of its HTTP server, such as `tool_call_parser`.

This module is also a program. `main` reads a JSON list of mappings from standard input, and prints
a JSON list with the problems of each mapping.
"""

import contextlib
import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import vllm.config
from pydantic import ConfigDict, ValidationError, create_model
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import AsyncEngineArgs

from kvroute.replica.vllm_engine.compat import BaseFrontendArgs

MAX_SIMILAR = 3  # maximum number of similar names in the error for an unknown name


def main() -> None:
    """Read mappings of arguments from standard input, and print the problems of each as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        problems = list(map(problems_of, json.load(sys.stdin)))
    print(json.dumps(problems))


def _names(arguments: Any) -> frozenset[str]:
    names = (field.name for field in dataclasses.fields(arguments))
    return frozenset(name for name in names if not name.startswith("_"))


ENGINE = _names(AsyncEngineArgs)
FRONT = _names(BaseFrontendArgs) - ENGINE


def checked(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments, converted to vLLM's types.

    Raises:
        ValueError: Some arguments are wrong. The message lists all problems.
    """
    return {name: value for name, value in _checked(engine_args).items() if name in ENGINE}


def front_args(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's HTTP server, converted to vLLM's types.

    Raises:
        ValueError: Some arguments are wrong. The message lists all problems.
    """
    return {name: value for name, value in _checked(engine_args).items() if name not in ENGINE}


def _checked(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    if not engine_args:
        return {}
    if problems := problems_of(engine_args):
        raise ValueError("--engine-args: " + "; ".join(problems))
    values = _model(engine_args).model_validate(engine_args)
    return {name: getattr(values, name) for name in engine_args}


def problems_of(engine_args: Mapping[str, Any]) -> list[str]:
    """Return a message for each wrong argument. It says what to write instead."""
    valid_names = sorted(ENGINE | FRONT)
    unknown = [name for name in engine_args if name not in valid_names]
    if unknown:
        return [_unknown(name, valid_names) for name in unknown]
    try:
        _model(engine_args).model_validate(engine_args)
    except ValidationError as error:
        return [_wrong(problem) for problem in error.errors(include_url=False)]
    return []


def _model(names: Mapping[str, Any]) -> Any:
    """Return a pydantic model that has these arguments as its fields, with vLLM's types."""
    vllm_names = {"QuantizationConfigArgs": QuantizationConfigArgs}
    hints = get_type_hints(BaseFrontendArgs, include_extras=True) | get_type_hints(
        AsyncEngineArgs, localns=vllm_names, include_extras=True
    )
    fields: dict[str, Any] = {name: (_constrained(name, hints[name]), ...) for name in names}
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    return create_model("EngineArgs", __config__=config, **fields)


def _constrained(name: str, hint: Any) -> Any:
    """Return the type with the constraints that vLLM's configurations have for this field."""
    metadata = [constraint for config in _configs() for constraint in _metadata(config, name)]
    return Annotated[hint, *metadata] if metadata else hint


def _configs() -> Iterator[type]:
    for name in vllm.config.__all__:
        config = getattr(vllm.config, name)
        if isinstance(config, type) and hasattr(config, "__pydantic_fields__"):
            yield config


def _metadata(config: type, name: str) -> Sequence[Any]:
    field = getattr(config, "__pydantic_fields__").get(name)  # noqa: B009
    return field.metadata if field else ()


def _unknown(name: str, valid_names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid_names, MAX_SIMILAR)
    remedy = f"did you mean {' or '.join(close)}?" if close else "see vLLM's engine arguments"
    return f"{name} is not an engine argument of vLLM {vllm.__version__}; {remedy}"


def _wrong(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    return f"{path} is {error['input']!r}: {error['msg']}"
