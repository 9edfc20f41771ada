"""Finds the error that ended a vLLM engine in the engine's output.

When an engine dies, the exception in the replica only refers to a stack trace "above". vLLM's
processes write that trace to the output streams that they inherit from the replica. Under Ray,
these streams are files, so the replica can read the trace there.
"""

import os
import re
import stat

from pydantic import ValidationError

from kvroute.contract.generation import CannotRunError

STREAMS = (1, 2)  # file descriptors that are read: standard output and standard error
MAX_READ_BYTES = 262_144  # maximum number of bytes that are read from the end of each stream
MAX_MESSAGE = 600  # maximum number of characters of a message
# Log messages of vLLM before the stack trace of a process that dies.
DEATH = re.compile(r"encountered a fatal error|failed to start")
# The line with the exception, at the end of the stack trace.
ERROR = re.compile(
    r"^\((?:EngineCore|Worker)[^)]*\).*?\] ((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)
# Exceptions whose message only refers to another stack trace.
REFERENCE = re.compile(r"[Ss]ee (?:the )?(?:stack trace|root cause)")

# Types of exceptions at an engine's start that would occur again at the next start.
FINAL = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "ImportError",
        "KeyError",
        "ModuleNotFoundError",
        "NotImplementedError",
        "TypeError",
        "ValidationError",
        "ValueError",
    }
)


class CrashLog:
    """The output of an engine. Create this before the engine starts."""

    def __init__(self) -> None:
        self._starts = {stream: _size(stream) for stream in STREAMS}

    def message(self) -> str:
        """Return the error that ended the engine in one line; empty if the output shows none."""
        return last_error("\n".join(_end(stream, start) for stream, start in self._starts.items()))

    def start_error(self, error: Exception) -> Exception:
        """Return the exception to raise for an error at the engine's start.

        It is a CannotRunError if the error would occur again at the next start.
        """
        message = self.message() or in_one_line(error)
        kind = message.partition(":")[0].rpartition(".")[2]
        return CannotRunError(message) if kind in FINAL else RuntimeError(message)


def last_error(log: str) -> str:
    """Return the last error in the stack traces of vLLM's processes; empty if there is none."""
    death = DEATH.search(log)
    errors = ERROR.findall(log, death.start()) if death else []
    messages = [error for error in errors if not REFERENCE.search(error)]
    return messages[-1][:MAX_MESSAGE] if messages else ""


def in_one_line(error: Exception) -> str:
    """Return the error's type and the first line of its message."""
    message = str(error)
    if isinstance(error, ValidationError):
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    line = next(iter(message.strip().splitlines()), "no reason given")
    return f"{type(error).__name__}: {line}"[:MAX_MESSAGE]


def _size(stream: int) -> int:
    """Return the size of the file that the stream writes to; 0 if it is not a file."""
    try:
        status = os.fstat(stream)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _end(stream: int, start: int) -> str:
    """Return the text after byte `start` of the stream's file."""
    size = _size(stream)
    if size <= start:
        return ""
    try:
        with open(f"/proc/self/fd/{stream}", "rb") as file:
            file.seek(max(start, size - MAX_READ_BYTES))
            return file.read(MAX_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""  # not Linux
