"""The process that validates and compiles clients' grammars before the engine gets them.

It loads the tokenizer once and forks a process for each grammar. The kernel ends the forked process
when it exceeds a limit on CPU time, elapsed time or memory. So a grammar that takes minutes, or
that crashes its compiler, does not affect other requests. `grammar/check.py` is the replica's side.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

NICE = 10  # niceness of processes and threads that compile, so that engines get the CPU first
# Limit on elapsed time, as a multiple of the limit on CPU time. It is large because several
# processes compile at the same time.
WALL_FACTOR = 10
MEMORY_BYTES = 2 << 30  # limit on additional address space for a grammar; typically 10 MB are used
# Maximum number of characters of an error. Several processes write verdicts to one pipe, so each
# verdict must fit into one atomic write.
MAX_TEXT = 2000
# Number of tokens of a test answer. For each token, the mask is computed: which tokens the grammar
# allows next.
TRIED_STEPS = 16
# Limit on the CPU seconds for each of these masks, and for all of them in the mean. In the engine,
# all streams wait for each mask. A mask that takes longer is computed again, since each can take
# long once on a busy machine.
STEP_S = 0.025

# Schemas that are compiled before the first fork, to load the backends that compile grammars:
# xgrammar for the first schema, and guidance for the second one.
PRELOADED_SCHEMAS = ({"type": "integer"}, {"type": "integer", "multipleOf": 2})

NO_ANSWER = "no answer can match the grammar; for example, one of its rules may never end"
NO_NEXT_TOKEN = (
    "an answer that matches the grammar cannot go on after its first tokens, because the model has "
    "no token for the next character; leave out control characters"
)

KILLED = {  # signal that ended a grammar's process -> the limit that the grammar exceeded
    signal.SIGPROF: "cpu",
    signal.SIGALRM: "wall",
    signal.SIGABRT: "memory",
    signal.SIGSEGV: "crash",
    signal.SIGKILL: "memory",  # the kernel sends it when the machine has no memory left
}


class GrammarJob(Struct, array_like=True):
    """A grammar to validate and compile."""

    number: int  # identifies the job in its verdict
    spec: dict[str, Any]  # fields of StructuredOutputsParams


class Verdict(Struct, array_like=True):
    """The result of a job: the backend for the grammar, or the reason to reject the grammar."""

    number: int  # the job's number
    backend: str = ""
    error: str = ""  # message of the compiler; empty if there was no error
    limit: str = ""  # limit that the grammar exceeded (a value of KILLED, or "step"); or empty


# A function that compiles the spec of a GrammarJob, and returns the backend's name. It raises an
# exception of any type if the spec cannot be compiled.
Compile = Callable[[dict[str, Any]], str]


def serve(jobs: Connection, results: Connection, load: Callable[[], Compile], cpu_s: float) -> None:
    """Compile grammars until `jobs` is closed.

    Args:
        jobs: The pipe from which encoded jobs are read.
        results: The pipe to which encoded verdicts are written.
        load: Returns the function that compiles a grammar; called once, in this process.
        cpu_s: The limit of CPU seconds for each grammar.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the replica decides when this process ends
    compile_ = load()
    running = dict[int, int]()  # process id -> job's number
    child_ended = _pipe_of_ended_children()
    while True:
        ready = wait([jobs, child_ended])
        if child_ended in ready:
            os.read(child_ended, 4096)
            _reap(running, results)
        if jobs in ready:
            try:
                job = msgspec.msgpack.decode(jobs.recv_bytes(), type=GrammarJob)
            except EOFError:
                return
            pid = os.fork()
            if pid == 0:
                _run(job, results, compile_, cpu_s)
            running[pid] = job.number


def _pipe_of_ended_children() -> int:
    """Return the reading end of a pipe that gets a byte whenever a child process ends.

    A handler of SIGCHLD is not enough: a signal that arrives just before `wait` blocks does not
    interrupt `wait`.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, no byte is written
    return reader


def _reap(running: dict[int, int], results: Connection) -> None:
    """Send a verdict for each grammar's process that was killed, and forget ended processes."""
    for pid, number in [*running.items()]:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if not ended_pid:
            continue
        del running[pid]
        if os.WIFSIGNALED(status):
            limit = KILLED.get(signal.Signals(os.WTERMSIG(status)), "crash")
            results.send_bytes(msgspec.msgpack.encode(Verdict(number, limit=limit)))


