"""Makes HAProxy repeat requests whose router has ended before the first byte of its response.

HAProxy keeps a copy of such a request until the response begins. If the router's connection ends
before that, HAProxy sends the copy to another router. Only reads and requests that generate or
compute something are repeated: a request that creates, changes or deletes something could have done
so before its router ended. A request is also not repeated if it does not fit into HAProxy's buffer
(errors.BUFFER_BYTES), or once its response has begun.
"""

import re

from kvroute.features import ONCE, PATHS
from kvroute.local.haproxy.connections import DEFAULT_IDLE_S

REPEATED = (  # routes for POST that change nothing, so that a request may run twice
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/generative_scoring",
    "/classify",
    "/pooling",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/v1/route",
    "/ping",
    *PATHS.repeated,
)
# Longest time in which HAProxy waits for a body, or for as much as its buffer holds: no shorter
# than the time for which it waits for a part of any other body.
BODY_S = DEFAULT_IDLE_S


def with_repeats(config: str) -> str:
    """Return Serve's configuration with repeats of requests."""
    config = re.sub(r"^( +retry-on) .*", r"\g<1> conn-failure empty-response", config, flags=re.M)
    return re.sub(r"^( +use_backend .*\n)", rf"{_rules()}\g<1>", config, count=1, flags=re.M)


def _rules() -> str:
    """Return the rules that select the requests to repeat, and that wait for their bodies.

    HAProxy can repeat a request only if it has the whole body before it sends the first byte.
    """
    # A body that has such a field's name elsewhere is not repeated either.
    once = [
        f"{{ path {path} }} {{ req.body -m sub {' '.join(map(_quoted, fields))} }}"
        for path, fields in ONCE.items()
    ]
    return (
        f"    acl is_repeated path {' '.join(REPEATED)}\n"
        f"    http-request wait-for-body time {BODY_S:g}s if METH_POST is_repeated\n"
        "    http-request disable-l7-retry if !METH_GET !METH_POST\n"
        "    http-request disable-l7-retry if METH_POST !is_repeated\n"
    ) + "".join(f"    http-request disable-l7-retry if {condition}\n" for condition in once)


def _quoted(field: str) -> str:
    return f"'\"{field}\"'"
