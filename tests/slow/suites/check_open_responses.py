"""Check responses and events of streams against the models of Open Responses.

It runs in an environment of its own. It reads a JSON list of responses and events, and prints a
JSON list of what is wrong with them.
"""

import json
import sys
from typing import Any

import openresponses_types
from pydantic import BaseModel, ValidationError

EVENTS = {
    next(iter(model.model_fields["type"].annotation)).value: model
    for name, model in vars(openresponses_types).items()
    if name.endswith("StreamingEvent")
}


def problems(given: dict[str, Any]) -> list[str]:
    """Return what is wrong with a response or with an event of a stream."""
    if given.get("object") == "response":
        model: type[BaseModel] = openresponses_types.ResponseResource
    elif given.get("type") in EVENTS:
        model = EVENTS[given["type"]]
    else:
        return [f"unknown type {given.get('type')!r}"]
    _without_schema(given.get("response", given))
    try:
        model.model_validate(given)
    except ValidationError as error:
        name = given.get("type", "response")
        return [f"{name}: {each['loc']}: {each['msg']}" for each in error.errors()]
    return []


def _without_schema(response: dict[str, Any]) -> None:
    """Take out a JSON schema: by the specification it is an object or null, by the package null."""
    text = response.get("text")
    if isinstance(text, dict) and "schema" in text["format"]:
        text["format"]["schema"] = None


if __name__ == "__main__":
    print(json.dumps([problem for given in json.load(sys.stdin) for problem in problems(given)]))