def _run(job: GrammarJob, results: Connection, compile_: Compile, cpu_s: float) -> None:
    """Send the verdict on one grammar, then end this process, which was forked for it."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit(cpu_s)
        results.send_bytes(msgspec.msgpack.encode(_verdict(job, compile_)))
    finally:
        os._exit(0)


def _limit(cpu_s: float) -> None:
    """Make the kernel end this process when it exceeds a limit."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    max_bytes = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * cpu_s)


def _verdict(job: GrammarJob, compile_: Compile) -> Verdict:
    try:
        return Verdict(job.number, backend=compile_(job.spec))
    except SlowStepError:
        return Verdict(job.number, limit="step")
    except MemoryError:
        return Verdict(job.number, limit="memory")
    except Exception as error:  # each compiler has its own exceptions
        if "bad_alloc" in str(error):
            return Verdict(job.number, limit="memory")
        return Verdict(job.number, error=(str(error) or repr(error))[:MAX_TEXT])


class SlowStepError(Exception):
    """Computing the mask of one token takes too long."""


def load_compiler(config: Any) -> Compile:
    """Return a function that compiles grammars as an engine with this VllmConfig would."""
    return Compiler(config).compile


class Compiler:
    """Compiles grammars with the backends that an engine with this VllmConfig uses."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        from kvroute.replica.vllm_engine.grammar.backends import Grammars
        from kvroute.replica.vllm_engine.optional_parts import GRAMMARS, is_on

        self._config = config
        self._manager = StructuredOutputManager(config)
        if is_on(GRAMMARS):
            Grammars.take_over(self._manager)
        for schema in PRELOADED_SCHEMAS:
            with suppress(Exception):  # the first request that needs this backend gets the error
                self.compile({"json": schema})

    def compile(self, spec: dict[str, Any]) -> str:
        """Compile a grammar and return the backend's name.

        Raises:
            Exception: The grammar cannot be compiled; any type of exception.
        """
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output.request import StructuredOutputRequest

        outputs = StructuredOutputsParams(**spec)
        params, config = SamplingParams(structured_outputs=outputs), self._config
        params._validate_structured_outputs(
            config.model_config, config.structured_outputs_config, self._manager.tokenizer
        )
        structured = StructuredOutputRequest(params=outputs)
        request: Any = SimpleNamespace(
            request_id="grammar", sampling_params=params, structured_output_request=structured
        )
        # The executor is closed at once, because this process must have no other thread when it
        # forks.
        with ThreadPoolExecutor(1) as self._manager.executor:
            self._manager.grammar_init(request)
        grammar = structured.grammar
        if isinstance(grammar, Exception):
            raise grammar
        assert self._manager.backend is not None
        try_out(grammar, self._manager.backend.allocate_token_bitmask(1))
        return str(outputs._backend)


def try_out(grammar: Any, mask: Any) -> None:
    """Generate a test answer, and compute the mask before each token as the engine does.

    Args:
        grammar: A compiled grammar of vLLM.
        mask: A tensor of int32 of the shape (1, words), which gets the masks.

    Raises:
        SlowStepError: A mask takes too long.
        ValueError: The grammar allows no answer, or an answer cannot go on. The engine would fail
            with this grammar.
    """

    def fill() -> None:
        grammar.fill_bitmask(mask, 0)

    total_s = 0.0
    for step in range(TRIED_STEPS):
        first_s = _cpu_s_of(fill)
        mask_s = first_s if first_s <= STEP_S else min(first_s, _cpu_s_of(fill))
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        allowed = bits.nonzero()[0]
        if not len(allowed) and not grammar.is_terminated():
            raise ValueError(NO_ANSWER if step == 0 else NO_NEXT_TOKEN)
        accept_s = 0.0
        if len(allowed) and not grammar.is_terminated():
            tokens = [int(allowed[len(allowed) * step // TRIED_STEPS])]
            accept_s = _cpu_s_of(partial(grammar.accept_tokens, "grammar", tokens))
        total_s += first_s + accept_s
        if mask_s + accept_s > STEP_S or total_s > TRIED_STEPS * STEP_S:
            raise SlowStepError
        if not len(allowed) or grammar.is_terminated():
            return


def _cpu_s_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds that this thread takes for a call."""
    before_s = time.thread_time()
    call()
    return time.thread_time() - before_s
