"""The output of a batch: one line for each answered line of the input, in two files.

Answers with a status below 400 go to the output file, and everything else to the error file. Both
have OpenAI's format. Lines are written as answers come, so both files can be read meanwhile, and a
batch that was interrupted continues with the lines that neither file has.
"""

import asyncio
import fcntl
import os
import uuid
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvroute.batch.lines import CustomId, Lines, id_hash
from kvroute.contract.unreadable import DECODE_ERRORS


class LineResult(msgspec.Struct, frozen=True):
    """The part of a written line that is read again."""

    custom_id: CustomId
    response: msgspec.Raw  # input lines have none, so that they do not count as results


class ResultsError(ValueError):
    """The files cannot be used. The message says what to do."""


class Results:
    """The output file and the error file. One process at a time can have them open."""

    def __init__(self, output: Path, errors: Path, lines: Lines) -> None:
        """Open the files, and find out which lines they have already.

        Raises:
            ResultsError: another process has them open, or they belong to another batch.
            OSError: they cannot be opened.
        """
        with ExitStack() as opened:
            self._output = opened.enter_context(_open(output))
            self._errors = opened.enter_context(_open(errors))
            failed = _written(self._errors, errors)
            written = _written(self._output, output) + failed
            known: NDArray[np.bool_] = np.isin(lines.ids, np.array(written, dtype=np.uint64))
            if (others := len(written) - int(known.sum())) > 0:
                raise ResultsError(
                    f"{output} and {errors} have {others} lines that are not in the input or have "
                    "the custom_id of an earlier line; name another output file"
                )
            opened.pop_all()  # the files stay open
        self.is_done = known  # for each line of the input, whether it was answered before
        self.failed = len(failed)  # how many of these lines have failed

    def write(self, custom_id: CustomId, *, status: int, request_id: str, body: bytes) -> None:
        """Write an answer. A body that is not JSON is written as a JSON string."""
        line = result_line(custom_id, status=status, request_id=request_id, body=body)
        _write(self._output if status < 400 else self._errors, line)

    async def sync(self) -> None:
        """Wait until everything written is on the disk."""
        for file in (self._output, self._errors):
            await asyncio.to_thread(os.fsync, file.fileno())

    def close(self) -> None:
        """Close the files. If no line has failed, there is no error file afterwards."""
        if not os.fstat(self._errors.fileno()).st_size:
            os.unlink(self._errors.name)
        self._output.close()
        self._errors.close()


def _open(path: Path) -> BinaryIO:
    file = path.open("ab+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ResultsError(
            f"another process writes {path}; wait for it, or name another output file"
        ) from None
    return file


def _written(file: BinaryIO, path: Path) -> "array[int]":
    """Return the hashes of the custom_ids in a file; remove an incomplete last line."""
    file.seek(0)
    hashes, end = array("Q"), 0
    with os.fdopen(os.dup(file.fileno()), "rb") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):  # the process was killed while it wrote
                break
            try:
                hashes.append(id_hash(msgspec.json.decode(text, type=LineResult).custom_id))
            except DECODE_ERRORS:
                raise ResultsError(
                    f"{path} has something else than a batch's results in line {number}; name "
                    "another output file"
                ) from None
            end += len(text)
    file.truncate(end)
    return hashes


def result_line(custom_id: CustomId, *, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answered request. A body that is not JSON becomes a JSON string."""
    response = {"status_code": status, "request_id": request_id, "body": _in_one_line(body)}
    return _line({"custom_id": custom_id, "response": response, "error": None})


def unanswered_line(custom_id: CustomId, *, code: str, message: str) -> bytes:
    """Return the line of a request that has no answer, because its batch has ended early."""
    error = {"code": code, "message": message}
    return _line({"custom_id": custom_id, "response": None, "error": error})


def _line(result: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"id": f"batch_req_{uuid.uuid4().hex}", **result}) + b"\n"


def _write(file: BinaryIO, line: bytes) -> None:
    written = file.write(line)
    if written != len(line):  # the disk is full: the next run removes the incomplete line
        raise OSError(f"only {written} of {len(line)} bytes could be written; is the disk full?")


def _in_one_line(body: bytes) -> object:
    """Return a value for a body: JSON without line breaks, or a string if the body is not JSON."""
    try:
        if b"\n" in body:
            return msgspec.json.decode(body)
        return msgspec.json.decode(body, type=msgspec.Raw)
    except DECODE_ERRORS:
        return body.decode(errors="replace")
