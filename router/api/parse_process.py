"""A child process that parses large bodies, one after another.

The router starts it as `python -m kvroute.router.api.parse_process`. Each message on its pipes
starts with the length in 8 bytes. For each job, the router sends two messages, a pickled function
and a body, and the process answers with one message, the pickled result. The process has a memory
limit, and exits when its standard input is closed.
"""

import asyncio
import pickle
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from kvroute.router.api.errors import ApiError

# Limit of the process's address space. Parsing a body of 16 MB can take almost 1 GB.
MEMORY_BYTES = 2 << 30
MAX_JOBS = 100  # bodies after which the process is replaced, to free its memory
LENGTH_BYTES = 8  # size of the length at the start of each message
PIECE_BYTES = 1 << 18  # bytes written to the pipe at once, to avoid a copy of the whole body

Result = TypeVar("Result")


class ParseProcess:
    """Starts the child process for the first body, and sends bodies to it.

    Use it in one event loop only.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._jobs = 0  # number of bodies sent to the current process
        self._lock = asyncio.Lock()  # held during one job

    async def run(self, parse: Callable[[bytes], Result], raw: bytearray) -> Result:
        """Call `parse` with the body in the child process, and return the result.

        Args:
            parse: a function that can be imported.

        Raises:
            ApiError: `parse` raised it, or the process died while it parsed the body.
        """
        async with self._lock:
            try:
                result: Result | ApiError = await self._exchange(pickle.dumps(parse), raw)
            except (OSError, asyncio.IncompleteReadError):
                await self._end()
                raise _too_complex() from None
            except BaseException:  # the client disconnected, and the process still parses its body
                await self._end()
                raise
            if self._jobs >= MAX_JOBS:
                await self._end()
        if isinstance(result, ApiError):
            raise result
        return result

    async def close(self) -> None:
        """Kill the process."""
        async with self._lock:
            await self._end()

    async def _exchange(self, *job: bytes | bytearray) -> Any:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self._jobs += 1
        for part in job:
            process.stdin.write(len(part).to_bytes(LENGTH_BYTES))
            for start in range(0, len(part), PIECE_BYTES):
                process.stdin.write(memoryview(part)[start : start + PIECE_BYTES])
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
        "the body takes too much memory to parse; send a smaller body, or fewer values in it",
        code="request_too_large",
    )


def main(jobs: BinaryIO, results: BinaryIO) -> None:
    """Parse bodies until the input ends. This is the main function of the child process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while job := _read_message(jobs):
        result = pickle.dumps(_outcome(pickle.loads(job), _read_message(jobs)))
        results.write(len(result).to_bytes(LENGTH_BYTES))
        results.write(result)
        results.flush()


def _read_message(jobs: BinaryIO) -> bytes:
    """Return the next message, or b"" at the end of the input."""
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
