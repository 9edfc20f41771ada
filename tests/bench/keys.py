"""The time that API keys add to a request, without HTTP: medians in microseconds."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.blocks.chain import Scope as CacheScope
from kvroute.blocks.chain import Space
from kvroute.features.keys.key_file import KeyFile, Keyring, new_file, new_key, write
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.limits import TenantLimits
from kvroute.features.keys.router_limits import Limits
from kvroute.router.api.calls import COMPLETIONS, parse_call
from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.router.middleware.origins import Origins
from tests.bench.indexed import BLOCK, prompt
from tests.bench.report import Row, Section

ROUNDS, REQUESTS = 21, 500
TENANTS = 1000
PROMPT_TOKENS = 4096


def keys() -> Section:
    rows: list[Row] = [
        {"part": part, "us a request": cost_us(act)} for part, act in parts().items()
    ]
    title = f"Cost of API keys, with {TENANTS:,} tenants"
    note = f"Fingerprints of {PROMPT_TOKENS:,} tokens. Half of these are a prefix that is shared."
    return Section(title, rows, [note])


def parts() -> dict[str, Callable[[], object]]:
    """Return the functions that run once for each request."""
    key, file = key_and_file()
    keyring = Keyring(file)
    caller = keyring.caller(key)
    assert caller is not None
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [
            (b"host", b"localhost:8000"),
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {key}".encode()),
        ],
    }
    with TemporaryDirectory() as folder:
        write(Path(folder, "keys.json"), file)
        gate = KeyGate(Path(folder, "keys.json"))
    check = partial(CallerCheck, gate=gate, refused=refused)
    origins = partial(Origins, allowed=(), local_only=False, refused=refused)
    call = parse_call(COMPLETIONS, b'{"prompt": "hi"}').with_caller(caller)
    tokens, space = prompt(PROMPT_TOKENS), Space("m", "", BLOCK)
    salted = CacheScope(namespace=caller.salt, shared_tokens=PROMPT_TOKENS // 2)
    chained = partial(space.chain, tokens)
    limits = Limits(lambda tenant: TenantLimits(max_requests=10, uncached_tokens_per_minute=10**9))
    return {
        "find the key's tenant": lambda: keyring.caller(key),
        "middleware that requires a key": passing(check, scope),
        "middleware that checks origins": passing(origins, scope),
        "derive the cache salt": lambda: call.cache_salt,
        "fingerprints with a salt": lambda: chained(salted),
        "fingerprints without a salt": lambda: chained(CacheScope()),
        "count towards limits": lambda: counted(limits),
    }


def key_and_file() -> tuple[str, KeyFile]:
    """Return a key, and a file that contains this key and many others."""
    pairs = [new_key(f"tenant-{n}", ("use",), "") for n in range(TENANTS)]
    file = new_file()
    return pairs[0][0], KeyFile(file.secret, tuple(entry for _, entry in pairs))


def refused(error: Exception) -> None:
    raise error


def passing(middleware: Callable[[ASGIApp], ASGIApp], scope: Scope) -> Callable[[], object]:
    """Return a function that sends a request through the middleware.

    No event loop is needed, because the middleware never waits.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    wrapped = middleware(app)

    def act() -> None:
        coroutine = wrapped(dict(scope), None, None)  # type: ignore[arg-type]
        try:
            coroutine.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        raise AssertionError("the middleware waited; this benchmark needs one that does not")

    return act


def counted(limits: Limits) -> None:
    now_s = time.monotonic()
    entry = limits.enter("acme", now_s)
    assert entry is not None
    entry.leave()


def cost_us(act: Callable[[], object]) -> float:
    """Return the time of a call in microseconds: the median of several rounds."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(REQUESTS):
            act()
        times.append((time.perf_counter() - began_s) / REQUESTS)
    return round(1e6 * statistics.median(times), 2)


if __name__ == "__main__":
    print(keys().markdown())
