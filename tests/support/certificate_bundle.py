"""Lets the HTTP clients of a test process share one SSL context with the usual authorities.

Each of the thousands of clients would read the file of all authorities, which takes 20 ms of CPU
time, although almost all servers of tests are without encryption.
"""

import functools
import ssl

import certifi

read = functools.cache(ssl.create_default_context)
create = ssl.create_default_context


def create_default_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH,
    *,
    cafile: str | None = None,
    capath: str | None = None,
    cadata: str | bytes | None = None,
) -> ssl.SSLContext:
    """Return the shared context if the caller trusts the usual authorities; else a new one."""
    if cafile == certifi.where() and not (capath or cadata):
        return read(purpose, cafile=cafile)
    return create(purpose, cafile=cafile, capath=capath, cadata=cadata)


def share() -> None:
    """Let all clients that this process makes from now on share the context."""
    ssl.create_default_context = create_default_context  # type: ignore[assignment]
