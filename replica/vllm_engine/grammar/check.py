"""Validates and compiles clients' grammars in a separate process before they reach the engine.

vLLM itself validates a grammar on the event loop, and compiles it in the engine's process. For a
large schema, each of these can take minutes, in which all streams of the replica would stop.
"""

import asyncio
import hashlib
import logging
import multiprocessing
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.utils import choice_as_grammar

from kvroute.replica.vllm_engine.grammar.process import (
    MEMORY_BYTES,
    STEP_S,
    WALL_FACTOR,
    GrammarJob,
    Verdict,
    load_compiler,
    serve,
)
from kvroute.replica.vllm_engine.process import fork_server

log = logging.getLogger("kvroute.replica")

# Maximum number of grammars that are compiled at the same time. Each may use MEMORY_BYTES.
PARALLEL = 4
# Maximum number of grammars that wait to be compiled. Each may be as large as a request's body.
MAX_WAITING = 64
# Maximum number of cached verdicts. A verdict contains an error of up to 2,000 characters.
MAX_CACHED = 4096
# Fields of StructuredOutputsParams that determine a grammar.
FIELDS = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
REMEDY = "simplify it: fewer optional properties, alternatives, values or repetitions"


class GrammarCheck:
    """Checks grammars: a separate process compiles each grammar once, and the verdict is cached.

    Use a GrammarCheck from one event loop only.
    """

    def __init__(self, config: Any, cpu_s: float) -> None:
        """Create a check.

        Args:
            config: vLLM's configuration.
            cpu_s: The limit of CPU seconds for a grammar.
        """
        self._config = config
        self._cpu_s = cpu_s
        # Cached verdicts: digest of a grammar -> verdict. The most recently used one is last.
        self._cached: dict[bytes, Verdict] = {}
        # Compilations that are running or waiting: digest of a grammar -> task.
        self._pending: dict[bytes, asyncio.Task[Verdict]] = {}
        # Verdicts that the process has not sent yet: number of a job -> future.
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        self._parallel = asyncio.Semaphore(PARALLEL)
        self._starting = asyncio.Lock()
        self._process: _GrammarProcess | None = None
        self._jobs = 0  # number of jobs since the start

    async def check(self, params: SamplingParams) -> None:
        """Check a request's grammar, if it has one, and set the backend that compiles it.

        Raises:
            VLLMValidationError: The grammar is invalid or exceeds a limit.
            GracefulHTTPError: Too many grammars are waiting.
        """
        outputs = params.structured_outputs
        if outputs is None or outputs.all_constraints_none():
            return
        spec = {name: value for name in FIELDS if (value := getattr(outputs, name)) is not None}
        verdict = await self._verdict(spec)
        if verdict.limit:
            raise VLLMValidationError(_limit_message(verdict.limit, _name(spec), self._cpu_s))
        if verdict.error:
            raise VLLMValidationError(verdict.error)
        _set_backend(outputs, verdict.backend)

    def close(self) -> None:
        """Kill the process that compiles grammars."""
        for task in self._pending.values():
            task.cancel()
        self._end()

    async def _verdict(self, spec: Mapping[str, Any]) -> Verdict:
        digest = hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()
        if cached := self._cached.pop(digest, None):
            self._cached[digest] = cached
            return cached
        task = self._pending.get(digest)
        if task is None:
            if len(self._pending) >= PARALLEL + MAX_WAITING:
                raise GracefulHTTPError(
                    "too many grammars wait to be compiled; try again later",
                    HTTPStatus.TOO_MANY_REQUESTS,
                )
            task = asyncio.create_task(self._compile(digest, dict(spec)), name="grammar")
            self._pending[digest] = task
            task.add_done_callback(lambda _: self._pending.pop(digest, None))
        return await asyncio.shield(task)  # other requests may wait for the same task

    async def _compile(self, digest: bytes, spec: dict[str, Any]) -> Verdict:
        async with self._parallel:
            process = await self._running_process()
            # The number is taken after the waits above, in which other jobs may get numbers.
            self._jobs += 1
            future = asyncio.get_running_loop().create_future()
            self._verdicts[self._jobs] = future
            job = msgspec.msgpack.encode(GrammarJob(self._jobs, spec))
            await asyncio.to_thread(process.send, job)
            verdict: Verdict = await future
        self._cached[digest] = verdict
        if len(self._cached) > MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        return verdict

    async def _running_process(self) -> "_GrammarProcess":
        """Return the process that compiles grammars; start it if it is not running."""
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.to_thread(_GrammarProcess, self._config, self._cpu_s)
                loop, results = asyncio.get_running_loop(), self._process.results
                loop.add_reader(results.fileno(), self._receive, results)
            return self._process

    def _receive(self, results: Connection) -> None:
        """Receive a verdict from the process."""
        try:
            verdict = msgspec.msgpack.decode(results.recv_bytes(), type=Verdict)
        except (EOFError, OSError):
            self._end()
            return
        if (future := self._verdicts.pop(verdict.number, None)) and not future.done():
            future.set_result(verdict)

    def _end(self) -> None:
        """Kill the process.

        Requests that wait for a verdict fail. The next request starts a new process.
        """
        process, self._process = self._process, None
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.results.fileno())
            process.close()
        futures, self._verdicts = self._verdicts, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(
                    GracefulHTTPError(
                        "the process that compiles grammars has ended; try again",
                        HTTPStatus.SERVICE_UNAVAILABLE,
                    )
                )


