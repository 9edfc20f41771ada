"""Sends the lines of a batch to a cluster and writes the answers.

The number of open requests follows the speed of the cluster (window.py), and is at most what the
cluster accepts (places.py).
"""

import asyncio
import math
import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import msgspec

from kvroute.batch.line_body import BadLineError, body_of
from kvroute.batch.lines import CustomId, SentLine
from kvroute.batch.places import Places
from kvroute.batch.usage import TokenUsage, usage_of
from kvroute.batch.window import Window

QUEUED_HEADER = "x-kvroute-queued-s"  # seconds that the request waited in the queue
REQUEST_ID = "x-request-id"  # header with the id of a request
# Statuses after which a line is sent again, since the cause may be temporary, such as no ready
# replica.
TRY_AGAIN = frozenset({408, 502, 503, 504})
MAX_TRIES = 20  # a line fails after this many answers with a status in TRY_AGAIN
REPORT_S = 1.0  # longest time between two reports of the progress
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # pause before the next try; it doubles with each try
SYNC_INTERVAL_S = 1.0  # seconds between two calls of AnswerSink.sync


@dataclass(slots=True)
class RunProgress:
    """How far a batch is."""

    total: int  # lines of the batch
    done: int = 0  # answered lines, with those of earlier runs
    failed: int = 0  # lines of this run without a good answer
    usage: TokenUsage = field(default_factory=TokenUsage)  # tokens of this run
    open: int = 0  # requests without an answer
    away: str = ""  # why the cluster does not answer at the moment; empty: it answers
    refusal: str = ""  # the latest answer with status 429 if no line was accepted after it


class AnswerSink(Protocol):
    """Where answers are written."""

    def write(self, custom_id: CustomId, *, status: int, request_id: str, body: bytes) -> None:
        """Write an answer. Raises OSError."""

    async def sync(self) -> None:
        """Wait until everything written is on the disk. Raises OSError."""


class RefusedKeyError(Exception):
    """The cluster does not accept the API key, so it would refuse each line."""


