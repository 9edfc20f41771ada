"""The process in which clients' grammars are validated and compiled before the engine gets them.

It loads the tokenizer once and forks a process for each grammar, which the kernel ends at its
limits of CPU time, time and memory. So a grammar that takes minutes, or crashes its compiler, costs
nobody else anything. `grammar/check.py` is the side of the replica.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

NICE = 10  # lower priority of whatever compiles: steps of engines come first
WALL_FACTOR = 10  # time limit, as a multiple of the CPU time: other processes compile as well
MEMORY_BYTES = 2 << 30  # address space for one grammar; typical ones take 10 MB
MOST_TEXT = 2000  # characters of an error: the answer fits in one atomic write to the pipe
TRIED_STEPS = 16  # tokens of an answer for which masks are computed
STEP_S = 0.025  # CPU time of the slowest of these masks; every stream waits for it at each step

# Schemas that load the two usual backends, xgrammar and guidance, before the first fork.
USUAL = ({"type": "integer"}, {"type": "integer", "multipleOf": 2})

KILLED = {  # by the signal that ended a grammar's process
    signal.SIGPROF: "cpu",
    signal.SIGALRM: "wall",
    signal.SIGABRT: "memory",
    signal.SIGSEGV: "crash",
    signal.SIGKILL: "memory",  # by the kernel
}


class Job(Struct, array_like=True):
    """A grammar to validate and compile. `spec`: fields of StructuredOutputsParams."""

    number: int
    spec: dict[str, Any]


class Verdict(Struct, array_like=True):
    """Result of a job: the backend that the grammar needs, or why it is refused."""

    number: int
    backend: str = ""
    error: str = ""
    limit: str = ""  # that the grammar exceeded: a value of KILLED, or "step"


Compile = Callable[[dict[str, Any]], str]  # the spec of a Job; returns the backend, or raises


def serve(
    jobs: Connection, results: Connection, loaded: Callable[[], Compile], cpu_s: float
) -> None:
    """Compile grammars until `jobs` is closed.

    Args:
        loaded: makes the function that compiles a grammar, in this process.
        cpu_s: CPU time for each grammar.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the replica decides when this process ends
    compile_, running = loaded(), dict[int, int]()  # the jobs' numbers by process id

    ended = _ended_children()
    while True:
        ready = wait([jobs, ended])
        if ended in ready:
            os.read(ended, 4096)
            _reap(running, results)
        if jobs in ready:
            try:
                job = msgspec.msgpack.decode(jobs.recv_bytes(), type=Job)
            except EOFError:
                return
            pid = os.fork()
            if pid == 0:
                _run(job, results, compile_, cpu_s)
            running[pid] = job.number


def _ended_children() -> int:
    """Return the reading end of a pipe that gets a byte whenever a child ends.

    A signal that comes just before a blocking read would not interrupt the read.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler there is no byte
    return reader


def _reap(running: dict[int, int], results: Connection) -> None:
    """Send the verdicts on grammars whose processes were killed."""
    for pid, number in [*running.items()]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del running[pid]
        if os.WIFSIGNALED(status):
            limit = KILLED.get(signal.Signals(os.WTERMSIG(status)), "crash")
            results.send_bytes(msgspec.msgpack.encode(Verdict(number, limit=limit)))


def _run(job: Job, results: Connection, compile_: Compile, cpu_s: float) -> None:
    """Send the verdict on one grammar, in its own process, and end that."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit(cpu_s)
        results.send_bytes(msgspec.msgpack.encode(_verdict(job, compile_)))
    finally:
        os._exit(0)


def _limit(cpu_s: float) -> None:
    """Have the kernel end this process at its limits."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * cpu_s)


def _verdict(job: Job, compile_: Compile) -> Verdict:
    try:
        return Verdict(job.number, backend=compile_(job.spec))
    except SlowStepError:
        return Verdict(job.number, limit="step")
    except MemoryError:
        return Verdict(job.number, limit="memory")
    except Exception as error:  # any of the compilers'
        if "bad_alloc" in str(error):
            return Verdict(job.number, limit="memory")
        return Verdict(job.number, error=(str(error) or repr(error))[:MOST_TEXT])


class SlowStepError(Exception):
    """The mask of one token takes too long."""


def loaded(config: Any) -> Compile:
    """Return what compiles grammars as the engine does. config: its VllmConfig."""
    return Compiler(config).compile


class Compiler:
    """vLLM's backends of structured outputs, as the engine has them. config: a VllmConfig."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        from kvroute.replica.vllm_engine.grammar.backends import Grammars

        self._config = config
        self._manager = StructuredOutputManager(config)
        Grammars.take_over(self._manager)
        for schema in USUAL:
            with suppress(Exception):  # the request that needs this backend gets the error
                self.compile({"json": schema})

    def compile(self, spec: dict[str, Any]) -> str:
        """Return the backend that has compiled the grammar. Any exception: why none has."""
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output.request import StructuredOutputRequest

        wanted = StructuredOutputsParams(**spec)
        params, config = SamplingParams(structured_outputs=wanted), self._config
        params._validate_structured_outputs(
            config.model_config, config.structured_outputs_config, self._manager.tokenizer
        )
        outputs = StructuredOutputRequest(params=wanted)
        request: Any = SimpleNamespace(
            request_id="grammar", sampling_params=params, structured_output_request=outputs
        )
        with ThreadPoolExecutor(1) as self._manager.executor:  # no thread is left to be forked
            self._manager.grammar_init(request)
        grammar = outputs.grammar
        if isinstance(grammar, Exception):
            raise grammar
        self._try(grammar)
        return str(wanted._backend)

    def _try(self, grammar: Any) -> None:
        """Compute masks as the engine does at each step.

        Raises:
            SlowStepError: a mask takes too long.
            ValueError: no answer is allowed; the engine would fail with it.
        """
        backend = self._manager.backend
        assert backend is not None
        mask = backend.allocate_token_bitmask(1)
        for step in range(TRIED_STEPS):
            before_s = time.thread_time()
            grammar.fill_bitmask(mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = bits.nonzero()[0]
            if step == 0 and not len(allowed):
                raise ValueError("no answer can match the grammar, for example since it has no end")
            if len(allowed) and not grammar.is_terminated():
                token = int(allowed[len(allowed) * step // TRIED_STEPS])
                grammar.accept_tokens("grammar", [token])
            if time.thread_time() - before_s > STEP_S:
                raise SlowStepError
            if not len(allowed) or grammar.is_terminated():
                return