class _GrammarProcess:
    """The process that compiles grammars, and the pipes to and from it.

    On a machine with GPUs, the start takes some seconds, because the new process imports vLLM.
    """

    def __init__(self, config: Any, cpu_s: float) -> None:
        receiver, self._jobs = multiprocessing.Pipe(duplex=False)
        self.results, sender = multiprocessing.Pipe(duplex=False)
        on_cpu = current_platform.is_cpu()
        context: Any = fork_server.Context() if on_cpu else multiprocessing.get_context("spawn")
        self._process: BaseProcess = context.Process(
            target=serve,
            args=(receiver, sender, partial(load_compiler, config), cpu_s),
            name="grammars",
            daemon=True,
        )
        self._process.start()
        receiver.close()  # the other process uses these ends of the pipes
        sender.close()
        self._sending = threading.Lock()

    def send(self, job: bytes) -> None:
        """Send one job.

        This blocks until the process has read all but the last 64 KiB of the job.
        """
        with self._sending, suppress(OSError):  # if the process has ended, _receive notices it
            self._jobs.send_bytes(job)

    def close(self) -> None:
        self._process.kill()
        self._jobs.close()
        self.results.close()


def _set_backend(outputs: StructuredOutputsParams, backend: str) -> None:
    """Set the fields that vLLM's own validation would set."""
    outputs._backend, outputs._backend_was_auto = backend, True
    if backend == "xgrammar" and outputs.choice:
        outputs.grammar, outputs.choice = choice_as_grammar(outputs.choice), None


def _name(spec: Mapping[str, Any]) -> str:
    return next(name for name in FIELDS if name in spec)


def _limit_message(limit: str, name: str, cpu_s: float) -> str:
    """Return the error message for a grammar that exceeds a limit."""
    exceeded = {
        "cpu": f"takes more than {cpu_s:g} s of CPU time to compile; that is the limit "
        "(--max-compile-s)",
        "wall": f"takes more than {WALL_FACTOR * cpu_s:g} s to compile; that is the limit "
        f"({WALL_FACTOR} times --max-compile-s)",
        "memory": f"takes more than {MEMORY_BYTES >> 20} MB of memory to compile; that is the "
        "limit",
        "step": f"takes more than {STEP_S * 1000:g} ms for each generated token; that is the limit",
        "crash": "crashes the compiler, because it is nested or repeated too deeply",
    }[limit]
    kind = "JSON schema" if name == "json" else name
    return f"the {kind} of the structured output {exceeded}. Please {REMEDY}"


vllm_validate_structured_outputs = SamplingParams._validate_structured_outputs


def validate_unless_checked(self: SamplingParams, *args: Any) -> None:
    """Validate a grammar as vLLM does, unless a GrammarCheck has already validated it."""
    outputs = self.structured_outputs
    if outputs is None or outputs._backend is None:  # no GrammarCheck has set the backend
        vllm_validate_structured_outputs(self, *args)
