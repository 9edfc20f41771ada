"""The header `Idempotency-Key`: a request that is sent again creates nothing a second time.

The id of what a request creates depends on the key alone, so no router has to remember keys: what
is stored under the id already is the answer to the earlier request.
"""

import uuid
from hashlib import blake2b

from fastapi import Request

from kvroute.router.api.call_limits import MAX_NAME
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.middleware.caller_check import caller_of

HEADER = "idempotency-key"
BYTES = 16


def new_id(request: Request, prefix: str) -> str:
    """Return the id of what a request creates: the prefix, and 32 hexadecimal digits.

    They are the same for all requests of a tenant to one path with one key, and random without a
    key.

    Raises:
        ApiError: 400: the key is too long.
    """
    key = request.headers.get(HEADER)
    if not key:
        return f"{prefix}{uuid.uuid4().hex}"
    if len(key) > MAX_NAME:
        raise invalid(HEADER, f"{HEADER} has {len(key)} characters; send at most {MAX_NAME}")
    caller = caller_of(request)
    owner = blake2b(f"{caller.tenant}\0{caller.secret}".encode()).digest()
    text = f"{request.url.path.rstrip('/')}\0{key}".encode(errors="surrogatepass")
    return prefix + blake2b(text, key=owner, digest_size=BYTES).hexdigest()


def reused(id_: str) -> ApiError:
    """Return the error for a key that was sent with another request."""
    return invalid(
        HEADER,
        f"{HEADER} was sent before, with a different request, which has created {id_}; send "
        "another key with each new request",
    )
