"""A user's engine arguments are checked with vLLM's own types and constraints.

They are those of vLLM's engine and those of its server's front, such as `tool_call_parser`.

`main` is a program: it reads a JSON list of mappings, and prints one with the problems of each.
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
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs

MATCHES = 3  # names that are shown for an unknown one


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        complaints = list(map(complain, json.load(sys.stdin)))
    print(json.dumps(complaints))


def _names(arguments: Any) -> frozenset[str]:
    names = (field.name for field in dataclasses.fields(arguments))
    return frozenset(name for name in names if not name.startswith("_"))


ENGINE = _names(AsyncEngineArgs)
FRONT = _names(BaseFrontendArgs) - ENGINE


def checked(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments, converted to vLLM's types. Raises ValueError that says what is
    wrong."""
    return {name: value for name, value in _checked(engine_args).items() if name in ENGINE}


def front_args(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the arguments of the server's front."""
    return {name: value for name, value in _checked(engine_args).items() if name not in ENGINE}


def _checked(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    if not engine_args:
        return {}
    if complaints := complain(engine_args):
        raise ValueError("--engine-args: " + "; ".join(complaints))
    values = _model(engine_args).model_validate(engine_args)
    return {name: getattr(values, name) for name in engine_args}


def complain(engine_args: Mapping[str, Any]) -> list[str]:
    """What is wrong with each argument, and what to write instead."""
    known = sorted(ENGINE | FRONT)
    unknown = [name for name in engine_args if name not in known]
    if unknown:
        return [_unknown(name, known) for name in unknown]
    try:
        _model(engine_args).model_validate(engine_args)
    except ValidationError as error:
        return [_wrong(each) for each in error.errors(include_url=False)]
    return []


def _model(names: Mapping[str, Any]) -> Any:
    """A pydantic model of these of vLLM's arguments."""
    names_there = {"QuantizationConfigArgs": QuantizationConfigArgs}
    hints = get_type_hints(BaseFrontendArgs, include_extras=True) | get_type_hints(
        AsyncEngineArgs, localns=names_there, include_extras=True
    )
    fields: dict[str, Any] = {name: (_constrained(name, hints[name]), ...) for name in names}
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    return create_model("EngineArgs", __config__=config, **fields)


def _constrained(name: str, hint: Any) -> Any:
    """The type with the constraints that vLLM's configurations have for a field of that name."""
    metadata = [each for config in _configs() for each in _metadata(config, name)]
    return Annotated[hint, *metadata] if metadata else hint


def _configs() -> Iterator[type]:
    for name in vllm.config.__all__:
        config = getattr(vllm.config, name)
        if isinstance(config, type) and hasattr(config, "__pydantic_fields__"):
            yield config


def _metadata(config: type, name: str) -> Sequence[Any]:
    field = getattr(config, "__pydantic_fields__").get(name)  # noqa: B009
    return field.metadata if field else ()


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, MATCHES)
    remedy = f"did you mean {' or '.join(close)}?" if close else "see vLLM's engine arguments"
    return f"{name} is no engine argument of vLLM {vllm.__version__}; {remedy}"


def _wrong(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where} is {error['input']!r}: {error['msg']}"
