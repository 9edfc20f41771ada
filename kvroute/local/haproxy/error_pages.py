"""Replaces the HTML of HAProxy's built-in error pages with JSON.

If HAProxy 2.8 cannot parse a request's head, or does not get it in time, it answers with an HTML
page that is a constant in its program. Its option `errorfile` does not change these pages. So
kvroute copies the program, replaces the constants with JSON of the same length, and runs the copy.
If the copy cannot be written or run, kvroute runs the original program.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from kvroute.contract.error_codes import type_of

NAME = "haproxy"  # file name of the copy
LIBRARIES = "lib"  # folder beside the program, from which it loads its libraries
# A page in the program: a whole HTTP response, which ends with a zero byte.
PAGE = re.compile(
    rb"HTTP/1\.1 (\d{3}) ([^\r\0]+)\r\nContent-length: \d+\r\n[^\0]*text/html\r\n\r\n[^\0]*\0"
)
MESSAGES = {  # status -> message; the new page must not be longer than the HTML page
    400: "malformed HTTP, or a head over 128 kB",
    408: "the head of the request did not arrive in time",
    413: "the body is too large",
    422: "this Transfer-Encoding is not supported",
    500: "HAProxy failed",
    501: "HAProxy does not support this request",
}


def program_with_json(program: Path, folder: Path) -> Path:
    """Write a copy of HAProxy's program with JSON pages to the folder, and return its path.

    Returns the original program if the copy cannot be written or run.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        copy = _write(replaced(program.read_bytes()), folder)
        libraries = folder / LIBRARIES
        libraries.unlink(missing_ok=True)
        libraries.symlink_to(program.parent / LIBRARIES)
    except OSError as error:
        print(
            f"HAProxy answers malformed requests with HTML, since {folder} cannot be used: {error}"
        )
        return program
    return copy if os.access(copy, os.X_OK) else program  # the file system may forbid execution


def replaced(program: bytes) -> bytes:
    """Return the program with a JSON page for each status in MESSAGES."""
    return PAGE.sub(_page, program)


def _page(old: re.Match[bytes]) -> bytes:
    """Return the JSON page, padded to the old length; the old page if there is none that fits."""
    status, reason = int(old[1]), old[2].decode()
    message = MESSAGES.get(status)
    if message is None:
        return old[0]
    # The API is not known. The page has no space for `param` and `code`.
    error = {"type": type_of(status), "message": message}
    body = json.dumps({"type": "error", "error": error}, separators=(",", ":"))
    page = (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    return page.ljust(len(old[0]), b"\0") if len(page) < len(old[0]) else old[0]


def _write(program: bytes, folder: Path) -> Path:
    """Write a new file and move it into place, so that no file of another user is executed."""
    handle, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(program)
    os.chmod(name, 0o700)
    return Path(shutil.move(name, folder / NAME))
