"""Why an engine died, in vLLM's own words.

vLLM itself only says to look at the stack trace above. That is in the streams that its processes
inherit from this one, and under Ray these are files.
"""

import os
import re
import stat

from pydantic import ValidationError

from kvroute.contract.generation import CannotRunError

STREAMS = (1, 2)  # standard output and error
MOST_READ = 262_144  # bytes, of the end of each
MOST_SAID = 600  # characters
DEATH = re.compile(r"encountered a fatal error|failed to start")  # vLLM's title of such a trace
ERROR = re.compile(
    r"^\((?:EngineCore|Worker)[^)]*\).*?\] ((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)
ELSEWHERE = re.compile(r"[Ss]ee (?:the )?(?:stack trace|root cause)")

# Errors of a start that another start would only repeat.
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


class LastWords:
    """Of the engine that is started next."""

    def __init__(self) -> None:
        self._starts = {stream: _size(stream) for stream in STREAMS}

    def said(self) -> str:
        """The error that ended the engine, in one line; empty if it is not known."""
        return last_words("\n".join(_end(stream, start) for stream, start in self._starts.items()))

    def of_start(self, error: Exception) -> Exception:
        """What to raise for an error of the engine's start."""
        words = self.said() or described(error)
        kind = words.partition(":")[0].rpartition(".")[2]
        return CannotRunError(words) if kind in FINAL else RuntimeError(words)


def last_words(log: str) -> str:
    """The last error in the stack traces of dead processes."""
    death = DEATH.search(log)
    found = ERROR.findall(log, death.start()) if death else []
    said = [words for words in found if not ELSEWHERE.search(words)]
    return said[-1][:MOST_SAID] if said else ""


def described(error: Exception) -> str:
    """The error in one line, its kind first."""
    message = str(error)
    if isinstance(error, ValidationError):
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    line = next(iter(message.strip().splitlines()), "no reason given")
    return f"{type(error).__name__}: {line}"[:MOST_SAID]


def _size(stream: int) -> int:
    """Of the file that the stream is; 0 if it is none."""
    try:
        status = os.fstat(stream)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _end(stream: int, start: int) -> str:
    """What came after the start."""
    size = _size(stream)
    if size <= start:
        return ""
    try:
        with open(f"/proc/self/fd/{stream}", "rb") as file:
            file.seek(max(start, size - MOST_READ))
            return file.read(MOST_READ).decode(errors="replace")
    except OSError:
        return ""  # not Linux
