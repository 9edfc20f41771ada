"""A request's body becomes a model, or an ApiError with the field and the expected value.

Router processes call this through bodies.py, which does not let a large body hold up others.
"""

from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvroute.router.api.errors import ApiError, invalid, shown, unsupported

Model = TypeVar("Model", bound=BaseModel)

# Unsupported fields of OpenAI and vLLM that would change the response, with the values that have no
# effect.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def parse(model: type[Model], raw: bytes) -> Model:
    """The validated request; unknown fields are dropped, and null means the default."""
    return _validated(model, json_object(raw))


def _validated(model: type[Model], body: dict[str, object]) -> Model:
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(given)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first_error(model, error) from None


def json_object(raw: bytes) -> dict[str, object]:
    try:
        body: object = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(
            400, f"the body is {shown(body)}; expected a JSON object", code="invalid_json"
        )
    return body


def _refuse_unsupported(given: dict[str, object]) -> None:
    for name, harmless in UNSUPPORTED.items():
        if name in given and given[name] not in harmless:
            raise unsupported(
                name, f"{name} is {shown(given[name])}, which is not supported; leave {name} out"
            )


def _first_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    expected = _expected(model, first)
    if first["type"] == "missing":
        return invalid(param, f"{param} is missing; {expected}")
    return invalid(param, f"{param} is {shown(first['input'])}; {expected}")


def _expected(model: type[BaseModel], error: ErrorDetails) -> str:
    """The expected value: the field's description, or the validator's message if it is nested."""
    *parents, name = error["loc"]
    field = model.model_fields.get(str(name)) if not parents else None
    if field is not None and field.description is not None:
        return f"expected {field.description}"
    if error["type"] == "model_type":  # pydantic's message names our classes
        return "expected an object"
    return error["msg"][:1].lower() + error["msg"][1:]