class Runner:
    """Runs one batch."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        read: Callable[[int], SentLine],
        order: Sequence[int],
        results: AnswerSink,
        *,
        total: int,
        window: Window,
        max_open: Callable[[], int] | None = None,
        headers: Callable[[], Mapping[str, str]] = dict,
        max_tries: int | None = MAX_TRIES,
        threads: Executor | None = None,
        downloads: bool = False,
    ) -> None:
        """Create a runner.

        Args:
            client: has the cluster's URL, and the headers of all requests.
            read: returns a line by its index; called in threads.
            order: indexes of the lines without an answer, in the order to send them.
            results: where answers are written.
            total: number of all lines.
            window: how many requests may be open; it learns from each answer.
            max_open: returns how many of them this batch may have, if other batches use the same
                window; None: all.
            headers: returns further headers of the next request.
            max_tries: see MAX_TRIES; None: a line is sent again without a limit.
            threads: reads the lines; None: asyncio's own threads.
            downloads: whether recordings that lines name are downloaded.
        """
        self._client = client
        self._read = read
        self._waiting = array("Q", order)
        self._waiting.reverse()  # the next line comes last, where `pop` is fast
        self._sent = set[int]()  # lines that were sent and have no answer yet
        self._running = set[asyncio.Task[None]]()
        self._changed = asyncio.Event()  # is set when a task has ended
        self._error: BaseException | None = None  # the first error of a task
        self._results = results
        self._window = window
        self._max_open = max_open or (lambda: window.size)
        self._headers = headers
        self._max_tries = max_tries
        self._places = Places()
        self._threads = threads
        self._downloads = downloads
        self.progress = RunProgress(total, done=total - len(self._waiting))

    @property
    def left(self) -> "array[int]":
        """Return the lines without an answer."""
        return self._waiting + array("Q", self._sent)

    async def run(self, report: Callable[[RunProgress], None]) -> None:
        """Send all lines that have no answer yet.

        Args:
            report: called after each answer, and at least every REPORT_S seconds.

        Raises:
            RefusedKeyError: the API key is missing or not valid.
            OSError: the lines cannot be read, or the results cannot be written.
        """
        synced_s = time.monotonic()
        try:
            while self._waiting or self._running:
                self._start()
                wait_s = self._places.wait_s(time.monotonic())
                wait_s = REPORT_S if wait_s is None else min(wait_s, REPORT_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), wait_s)
                self._changed.clear()
                if self._error:
                    raise self._error
                report(self.progress)
                if time.monotonic() - synced_s > SYNC_INTERVAL_S:
                    await self._results.sync()
                    synced_s = time.monotonic()
        finally:
            running = [*self._running]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._results.sync()

    def _start(self) -> None:
        """Send as many lines as may be open."""
        self._places.try_more(time.monotonic(), enough=self._max_open())
        while self._waiting and len(self._running) < min(self._max_open(), self._places.count):
            index = self._waiting.pop()
            self._sent.add(index)
            task = asyncio.create_task(self._answer(index))
            self._running.add(task)
            task.add_done_callback(self._ended)
        self.progress.open = len(self._running)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = self._error or error
        self._changed.set()

    async def _answer(self, index: int) -> None:
        """Send a line until it has a final answer, and write the answer.

        If the cluster refuses the line (429), it waits again, and other lines may take its place.
        """
        line = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, index)
        try:
            response = await self._final_answer(line)
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS and _may_retry(response):
                self._refused(index, response)
            else:
                self._write(line, response)
                self._places.answered(len(self._sent) - 1)
                self.progress.refusal = ""
        except (OSError, RefusedKeyError):
            raise
        except Exception as error:  # whatever is wrong with a line must not end the others
            text = f"{type(error).__name__}: {error}"
            status, kind = 500, "server_error"
            if isinstance(error, BadLineError):
                status, kind, text = 400, "invalid_request_error", str(error)
            body = msgspec.json.encode({"error": {"message": text, "type": kind}})
            self._results.write(line.custom_id, status=status, request_id="", body=body)
            self.progress.done += 1
            self.progress.failed += 1
        self._sent.discard(index)

    async def _final_answer(self, line: SentLine) -> httpx.Response:
        """Send a line until it has a final answer, or the cluster refuses it (429)."""
        pause_s, tries = FIRST_PAUSE_S, 0
        content, kind = await body_of(line, downloads=self._downloads)
        id_ = uuid.uuid4().hex
        while True:
            headers = {REQUEST_ID: id_, **self._headers(), "content-type": kind}
            sent_s = time.monotonic()
            try:
                response = await self._client.post(line.url, content=content, headers=headers)
            except httpx.TransportError as error:
                self.progress.away = str(error) or type(error).__name__
                self._window.lost()
            else:
                self.progress.away = ""
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise RefusedKeyError(response.text)
                tries += 1
                is_temporary = response.status_code in TRY_AGAIN and tries != self._max_tries
                if not (is_temporary and _may_retry(response)):
                    if response.is_success:  # an error in a line says nothing about the cluster
                        now_s, waited_s = time.monotonic(), _seconds(response, QUEUED_HEADER)
                        self._window.answered(now_s, took_s=now_s - sent_s, waited_s=waited_s)
                    return response
                self._window.lost()
                pause_s = max(pause_s, min(MAX_PAUSE_S, _retry_after_s(response)))
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def _refused(self, index: int, response: httpx.Response) -> None:
        """Let a line that the cluster refused wait again."""
        self._sent.remove(index)
        self._waiting.append(index)
        self.progress.refusal = response.text
        again_s = min(MAX_PAUSE_S, _retry_after_s(response))
        self._places.refused(time.monotonic(), open_lines=len(self._sent), again_s=again_s)

    def _write(self, line: SentLine, response: httpx.Response) -> None:
        self._results.write(
            line.custom_id,
            status=response.status_code,
            request_id=response.headers.get(REQUEST_ID) or response.request.headers[REQUEST_ID],
            body=response.content,
        )
        self.progress.done += 1
        self.progress.failed += response.is_error
        self.progress.usage += usage_of(response.content)


def _may_retry(response: httpx.Response) -> bool:
    """Return whether the cluster allows that the line is sent again."""
    return bool(response.headers.get("x-should-retry") != "false")


def _retry_after_s(response: httpx.Response) -> float:
    return _seconds(response, "retry-after")  # 0 if it is a date


def _seconds(response: httpx.Response, header: str) -> float:
    """Return the number in a header; 0 if there is none, or none that a time can be."""
    try:
        seconds = float(response.headers.get(header) or 0)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
