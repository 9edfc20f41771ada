"""Checks the lines of a batch's input file, and reads single lines by their index.

A line is a JSON object in the format of OpenAI's Batch API:
`{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.

The lines themselves stay on disk. In memory, a line takes 16 bytes: where it starts, and a hash of
its custom_id.
"""

import codecs
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from kvroute.contract.unreadable import DECODE_ERRORS

MAX_FAULTS = 100  # faults of a file that are reported
MAX_EMPTY = 100_000  # empty lines that a file may have more than other lines
MAX_LINE_BYTES = 64 << 20  # default limit of a line
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")  # the body names a recording
# Paths that lines may have. Requests to them can be answered by one JSON object, without a stream.
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/responses",
    "/v1/messages",
    "/classify",
    "/pooling",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    *AUDIO,
)
# Marks of text encodings with which files of some editors begin. UTF-8's mark is left out.
BOM = codecs.BOM_UTF8
OTHER_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)

# Results have the value as the line has it. Numbers are limited to those that they can have.
CustomId = (
    Annotated[str, Meta(min_length=1, max_length=512)]
    | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | float
)


EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: CustomId
    url: Literal[PATHS]  # type: ignore[valid-type]
    body: dict[str, Any]
    method: str = "POST"


class SentLine(msgspec.Struct, frozen=True):
    """The fields of a line that are needed to send it. The body stays encoded."""

    custom_id: CustomId
    url: str
    body: msgspec.Raw


FaultCode = Literal[
    "duplicate_custom_id",
    "empty_file",
    "input_file_missing",
    "invalid_api_key",
    "invalid_json_line",
    "invalid_request",
    "line_too_long",
    "mismatched_endpoint",
]


class Fault(msgspec.Struct, frozen=True):
    """Why a file cannot be used."""

    line: int | None  # number of the line, counted from 1; None: the file as a whole
    code: FaultCode
    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


_DECODER = msgspec.json.Decoder(BatchLine)
_SENT = msgspec.json.Decoder(SentLine)


class BadLinesError(ValueError):
    """The file cannot be used. `faults` has the first faults, in the order of their lines."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


class Lines:
    """The lines of a file. Empty lines do not count as lines. Threads may read at the same time.

    Args:
        file: the file.
        starts: where each line starts; the last item is where the file ends.
        ids: hash of each line's custom_id.
    """

    def __init__(self, file: BinaryIO, starts: NDArray[np.uint64], ids: NDArray[np.uint64]) -> None:
        self._file = file
        self.starts = starts
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> SentLine:
        """Return a line. The first line has the index 0."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        text = os.pread(self._file.fileno(), end - start, start)
        return _SENT.decode(text.rstrip(BOM + b" \t\r\n\x0b\x0c"))  # of the next line

    def close(self) -> None:
        self._file.close()


def open_lines(
    path: Path,
    observe: Callable[[BatchLine], None] = lambda line: None,
    *,
    endpoint: str = "",
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Lines:
    """Read a file and check all of its lines.

    Args:
        path: the file.
        observe: called with each line, in the order of the file.
        endpoint: the `url` that all lines must have; empty: each line has its own.
        max_line_bytes: longer lines are faults.

    Raises:
        BadLinesError: lines are not valid, or share a custom_id, or there are none.
        OSError: the file cannot be read.
    """
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        lines = _checked(file, observe, endpoint, max_line_bytes)
        opened.pop_all()  # the file stays open
    return lines


def _checked(
    file: BinaryIO, observe: Callable[[BatchLine], None], endpoint: str, max_line_bytes: int
) -> Lines:
    starts, ids, faults = array("Q"), array("Q"), list[Fault]()
    numbers = array("Q")  # number of each line in the file, from 1; empty lines have numbers, too
    end = empty = 0
    for number, (start, text) in enumerate(_texts(file, max_line_bytes), start=1):
        end = start + len(text)
        if text.startswith(OTHER_BOMS):
            message = "the file is in UTF-16 or UTF-32; save it in UTF-8"
            faults.append(Fault(number, "invalid_json_line", message))
            break
        text = text.removeprefix(BOM)
        start = end - len(text)
        if not text.strip():
            empty += 1
            if empty > MAX_EMPTY + len(ids):
                message = f"the file has {empty} empty lines up to this one; delete them"
                faults.append(Fault(number, "invalid_request", message))
                break
            continue
        line = _decoded(number, text, endpoint, max_line_bytes)
        if isinstance(line, Fault):
            faults.append(line)
            if len(faults) == MAX_FAULTS:
                break
            continue
        starts.append(start)
        numbers.append(number)
        ids.append(id_hash(line.custom_id))
        observe(line)
    starts.append(end)
    hashes = np.array(ids, dtype=np.uint64)
    faults += _repeated(hashes, numbers)[: MAX_FAULTS - len(faults)]
    if not ids and not faults:
        message = "the file has no lines; write one JSON object in each line"
        faults.append(Fault(None, "empty_file", message))
    if faults:
        raise BadLinesError(sorted(faults, key=lambda fault: fault.line or 0))
    return Lines(file, np.array(starts, dtype=np.uint64), hashes)


def _texts(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line starts, and its first `limit + 1` bytes."""
    start = 0
    while text := file.readline(limit + 1):
        yield start, text
        while not text.endswith(b"\n") and (more := file.readline(limit)):
            start += len(text)
            text = more
        start += len(text)


def _decoded(number: int, text: bytes, endpoint: str, max_bytes: int) -> BatchLine | Fault:
    """Return a line of the file, or why it cannot be used."""
    if len(text) > max_bytes:
        message = (
            f"the line has more than {max_bytes} bytes; send a shorter prompt, or raise "
            "--max-body-mb"
        )
        return Fault(number, "line_too_long", message)
    try:
        line = _DECODER.decode(text)
    except msgspec.ValidationError as error:
        problem = f"{error}; expected a line such as {EXAMPLE}"
        if "$.url" in str(error):
            problem = f"{error}; expected {', '.join(PATHS)}"
        return Fault(number, "invalid_request", problem)
    except DECODE_ERRORS as error:
        message = f"not valid JSON ({error}); expected a line such as {EXAMPLE}"
        return Fault(number, "invalid_json_line", message)
    if line.method.upper() != "POST":
        message = f"method is {line.method[:20]!r}; expected POST, or no method"
        return Fault(number, "invalid_request", message)
    if endpoint and line.url != endpoint:
        message = f"url is {line.url}, but the batch's endpoint is {endpoint}"
        return Fault(number, "mismatched_endpoint", message)
    return line


def id_hash(custom_id: CustomId) -> int:
    """Return the hash by which lines are compared: 64 bits."""
    return xxhash.xxh3_64_intdigest(str(custom_id).encode(errors="surrogatepass"))


def _repeated(ids: NDArray[np.uint64], numbers: "array[int]") -> list[Fault]:
    """Return a fault for each line that has the same custom_id as an earlier line."""
    _, first = np.unique(ids, return_index=True)
    if len(first) == len(ids):
        return []
    is_first = np.zeros(len(ids), dtype=bool)
    is_first[first] = True
    message = "an earlier line has the same custom_id; make each one unique"
    return [
        Fault(numbers[index], "duplicate_custom_id", message)
        for index in np.flatnonzero(~is_first)[:MAX_FAULTS]
    ]
