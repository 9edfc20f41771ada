"""The engine compiles each request's grammar by the backend that vLLM has chosen for it."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from kvroute.replica.vllm_engine.grammar.process import NICE

ANSWERED = "kvroute_answered"  # in extra_args: how many of the last prompt tokens were answered


def _yield_cores() -> None:
    """Give the engine's steps precedence over this thread and those that it starts: Linux has a
    priority for each thread. A compiler does not hold Python's lock."""
    os.nice(NICE)


class Grammars(StructuredOutputManager):
    """Compiles each request's grammar by the backend that vLLM has chosen for the request.

    vLLM itself keeps the backend of the first request for all requests. If that one's schema needed
    guidance, strict tool calls of everybody fail from then on. A grammar of a resumed answer starts
    behind what another engine has answered.
    """

    _lock: threading.Lock
    _backends: dict[str, StructuredOutputBackend]  # by name

    @classmethod
    def take_over(cls, manager: StructuredOutputManager) -> None:
        """Make vLLM's manager one of this class."""
        manager.__class__ = cls
        vars(manager).update(_lock=threading.Lock(), _backends={})
        if executor := vars(manager).get("executor"):  # without a tokenizer there is none
            executor.shutdown()
            manager.executor = ThreadPoolExecutor(executor._max_workers, initializer=_yield_cores)

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        with self._lock:  # the thread that compiles the grammar waits for it
            self.backend = self._backends.get(name)  # None: vLLM makes it
            super().grammar_init(request)
            self._backends[name] = self.backend

    def clear_backend(self) -> None:
        self.backend = None
        super().clear_backend()  # ends the threads that use them
        for backend in self._backends.values():
            backend.destroy()
        self._backends.clear()

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar, in a thread: `self.backend` may be that of a later request."""
        params = request.sampling_params
        with self._lock:
            backend = self._backends[params.structured_outputs._backend]
        kind, spec = request.structured_output_request.structured_output_key
        grammar = backend.compile_grammar(kind, spec, stop_token_ids=params.all_stop_token_ids)
        answered = (request.sampling_params.extra_args or {}).get(ANSWERED, 0)
        if answered:
            self._advance(grammar, request, answered)
        return grammar

    def _advance(self, grammar: StructuredOutputGrammar, request: Request, answered: int) -> None:
        """Accepts what was answered, except the reasoning before it, which has no grammar."""
        ids, wanted = list(request.prompt_token_ids), request.structured_output_request
        prompt, delivered = ids[:-answered], ids[-answered:]
        reasoner = self._get_reasoner(request)
        if reasoner is not None and wanted.reasoning_ended is None:
            wanted.reasoning_ended = reasoner.is_reasoning_end(prompt)
        bounds = self._get_constraint_bounds(request, delivered, spec_tokens_committed=True)
        if bounds.grammar_start > len(delivered):
            return
        wanted.reasoning_ended = True
        if not grammar.accept_tokens(request.request_id, delivered[bounds.grammar_start :]):
            raise ValueError("the grammar does not allow what was answered so far")
