"""The lines of a batch's input file: checked, and found again by their number.

A line is a JSON object in the format of OpenAI's Batch API:
`{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.

The lines themselves stay on disk. In memory, a line takes 16 bytes: where it begins, and a hash of
its custom_id.
"""

from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

MAX_FAULTS = 100  # faults of a file that are reported
# Paths of requests with one answer that is not a stream.
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/classify",
    "/pooling",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
)


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    url: Literal[PATHS]  # type: ignore[valid-type]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


_DECODER = msgspec.json.Decoder(BatchLine)


class BadLinesError(ValueError):
    """The file cannot be used. `faults` has the first faults, each with its line number."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Lines:
    """The lines of a file. Empty lines do not count as lines."""

    def __init__(self, file: BinaryIO, starts: "array[int]", ids: NDArray[np.uint64]) -> None:
        self._file = file
        self._starts = starts
        self.ids = ids  # hash of each line's custom_id

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> BatchLine:
        """Return a line. The first line has the index 0."""
        self._file.seek(self._starts[index])
        return _DECODER.decode(self._file.readline())

    def close(self) -> None:
        self._file.close()


def open_lines(path: Path, observe: Callable[[BatchLine], None] = lambda line: None) -> Lines:
    """Read a file and check all of its lines.

    Args:
        path: the file.
        observe: called with each line, in the order of the file.

    Raises:
        BadLinesError: lines are not valid, or share a custom_id, or there are none.
        OSError: the file cannot be read.
    """
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        lines = _checked(file, observe)
        opened.pop_all()  # the file stays open
    return lines


def _checked(file: BinaryIO, observe: Callable[[BatchLine], None]) -> Lines:
    starts, ids, faults = array("Q"), array("Q"), list[str]()
    numbers = array("Q")  # number of each line in the file, counted from 1 with empty lines
    start = 0
    for number, text in enumerate(file, start=1):
        if not text.isspace():
            try:
                line = _DECODER.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                faults.append(f"line {number}: {_reason(error)}")
                if len(faults) == MAX_FAULTS:
                    break
            else:
                starts.append(start)
                numbers.append(number)
                ids.append(id_hash(line.custom_id))
                observe(line)
        start += len(text)
    hashes = np.array(ids, dtype=np.uint64)
    faults += _repeated(hashes, numbers)[: MAX_FAULTS - len(faults)]
    if not starts and not faults:
        faults.append("the file has no lines; write one JSON object in each line")
    if faults:
        raise BadLinesError(faults)
    return Lines(file, starts, hashes)


def id_hash(custom_id: str) -> int:
    """Return the hash by which lines are compared: 64 bits."""
    return xxhash.xxh3_64_intdigest(custom_id.encode())


def _reason(error: Exception) -> str:
    example = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
    if isinstance(error, msgspec.ValidationError):
        return f"{error}; expected a line such as {example}"
    return f"not valid JSON ({error}); expected a line such as {example}"


def _repeated(ids: NDArray[np.uint64], numbers: "array[int]") -> list[str]:
    """Return a fault for each line whose custom_id an earlier line has."""
    _, first = np.unique(ids, return_index=True)
    if len(first) == len(ids):
        return []
    is_first = np.zeros(len(ids), dtype=bool)
    is_first[first] = True
    return [
        f"line {numbers[index]}: an earlier line has the same custom_id; make each one unique"
        for index in np.flatnonzero(~is_first)[:MAX_FAULTS]
    ]
