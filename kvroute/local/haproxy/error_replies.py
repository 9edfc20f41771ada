"""Error responses that HAProxy sends itself: JSON in the format of the API that was called."""

import json
from collections.abc import Sequence

from kvroute.contract.error_codes import Code, anthropic_type_of, code_of, type_of

MESSAGES = "{ path_beg /v1/messages }"  # HAProxy's condition for requests to Anthropic's API
# HAProxy answers a request whose head exceeds BUFFER_BYTES or MAX_PARSED as malformed HTTP. The
# other limits are lower, and a request over one of them gets a message that names the limit.
# Size in bytes of HAProxy's buffers. One has the head of a request, and the body as far as it fits.
# A request that may be repeated (repeats.py) takes one more buffer until its response begins.
BUFFER_BYTES = 131_072
MAX_PARSED = 1000  # maximum number of headers that HAProxy parses
MAX_HEAD_BYTES = 16_384  # maximum total size of a request's headers in bytes
MAX_HEADERS = 100  # maximum number of headers of a request
MAX_URL_BYTES = 8192  # maximum size of a request's URL in bytes
UNREACHABLE = "no router of this cluster can be reached; try again"
UNREACHABLE_BODY = "txn.unreachable"  # HAProxy's variable with UNREACHABLE in the API's format
EARLY = {  # status -> message of an error that HAProxy finds before it has the whole request
    400: "the client closed its side of the connection before the answer; keep it open",
    408: "the request did not arrive in time; send it faster",
    500: "the server failed to answer",
}
CODES: dict[int, Code] = {400: "invalid_http"}  # codes of EARLY that differ from code_of()
VALID_ID = "^[!-~]{1,128}$"  # pattern of the request ids that routers accept


def openai_error(message: str, *, status: int, code: Code | None = None) -> str:
    """Return an error in the format of OpenAI's API."""
    return json.dumps({"error": _members(message, status, code)})


def anthropic_error(message: str, *, status: int) -> str:
    """Return an error in the format of Anthropic's API."""
    error = {"type": anthropic_type_of(status), "message": message}
    return json.dumps({"type": "error", "error": error})


def common_error(message: str, *, status: int) -> str:
    """Return an error that clients of both APIs can parse, if the API is not known."""
    return json.dumps({"type": "error", "error": _members(message, status, CODES.get(status))})


def _members(message: str, status: int, code: Code | None) -> dict[str, str | None]:
    members = {"message": message, "type": type_of(status), "param": None}
    return {**members, "code": code or code_of(status)}


def unreachable_page() -> str:
    """Return the HTTP response for HAProxy's option `errorfile`, sent if a router was lost."""
    body = common_error(UNREACHABLE, status=503)
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        "retry-after: 1",
        f"content-length: {len(body)}",
    )
    return "\r\n".join((*head, "", body))


def replies() -> str:
    """Return the configuration of the responses to errors that checks() does not cover."""
    early = "".join(
        f"    http-error status {status} content-type application/json "
        f"string {_quoted(common_error(message, status=status))}\n"
        for status, message in EARLY.items()
    )
    return (
        f"{early}    http-error status 503 content-type application/json hdr retry-after 1 "
        f"lf-string %[var({UNREACHABLE_BODY})]\n"
    )


def refusal(
    status: int,
    message: str,
    *,
    when: str,
    code: Code | None = None,
    headers: str = "",
) -> str:
    """Return the rules that refuse requests, one rule for each API.

    Args:
        status: HTTP status of the refusal.
        message: Message of the error.
        when: HAProxy's condition under which it refuses a request.
        code: OpenAI's code of the error; None: the one of the status.
        headers: Further headers in HAProxy's syntax, with a space at the end.
    """
    rule = f"    http-request return status {status} content-type application/json {headers}"
    return (
        f"{rule}string {_quoted(anthropic_error(message, status=status))} if {when} {MESSAGES}\n"
        f"{rule}string {_quoted(openai_error(message, status=status, code=code))} if {when}\n"
    )


def _quoted(text: str) -> str:
    """Return the text as one word of HAProxy's configuration."""
    return "'" + text.replace("'", r"'\''") + "'"


def _request_id() -> str:
    """Return the rules that add an id to each response: the client's id, or a new one."""
    client_id, header = "var(txn.request_id)", "x-request-id"
    return (
        "    unique-id-format %[uuid]\n"
        f"    http-request set-var(txn.request_id) req.hdr({header}) "
        f"if {{ req.hdr({header}) -m reg {VALID_ID} }}\n"
        f"    http-after-response set-header {header} %[unique-id] "
        f"if !{{ res.hdr({header}) -m found }}\n"
        f"    http-after-response set-header {header} %[{client_id}] "
        f"if {{ {client_id} -m found }}\n"
    )


def readable_from(origins: Sequence[str]) -> str:
    """Return the rules that let web pages of these origins, or of all for `*`, read the errors.

    Routers add such headers themselves, so responses that have them stay as they are.
    """
    if not origins:
        return ""
    sent, allowed = "req.hdr(origin)", "access-control-allow-origin"
    known = "" if "*" in origins else f" {{ {sent} -i -m str {' '.join(map(_quoted, origins))} }}"
    rule = "    http-after-response"
    error = f"{{ var(txn.origin) -m found }} !{{ res.hdr({allowed}) -m found }}"
    return (
        f"    http-request set-var(txn.origin) {sent} if {{ {sent} -m found }}{known}\n"
        f"{rule} set-header access-control-expose-headers * if {error}\n"
        f"{rule} add-header vary Origin if {error}\n"
        f"{rule} set-header {allowed} %[var(txn.origin)] if {error}\n"
    )


def _unreachable() -> str:
    """Return the rules that format UNREACHABLE for the API that the client called."""
    rule = f"    http-request set-var-fmt({UNREACHABLE_BODY})"
    return (
        f"{rule} {_quoted(openai_error(UNREACHABLE, status=503))}\n"
        f"{rule} {_quoted(anthropic_error(UNREACHABLE, status=503))} if {MESSAGES}\n"
    )


def checks() -> str:
    """Return the rules that HAProxy applies first to every request."""
    return "".join(
        (
            _request_id(),
            _unreachable(),
            refusal(
                431,
                f"the request has more than {MAX_HEADERS} headers; send fewer",
                when=f"{{ req.fhdr_cnt gt {MAX_HEADERS} }}",
            ),
            refusal(
                431,
                f"the request's headers have more than {MAX_HEAD_BYTES} bytes; send less",
                when=f"{{ req.hdrs,length gt {MAX_HEAD_BYTES} }}",
            ),
            refusal(
                414,
                f"the request's URL has more than {MAX_URL_BYTES} bytes; send a shorter one",
                when=f"{{ url,length gt {MAX_URL_BYTES} }}",
            ),
            refusal(
                400,
                "the request's URL has no path of this server; send a path that begins with /",
                when="!{ path_beg / }",
                code="invalid_http",
            ),
            refusal(
                426,
                "this server does not support WebSockets; send POST requests, and read streams as "
                "server-sent events",
                when="{ req.hdr(upgrade) -i websocket }",
                code="invalid_http",
                headers="hdr upgrade HTTP/1.1 ",
            ),
        )
    )
