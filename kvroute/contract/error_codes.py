"""The types and codes of errors in the format of OpenAI's API. docs/errors.md explains them."""

from typing import Literal, NewType, get_args

Type = Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
Code = Literal[
    "client_left",
    "context_length_exceeded",
    "foreign_origin",
    "gateway_timeout",
    "headers_too_large",
    "insufficient_role",
    "invalid_api_key",
    "invalid_http",
    "invalid_json",
    "invalid_value",
    "method_not_allowed",
    "model_not_found",
    "not_found",
    "overloaded",
    "quota_exceeded",
    "replicas_died",
    "request_blamed",
    "request_timeout",
    "request_too_large",
    "server_error",
    "stopping",
    "storage_full",
    "storage_unavailable",
    "unavailable",
    "unknown_host",
    "unsupported_media_type",
    "unsupported_parameter",
    "url_too_long",
    "wait_too_long",
]
CODES: tuple[Code, ...] = get_args(Code)
FeatureCode = NewType("FeatureCode", str)  # a code that one feature has (Feature.codes)
# HTTP status -> the code of errors that have no code of their own.
_CODES: dict[int, Code] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    414: "url_too_long",
    415: "unsupported_media_type",
    429: "overloaded",
    431: "headers_too_large",
    503: "unavailable",
    504: "gateway_timeout",
    507: "storage_full",
}
_TYPES: dict[int, Type] = {403: "permission_error", 429: "rate_limit_error"}
# HTTP status -> Anthropic's type of error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def type_of(status: int) -> Type:
    """Return OpenAI's type of the errors with an HTTP status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def code_of(status: int) -> Code:
    """Return the code of an error with an HTTP status that has no code of its own."""
    return _CODES.get(status) or ("invalid_value" if status < 500 else "server_error")


def anthropic_type_of(status: int) -> str:
    """Return Anthropic's type of the errors with an HTTP status."""
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return _ANTHROPIC_TYPES.get(status, fallback)
