"""The check of a list in a body ends at its first bad item, however deep the list is.

vLLM would collect the errors of all items, for each type that an item may have: one message with
30,000 bad parts, 450 KB, holds up every stream of the replica for 8 s.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic_core import SchemaValidator


def install(app: FastAPI) -> None:
    """For the bodies of all routes of vLLM's application."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            for body in route.dependant.body_params:
                _replace(body._type_adapter)


def _replace(adapter: Any) -> None:
    """The adapter's validator gets another one for each list. Prebuilt ones of the models have
    vLLM's own."""
    adapter.validator = SchemaValidator(_fail_fast(adapter.core_schema), _use_prebuilt=False)


def _fail_fast(schema: Any) -> Any:
    """A copy of a core schema, or of a part of one."""
    if isinstance(schema, dict):
        copy = {name: _fail_fast(each) for name, each in schema.items()}
        return copy | {"fail_fast": True} if schema.get("type") == "list" else copy
    if isinstance(schema, list | tuple):
        return type(schema)(map(_fail_fast, schema))
    return schema
