"""Checks a batch's file, orders its lines, and finds out which ones have a result.

This runs in a process of its own: `python -m kvroute.batch.prepare`. A large file takes minutes of
CPU time, and the router that runs the batch answers other requests meanwhile. The process reads a
Preparation from its standard input, and writes a Prepared to its standard output, both as JSON.
"""

import os
import shutil
import sys
from array import array
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvroute.batch.lines import (
    MAX_LINE_BYTES,
    BadLinesError,
    CustomId,
    Fault,
    Lines,
    id_hash,
    open_lines,
)
from kvroute.batch.order import Sorter
from kvroute.batch.usage import TokenUsage, UsageOnly
from kvroute.contract.unreadable import DECODE_ERRORS

# Files of an index: where lines start, the hashes of their custom_ids, and their order.
STARTS, IDS, ORDER = "starts.npy", "ids.npy", "order.npy"


class Part(Struct, frozen=True):
    """A file with results."""

    path: str
    size: int  # how many of its bytes count
    has_errors: bool  # whether its lines are failed requests


class Preparation(Struct, frozen=True):
    """The paths and limits of one call of `run`."""

    file: str  # path of the batch's input
    endpoint: str  # the `url` that all lines must have
    index: str  # path of the index; it is made if it is missing
    remaining: str  # path of the file for the indexes of lines without a result, in their order
    parts: tuple[Part, ...] = ()
    max_line_bytes: int = MAX_LINE_BYTES


class Prepared(Struct, frozen=True):
    """The result of `run`: the input's faults, or the counts of its lines."""

    faults: tuple[Fault, ...] = ()  # why the input cannot be used; empty: it can be used
    total: int = 0  # number of lines
    completed: int = 0  # lines with a good result
    failed: int = 0  # lines with an error
    usage: TokenUsage = TokenUsage()  # tokens of all results


class _Result(Struct):
    custom_id: CustomId
    response: msgspec.Raw  # null: the line was not answered


class _Answered(Struct):
    body: UsageOnly


def run(job: Preparation) -> Prepared:
    """Do a job. Raises OSError."""
    index = Path(job.index)
    try:
        if not index.is_dir():
            _make_index(job, index)
    except BadLinesError as error:
        return Prepared(tuple(error.faults))
    ids, order = np.load(index / IDS), np.load(index / ORDER)
    has_result = np.zeros(len(ids), dtype=bool)
    counts, usage = {False: 0, True: 0}, TokenUsage()
    for part in job.parts:
        hashes, used = _results(part)
        has_result |= np.isin(ids, hashes)
        counts[part.has_errors] += len(hashes)
        usage += used
    np.save(job.remaining, order[~has_result[order]])
    return Prepared(total=len(ids), completed=counts[False], failed=counts[True], usage=usage)


def open_index(file: Path, index: Path) -> Lines:
    """Return the lines of a file that has an index. The index stays on the disk."""
    starts = np.load(index / STARTS, mmap_mode="r")
    ids = np.load(index / IDS, mmap_mode="r")
    return Lines(file.open("rb"), starts, ids)


def _make_index(job: Preparation, index: Path) -> None:
    temporary = index.with_name(f"{index.name}.{os.getpid()}")
    temporary.mkdir(mode=0o700)
    try:
        sorter = Sorter(folder=temporary)
        lines = open_lines(
            Path(job.file),
            sorter.add,
            endpoint=job.endpoint,
            max_line_bytes=job.max_line_bytes,
        )
        with closing(lines):
            np.save(temporary / STARTS, lines.starts)
            np.save(temporary / IDS, lines.ids)
        np.save(temporary / ORDER, np.array(sorter.order(), dtype=np.uint64))
        temporary.rename(index)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _results(part: Part) -> tuple[NDArray[np.uint64], TokenUsage]:
    """Return the hashes of the custom_ids in a file with results, and its tokens."""
    hashes, usage, left = array("Q"), TokenUsage(), part.size
    with open(part.path, "rb") as file:
        for text in file:
            left -= len(text)
            if left < 0:
                break
            result = msgspec.json.decode(text, type=_Result)
            hashes.append(id_hash(result.custom_id))
            usage += _usage(result.response)
    return np.array(hashes, dtype=np.uint64), usage


def _usage(response: msgspec.Raw) -> TokenUsage:
    try:
        reported = msgspec.json.decode(response, type=_Answered).body.usage
    except DECODE_ERRORS:  # there is no response, or its body is a text
        return TokenUsage()
    return reported.counted() if reported else TokenUsage()


def main() -> None:
    os.nice(10)  # requests come first
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Preparation)
    sys.stdout.buffer.write(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main()
