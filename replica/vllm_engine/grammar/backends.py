"""Compiles each request's grammar in the engine, with the backend that vLLM chose for it.

A backend is a library that compiles grammars, such as xgrammar.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from kvroute.replica.vllm_engine.compat import grammar_start
from kvroute.replica.vllm_engine.grammar.process import NICE

# Key in the extra_args of SamplingParams. The value is the number of tokens at the prompt's end
# that another engine has generated as the beginning of the answer.
ANSWERED = "kvroute_answered"


def _yield_cores() -> None:
    """Lower the priority of this thread and of the threads that it starts.

    The engine's steps then get the CPU first. This works because Linux has a priority for each
    thread, and because backends release Python's global lock while they compile.
    """
    os.nice(NICE)


class Grammars(StructuredOutputManager):
    """Compiles each request's grammar with the backend that vLLM has chosen for the request.

    vLLM itself uses the backend of the first request for all later requests. If the first request
    needs the backend guidance, all later strict tool calls fail.

    If another engine has generated the beginning of an answer, the grammar continues after it.
    """

    _lock: threading.Lock
    _backends: dict[str, StructuredOutputBackend]  # name -> backend

    @classmethod
    def take_over(cls, manager: StructuredOutputManager) -> None:
        """Change vLLM's manager to an object of this class."""
        manager.__class__ = cls
        vars(manager).update(_lock=threading.Lock(), _backends={})
        if executor := vars(manager).get("executor"):  # without a tokenizer, there is none
            executor.shutdown()
            manager.executor = ThreadPoolExecutor(executor._max_workers, initializer=_yield_cores)

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        with self._lock:
            self.backend = self._backends.get(name)  # if it is None, vLLM creates the backend
            # This starts _create_grammar in a thread, which waits for the lock.
            super().grammar_init(request)
            self._backends[name] = self.backend

    def clear_backend(self) -> None:
        self.backend = None
        super().clear_backend()  # ends the threads that use the backends
        for backend in self._backends.values():
            backend.destroy()
        self._backends.clear()

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar; vLLM calls this in a thread.

        This method does not use `self.backend`, which may already be the backend of a later
        request.
        """
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
        """Advance the grammar over the tokens that another engine has generated.

        Reasoning tokens are skipped, because the grammar does not apply to them.
        """
        ids, structured = list(request.prompt_token_ids), request.structured_output_request
        prompt, delivered = ids[:-answered], ids[-answered:]
        reasoner = self._get_reasoner(request)
        if reasoner is not None and structured.reasoning_ended is None:
            structured.reasoning_ended = reasoner.is_reasoning_end(prompt)
        start = grammar_start(self, request, delivered)
        if start > len(delivered):
            return  # the reasoning has not ended
        structured.reasoning_ended = True
        if not grammar.accept_tokens(request.request_id, delivered[start:]):
            raise ValueError("the grammar does not allow the tokens that were generated so far")
