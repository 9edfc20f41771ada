"""The simulated engine: it schedules requests and caches blocks as vLLM does, but runs no model.

Each step waits for as long as a model of an engine's speed predicts. sim_scheduler.py decides which
requests are in the batch, and blocks.py manages their blocks.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import count

from msgspec.structs import replace

from kvroute.blocks.cache_groups import HOST_GROUPS
from kvroute.contract.adapters import Adapter
from kvroute.contract.generation import Chunk, Emit, EngineDeadError, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.keep import Order, RetentionHint
from kvroute.contract.preparation import prepared
from kvroute.contract.records import Load
from kvroute.features.engine_feature import NO_ENGINE_FEATURES, EngineFeatures
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.engine.kv_events import EventsLost, KVEvent
from kvroute.replica.engine.modelled_adapters import ModelledAdapters
from kvroute.replica.engine.pins import admit_pin
from kvroute.replica.engine.protocol import AdapterCheck, Engine, any_files
from kvroute.replica.fabric.pull import (
    FEATURE,
    Exchanging,
    Pull,
    PullResult,
    PullSettings,
    carried_in,
    pull_key,
)
from kvroute.replica.fabric.pull import OFF as NO_PULL
from kvroute.replica.sim_engine import http_response
from kvroute.replica.sim_engine.blocks import Table
from kvroute.replica.sim_engine.choice_output import ChoiceOutput, TokenLogprob, joined
from kvroute.replica.sim_engine.config import SimulatedConfig, facts_of
from kvroute.replica.sim_engine.fake_text import StopText, TokenGenerator, Vocabulary, salt
from kvroute.replica.sim_engine.pulls import PullingPool, SimulatedPulls, reporting
from kvroute.replica.sim_engine.sampling import Sampling
from kvroute.replica.sim_engine.sequences import Job, RunningChoice, max_tokens_of
from kvroute.replica.sim_engine.sim_scheduler import SimulatedScheduler
from kvroute.replica.sim_engine.step_pace import StepPace
from kvroute.settings.replica import ReplicaSettings

# Maximum number of events that were not read yet. If there are more, EventsLost replaces them all.
MAX_WAITING_EVENTS = 100_000


class SimulatedEngine(Engine):
    """One rank of an engine that generates meaningless words."""

    def __init__(
        self,
        config: SimulatedConfig,
        *,
        tokenizer: str | None = None,
        features: EngineFeatures = NO_ENGINE_FEATURES,
    ) -> None:
        """Create an engine.

        Args:
            config: The engine's sizes and speed.
            tokenizer: A folder with a tokenizer.json. The engine generates words of this tokenizer.
                None: the engine generates numbers as words.
            features: What features do in the engine.
        """
        self.config = config
        self.facts = facts_of(config)
        self.can_add_adapters = config.can_add_adapters
        self._vocabulary = (
            Vocabulary.of_tokenizer(tokenizer)
            if tokenizer
            else Vocabulary.of_numbers(config.vocabulary)
        )
        self.group_entries = (0,) if config.host is None else (0, HOST_GROUPS)
        self._pool = PullingPool(
            model=config.model,
            revision=config.revision,
            block_size=config.block_size,
            capacity_blocks=config.capacity_blocks,
            prefix_caching=config.prefix_caching,
            host=config.host,
        )
        self._prefill = PrefillModel(
            config.prefill_tokens_per_s or math.inf, config.attention_tokens
        )
        self._adapters = ModelledAdapters(
            config.adapters,
            in_memory=config.max_cpu_loras,
            load_s=config.lora_load_s,
            can_add=config.can_add_adapters,
        )
        self._pins: dict[str, Table] = {}
        self._host_pins: dict[str, int] = {}
        self._jobs: set[Job] = set()
        self._arrivals = count()
        self._scheduler = SimulatedScheduler(config, self._pool, self._prefill, features)
        self._events: list[KVEvent] = []
        self._has_events = asyncio.Event()
        self._has_work = asyncio.Event()
        self._pulls: SimulatedPulls | None = None  # None: the engine does not pull
        self._pace = StepPace()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def pins(self) -> Mapping[str, int]:
        return {name: len(table.blocks) for name, table in self._pins.items()}

    @property
    def host_pins(self) -> Mapping[str, int]:
        return self._host_pins

    def listen(self, settings: ReplicaSettings, host: str, secret: bytes) -> None:
        """Serve the blocks in host memory to other engines, and pull from them, if pulls are on.

        Args:
            settings: The replica's settings.
            host: The address on which to listen.
            secret: The replica's secret.

        Raises:
            OSError: No port is free.
        """
        is_on = settings.in_replica(FEATURE, PullSettings).pull == "on"
        if is_on and self.config.host is not None:
            key, tier = pull_key(secret), self.config.host
            self._pulls = SimulatedPulls(self._pool, tier, settings, host, key, self._publish)

    def exchanging(self) -> Exchanging:
        return self._pulls.exchanging if self._pulls else Exchanging()

    async def pull(self, request: GenerateRequest) -> PullResult:
        if self._pulls is None or (pull := carried_in(request.features, Pull)) is None:
            return NO_PULL
        return await self._pulls.pull(request.using_all_blocks(), pull)

    def admit_adapter(self, adapter: Adapter, check: AdapterCheck = any_files) -> None:
        self._adapters.admit(adapter)

    async def load_adapter(self, name: str) -> None:
        await self._adapters.load(name)

    async def drop_adapter(self, name: str) -> None:
        self._adapters.forget(name)

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        if self._pulls is not None and (pull := carried_in(request.features, Pull)) is not None:
            prepared()
            emit = reporting(emit, await self._pulls.pull(request, pull))
        if request.call is None:
            await self._generate_raw(request, emit)
            return
        await http_response.respond(
            request,
            request.call,
            self._outputs,
            emit,
            model=self.config.model,
            max_model_len=self.config.max_model_len,
        )

    async def _generate_raw(self, request: GenerateRequest, emit: Emit) -> None:
        """Generate tokens without an HTTP response: for requests that no client has sent."""
        sampling = Sampling(max_tokens=request.max_tokens, temperature=0.0)
        async with aclosing(self._outputs(request, sampling)) as outputs:
            async for output in outputs:
                is_last = output.finish_reason is not None
                emit(Chunk(output.token_ids, output.cached_tokens, is_last))

    async def _outputs(
        self, request: GenerateRequest, sampling: Sampling
    ) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield the outputs that another engine has generated, if any, and then new outputs.

        Raises:
            ValueError: This engine can never run the request.
            PinRefusedError: The request's pin exceeds the limit.
        """
        prepared()
        job = self._job(request, sampling)
        for output in self._outputs_of_other_engine(job):
            yield output
        async with aclosing(self._stream(job)) as outputs:
            async for output in outputs:
                yield output

    def _job(self, request: GenerateRequest, sampling: Sampling) -> Job:
        """Return a job for the request.

        Raises:
            ValueError: This engine can never run the request.
            PinRefusedError: The request's pin exceeds the limit.
        """
        if request.pin:
            admit_pin(request, self)
        self._adapters.check(request.variant)
        max_tokens = max_tokens_of(request, sampling, self.config)
        order = asyncio.get_running_loop().time() + request.order_s, next(self._arrivals)
        return Job(request, sampling, max_tokens, order, unfinished=sampling.n)

    def _outputs_of_other_engine(self, job: Job) -> Iterator[ChoiceOutput]:
        """Yield the outputs that another engine has generated.

        Each item of the call's `deltas` is the number of tokens in one of these outputs.
        """
        call, answered_ids = job.request.call, iter(job.request.answered_ids.tolist())
        choice = self._new_choice(job, 0)
        for tokens in call.deltas if call else ():
            yield joined([self._output(choice, next(answered_ids)) for _ in range(tokens)])

    async def render(self, call: HttpCall) -> Rendered:
        return http_response.rendered(call)

    async def events(self) -> AsyncGenerator[list[KVEvent], None]:
        while not self._is_closed:
            await self._has_events.wait()
            self._has_events.clear()
            batch, self._events = self._events, []
            if batch:
                yield batch

    def load(self) -> Load:
        return Load(
            self._scheduler.admitted - len(self._scheduler.reloads),
            len(self._scheduler.waiting) + len(self._scheduler.reloads),
            self._pool.used_blocks,
            tuple(self._adapters.names),
            self.config.lora_load_s,
        )

    async def unstarted(self, request_ids: Sequence[str]) -> list[str]:
        waiting = {
            choice.job.request.request_id
            for choice in self._scheduler.waiting
            if choice.index == 0 and choice.generated == choice.job.request.answered
        }
        return [id_ for id_ in request_ids if id_ in waiting]

    async def check(self) -> None:
        has_ended = self._task is not None and self._task.done()
        if self._is_closed or has_ended:
            raise EngineDeadError("the simulated engine has stopped") from self._failure

    async def unpin(self, name: str) -> None:
        if table := self._pins.pop(name, None):
            self._pool.free(table)
        if self._host_pins.pop(name, None):
            self._pool.pin_in_host(name, ())

    async def end_session(self, session: int) -> None:
        for job in self._jobs:  # once these requests end, their blocks are evicted first, too
            if job.request.keep and job.request.keep.session == session:
                job.request = replace(job.request, keep=RetentionHint(Order.ENDED, session))
        self._pool.end_session(session)

    async def emit_held(self) -> None:
        self._pool.emit_held()
        self._publish()

    async def reset_prefix_cache(self) -> bool:
        if self._pulls is not None:
            self._pulls.abort()
        if self._scheduler.admitted:
            return False
        for name in {*self.pins, *self.host_pins}:
            await self.unpin(name)
        is_cleared = self._pool.reset()
        self._publish()
        return is_cleared

    async def close(self) -> None:
        """Stop the engine. Open streams end with EngineDeadError."""
        self._is_closed = True
        self._has_events.set()
        if self._pulls is not None:
            await self._pulls.close()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _stream(self, job: Job) -> AsyncGenerator[ChoiceOutput, None]:
        await self.check()
        self._submit(job)
        open_choices = job.unfinished
        try:
            while open_choices:
                output = await job.outputs.get()
                if output is None:
                    raise EngineDeadError("the simulated engine has stopped") from self._failure
                open_choices -= output.finish_reason is not None
                yield output
        finally:
            self._jobs.discard(job)
            self._scheduler.abort(job)

    def _submit(self, job: Job) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._end_streams)
        self._jobs.add(job)
        self._scheduler.add(self._choice(job, 0))
        self._has_work.set()

    def _end_streams(self, task: asyncio.Task[None]) -> None:
        self._failure = None if task.cancelled() else task.exception()
        for job in self._jobs:
            job.outputs.put_nowait(None)

    def _choice(self, job: Job, index: int) -> RunningChoice:
        """Return a choice of the job that continues after the tokens of another engine, if any."""
        choice = self._new_choice(job, index)
        for token_id in job.request.answered_ids.tolist():
            self._output(choice, token_id)  # updates the detection of stop strings
        return choice

    def _new_choice(self, job: Job, index: int) -> RunningChoice:
        request, sampling = job.request, job.sampling
        return RunningChoice(
            job,
            index,
            self._pool.table(request.token_ids, request.scope),
            TokenGenerator(self._vocabulary, request.token_ids, salt=salt(sampling, index)),
            StopText(sampling.stop),
        )

    async def _run(self) -> None:
        self._pace.restart()
        while True:
            if not self._scheduler.has_work:
                self._has_work.clear()
                await self._has_work.wait()
                self._pace.restart()
            now_s = asyncio.get_running_loop().time()
            self._scheduler.end_reloads(now_s)
            prompts = self._scheduler.schedule(now_s)
            decoding = [*self._scheduler.decoding]
            if prompts or decoding or not self._scheduler.reloads:
                loading_s = self._adapters.loading_s(each.lora for each in (*prompts, *decoding))
                step_s = self._scheduler.step_s(prompts)
                await self._pace.spend(loading_s + step_s)
                self._scheduler.record_step(step_s, prompts)
            else:
                await self._wait_for_reload()
            self._publish()
            self._scheduler.advance()
            self._deliver(prompts, decoding)
            if self.config.host is not None:
                self._publish()  # again, because _deliver has copied blocks to host memory

    async def _wait_for_reload(self) -> None:
        """Wait until the next copy from host memory has ended, or until a request arrives."""
        self._has_work.clear()
        left_s = self._scheduler.reloads.next_end_s - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._has_work.wait()
        self._pace.restart()

    def _publish(self) -> None:
        self._events += self._pool.drain()
        if len(self._events) > MAX_WAITING_EVENTS:
            self._events = [EventsLost()]
        if self._events:
            self._has_events.set()

    def _deliver(
        self, prompts: Mapping[RunningChoice, int], decoding: Sequence[RunningChoice]
    ) -> None:
        for choice, tokens in prompts.items():
            if not choice.job.unfinished:
                continue  # aborted while the step ran
            choice.computed += tokens
            self._pool.write_through(choice.table, choice.computed)
            if not choice.missing:
                self._generate_token(choice)
        for choice in decoding:
            if choice.job.unfinished:
                self._pool.write_through(choice.table, self._scheduler.computed(choice))
                self._generate_token(choice)

    def _generate_token(self, choice: RunningChoice) -> None:
        """Draw the choice's next token, and deliver a chunk if the chunk is complete."""
        job = choice.job
        token_id = choice.generator.next_token()
        choice.table.token_ids.append(token_id)
        if choice in self._scheduler.prefilling:
            self._scheduler.decode(choice)
        output = self._output(choice, token_id)
        choice.unsent.append(output)
        is_due = len(choice.unsent) == self.config.stream_interval
        if is_due or choice.generated == 1 or output.finish_reason:
            job.outputs.put_nowait(joined(choice.unsent))
            choice.unsent = []
        if choice.index == 0 and choice.generated == 1:
            for index in range(1, job.sampling.n):  # they find the prompt in the cache
                self._scheduler.add(self._choice(job, index))
        if output.finish_reason:
            job.unfinished -= 1
            if job.request.pin:
                self._pin(job.request, choice.table)
            self._scheduler.remove(choice, choice.hint)

    def _pin(self, request: GenerateRequest, table: Table) -> None:
        blocks = len(request.prompt_ids) // self.config.block_size
        if request.is_host_pin:
            self._pool.pin_in_host(request.pin, table.hashes[:blocks])
            self._host_pins[request.pin] = blocks
            return
        replaced = self._pins.get(request.pin)
        self._pins[request.pin] = self._pool.share(table, blocks)
        if replaced:
            self._pool.free(replaced)

    def _output(self, choice: RunningChoice, token_id: int) -> ChoiceOutput:
        """Add a token to the choice, and return its output."""
        choice.generated += 1
        text, finish_reason = self._text(choice, token_id)
        return ChoiceOutput(
            choice.index,
            text,
            (token_id,),
            choice.job.cached_tokens or 0,
            self._logprobs(choice.job, token_id),
            finish_reason,
        )

    def _text(self, choice: RunningChoice, token_id: int) -> tuple[str, str | None]:
        """Return the text to send for a token, and the finish reason if the answer ends here."""
        text = self._vocabulary.words[token_id]
        if choice.generated > choice.job.sampling.min_tokens:
            text, is_stopped = choice.text.add(text)
            if is_stopped:
                return text, "stop"
        if choice.generated == choice.job.max_tokens:
            return text + choice.text.held_text(), "length"
        return text, None

    def _logprobs(self, job: Job, token_id: int) -> tuple[TokenLogprob, ...]:
        alternatives = job.sampling.logprobs
        if alternatives is None:
            return ()
        return (self._vocabulary.logprob(token_id, alternatives=alternatives),)
