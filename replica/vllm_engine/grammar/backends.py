"""Compiles each request's grammar in the engine, with the backend that vLLM chose for it."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from kvroute.replica.vllm_engine.compat import grammar_start
from kvroute.replica.vllm_engine.grammar.process import NICE

# Key of a request's extra_args: the number of tokens at the prompt's end that another engine has
# generated as the beginning of the answer.
ANSWERED = "kvroute_answered"


def _yield_cores() -> None:
    """Lower the priority of this thread and of the threads that it starts.

    So the engine's steps come first: Linux has a priority for each thread, and a compiler does not
    hold Python's lock.
    """
    os.nice(NICE)


class Grammars(StructuredOutputManager):
    """Compiles each request's grammar by the backend that vLLM has chosen for the request.

    vLLM itself uses the backend of the first request for all requests. If the schema of that
    request needed guidance, all strict tool calls fail from then on. The grammar of a resumed
    answer starts after the tokens that another engine has generated.
    """

    _lock: threading.Lock
    _backends: dict[str, StructuredOutputBackend]  # name -> backend

    @classmethod
    def take_over(cls, manager: StructuredOutputManager) -> None:
        """Change vLLM's manager to an object of this class."""
        manager.__class__ = cls
        vars(manager).update(_lock=threading.Lock(), _backends={})
        if executor := vars(manager).get("executor"):  # without a tokenizer there is none
            executor.shutdown()
            manager.executor = ThreadPoolExecutor(executor._max_workers, initializer=_yield_cores)

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        with self._lock:  # the thread that compiles the grammar needs the lock, so it waits
            self.backend = self._backends.get(name)  # None: vLLM creates the backend
            super().grammar_init(request)
            self._backends[name] = self.backend

    def clear_backend(self) -> None:
        self.backend = None
        super().clear_backend()  # ends the threads that use the backends
        for backend in self._backends.values():
            backend.destroy()
        self._backends.clear()

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar in a thread.

        Meanwhile, `self.backend` may have become the backend of a later request.
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
        """Advance the grammar over the generated tokens, except reasoning, which has no grammar."""
        ids, wanted = list(request.prompt_token_ids), request.structured_output_request
        prompt, delivered = ids[:-answered], ids[-answered:]
        reasoner = self._get_reasoner(request)
        if reasoner is not None and wanted.reasoning_ended is None:
            wanted.reasoning_ended = reasoner.is_reasoning_end(prompt)
        start = grammar_start(self, request, delivered)
        if start > len(delivered):
            return
        wanted.reasoning_ended = True
        if not grammar.accept_tokens(request.request_id, delivered[start:]):
            raise ValueError("the grammar does not allow the tokens that were generated so far")
