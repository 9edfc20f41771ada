"""HAProxy's built-in pages for requests that it cannot read, as JSON.

HAProxy 2.8 has an option for all other errors. It answers a head that it cannot parse, or that does
not come in time, with HTML that is a constant of its program, whatever `errorfile` says. So a copy
of the program runs, in which JSON takes the place of these constants. Where the copy cannot be made
or run, the program itself runs.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

NAME = "haproxy"
LIBRARIES = "lib"  # beside the program, where it looks for them
PAGE = re.compile(
    rb"HTTP/1\.1 (\d{3}) ([^\r\0]+)\r\nContent-length: \d+\r\n[^\0]*text/html\r\n\r\n[^\0]*\0"
)
MESSAGES = {  # no longer than the pages that they replace
    400: "malformed HTTP, or a head over 64 kB",
    408: "the head of the request did not come in time",
    413: "the body is too large",
    422: "this Transfer-Encoding is not supported",
    500: "HAProxy failed",
    501: "HAProxy does not support this request",
}


def program_with_json(program: Path, folder: Path) -> Path:
    """Return a program like HAProxy's, in this folder, whose own pages are JSON."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        copy = _written(replaced(program.read_bytes()), folder)
        libraries = folder / LIBRARIES
        libraries.unlink(missing_ok=True)
        libraries.symlink_to(program.parent / LIBRARIES)
    except OSError as error:
        print(f"HAProxy's own errors are HTML, since {folder} cannot be used: {error}")
        return program
    return copy if os.access(copy, os.X_OK) else program  # no: the file system runs no programs


def replaced(program: bytes) -> bytes:
    """Return the program with JSON for each page that has a message here."""
    return PAGE.sub(_page, program)


def _page(found: re.Match[bytes]) -> bytes:
    """Return the new page, padded to the length of the old one."""
    status, reason = int(found[1]), found[2].decode()
    message = MESSAGES.get(status)
    if message is None:
        return found[0]
    kind = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": "error", "error": {"type": kind, "message": message}}
    body = json.dumps(error, separators=(",", ":"))
    page = (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    return page.ljust(len(found[0]), b"\0") if len(page) < len(found[0]) else found[0]


def _written(program: bytes, folder: Path) -> Path:
    """Write the file anew: nobody else can have put another one there."""
    handle, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(program)
    os.chmod(name, 0o700)
    return Path(shutil.move(name, folder / NAME))
