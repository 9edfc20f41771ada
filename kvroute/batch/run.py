"""Sends the lines of a batch to a cluster and writes the answers.

The number of open requests follows the cluster: it grows while requests start at once, and shrinks
while they wait in the cluster's queue. In balance, half of the requests wait for a moment, so the
cluster always has something to do and nearly nothing waits for long.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from kvroute.batch.lines import BatchLine, Lines
from kvroute.batch.results import Results

START_OPEN = 8  # open requests at the start
QUEUED_HEADER = "x-kvroute-queued-s"  # seconds that the request waited in the queue
# Statuses that a later try may change: no place in the queue, or no replica at the moment.
TRY_AGAIN = frozenset({408, 429, 502, 503, 504})
MAX_TRIES = 20  # answers with these statuses after which a line counts as failed
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # pause before the next try; it doubles with each try
SYNC_INTERVAL_S = 1.0  # seconds between two waits until everything written is on the disk


@dataclass(slots=True)
class Progress:
    """How far a batch is, in this run."""

    total: int  # lines of the batch
    done: int = 0  # answered lines, with those of earlier runs
    failed: int = 0  # lines of this run without a good answer
    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of prompt_tokens that came from a cache
    answer_tokens: int = 0
    open: int = 0  # requests without an answer
    away: str = ""  # why the cluster does not answer at the moment; empty: it answers


class _Usage(msgspec.Struct):
    """The token counts of an answer, by OpenAI's and Anthropic's names."""

    class Details(msgspec.Struct):
        cached_tokens: int | None = None

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class RefusedError(Exception):
    """The cluster does not accept the API key, so it would refuse each line."""


class Runner:
    """Runs one batch."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        lines: Lines,
        order: Sequence[int],
        results: Results,
        *,
        max_open: int,
    ) -> None:
        """Create a runner.

        Args:
            client: has the cluster's URL, and the headers of all requests.
            lines: the batch's input.
            order: indexes of the lines in the order to send them.
            results: where answers are written.
            max_open: upper bound of the open requests.
        """
        self._client = client
        self._lines = lines
        self._waiting = array("Q", (index for index in order if not results.is_done[index]))
        self._waiting.reverse()  # the next line is the last one, which is removed in no time
        self._results = results
        self._max_open = max_open
        self._window = float(min(START_OPEN, max_open))  # requests that may be open
        self.progress = Progress(len(lines), done=len(lines) - len(self._waiting))

    async def run(self, report: Callable[[Progress], None]) -> None:
        """Send all lines that have no answer yet; call `report` after each answer.

        Raises:
            RefusedError: the API key is missing or not valid.
            OSError: the results cannot be written.
        """
        running: set[asyncio.Task[None]] = set()
        synced_s = time.monotonic()
        try:
            while self._waiting or running:
                while self._waiting and len(running) < int(self._window):
                    line = self._lines.read(self._waiting.pop())
                    running.add(asyncio.create_task(self._answer(line)))
                self.progress.open = len(running)
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if errors := [*filter(None, [task.exception() for task in done])]:
                    raise errors[0]
                report(self.progress)
                if time.monotonic() - synced_s > SYNC_INTERVAL_S:
                    await asyncio.to_thread(self._results.sync)
                    synced_s = time.monotonic()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._results.sync()

    async def _answer(self, line: BatchLine) -> None:
        """Send a line until it has a final answer, and write the answer."""
        pause_s, tries = FIRST_PAUSE_S, 0
        body = {name: value for name, value in line.body.items() if name != "stream"}
        content = msgspec.json.encode(body)
        while True:
            try:
                response = await self._client.post(line.url, content=content)
            except httpx.TransportError as error:
                self.progress.away = str(error) or type(error).__name__
                self._window = max(1.0, self._window / 2)
            else:
                self.progress.away = ""
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise RefusedError(response.text)
                tries += 1
                if response.status_code not in TRY_AGAIN or tries == MAX_TRIES:
                    self._write(line, response)
                    return
                self._window = max(1.0, self._window - 1)
                pause_s = max(pause_s, _retry_after_s(response))
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def _write(self, line: BatchLine, response: httpx.Response) -> None:
        is_queued = float(response.headers.get(QUEUED_HEADER) or 0) > 0
        change = -1 if is_queued else 1
        self._window = min(float(self._max_open), max(1.0, self._window + change))
        self._results.write(
            line.custom_id,
            status=response.status_code,
            request_id=response.headers.get("x-request-id", ""),
            body=response.content,
        )
        self.progress.done += 1
        self.progress.failed += response.is_error
        self._count_tokens(response.content)

    def _count_tokens(self, body: bytes) -> None:
        try:
            usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # an answer without token counts
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Usage.Details()
        cached = details.cached_tokens or usage.cache_read_input_tokens or 0
        prompt = usage.prompt_tokens or usage.input_tokens or 0
        if usage.cache_read_input_tokens:  # Anthropic's input_tokens exclude the cached ones
            prompt += usage.cache_read_input_tokens
        self.progress.prompt_tokens += prompt
        self.progress.cached_tokens += cached
        self.progress.answer_tokens += usage.completion_tokens or usage.output_tokens or 0


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after") or 0)
    except ValueError:  # a date
        return 0.0
