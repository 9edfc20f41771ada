"""Large bodies are parsed in a process of their own, one after another.

`python -m kvroute.router.api.parse_process` is that process. Both sides send a length of 8 bytes
and then so many bytes: a pickled function and a body; a pickled result. The process has a memory
limit, and ends when its standard input does.
"""

import asyncio
import pickle
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from kvroute.router.api.errors import ApiError

MEMORY_BYTES = 2 << 30  # address space of the process; a body of 16 MB can take most of 1 GB
JOBS = 100  # of one process; then a new one starts, so that memory goes back to the system
LENGTH_BYTES = 8
PIECE_BYTES = 1 << 18  # that wait for the process; the body itself is not copied

Result = TypeVar("Result")


class ParseProcess:
    """Starts with the first job. Use it from one event loop."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._jobs = 0  # of this process
        self._turn = asyncio.Lock()

    async def run(self, parse: Callable[[bytes], Result], raw: bytearray) -> Result:
        """What the function returns for the body; it must be importable. ApiError if it raises
        that, or if the body ends the process."""
        async with self._turn:
            try:
                result: Result | ApiError = await self._exchange(pickle.dumps(parse), raw)
            except (OSError, asyncio.IncompleteReadError):
                await self._end()
                raise _too_complex() from None
            except BaseException:  # the client has left; what it sent is still being parsed
                await self._end()
                raise
            if self._jobs >= JOBS:
                await self._end()
        if isinstance(result, ApiError):
            raise result
        return result

    async def close(self) -> None:
        """Ends the process."""
        async with self._turn:
            await self._end()

    async def _exchange(self, *job: bytes | bytearray) -> Any:
        """What the job returns, or ApiError."""
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self._jobs += 1
        for part in job:
            process.stdin.write(len(part).to_bytes(LENGTH_BYTES))
            for begin in range(0, len(part), PIECE_BYTES):
                process.stdin.write(memoryview(part)[begin : begin + PIECE_BYTES])
                await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
        return pickle.loads(await process.stdout.readexactly(size))

    async def _start(self) -> Process:
        command = [sys.executable, "-m", __name__]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        self._jobs = 0
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


def _too_complex() -> ApiError:
    return ApiError(
        413,
        "the body takes too much memory to parse; send less, or fewer values",
        code="request_too_large",
    )


def main(jobs: BinaryIO, results: BinaryIO) -> None:
    """Parses bodies until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while job := _part(jobs):
        result = pickle.dumps(_outcome(pickle.loads(job), _part(jobs)))
        results.write(len(result).to_bytes(LENGTH_BYTES))
        results.write(result)
        results.flush()


def _part(jobs: BinaryIO) -> bytes:
    """Empty at the end of the input."""
    return jobs.read(int.from_bytes(jobs.read(LENGTH_BYTES)))


def _outcome(parse: Callable[[bytes], object], raw: bytes) -> object:
    try:
        return parse(raw)
    except ApiError as error:
        return error
    except MemoryError:
        return _too_complex()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
