"""The simulated engine: vLLM's scheduling and block accounting, modelled time, and no model."""

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from msgspec.structs import replace

from kvroute.blocks.cache_groups import HOST_GROUPS
from kvroute.contract.adapters import LOAD_S, Residents
from kvroute.contract.generation import Chunk, Emit, EngineDeadError, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.keep import Order, RetentionHint
from kvroute.contract.preparation import prepared
from kvroute.contract.records import EngineFacts, Load, TierFacts
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.engine.kv_events import EventsLost, KVEvent
from kvroute.replica.engine.pins import admit_pin, pin_budget
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.sim_engine import http_response
from kvroute.replica.sim_engine.blocks import BlockPool, Table
from kvroute.replica.sim_engine.copies import Copies
from kvroute.replica.sim_engine.fake_text import StopText, TokenGenerator, Vocabulary, salt
from kvroute.replica.sim_engine.output import Output, TokenLogprob, joined
from kvroute.replica.sim_engine.sampling import Sampling

MAX_WAITING_EVENTS = 100_000  # with more unread events, all are replaced by EventsLost
INSTANT_TOKENS_PER_S = 1e6  # claimed prefill speed of an engine whose prefill takes no time
SHORTEST_SLEEP_S = 0.001  # shorter delays accumulate until they reach this many seconds
LONGEST_LAG_S = 0.05  # at most this many seconds of lost time are caught up


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """An engine's sizes and speed. The default speed is about an 8B model's on one large GPU."""

    model: str = "simulated"  # the model's name in responses
    revision: str = ""
    block_size: int = 32  # number of tokens in a block
    capacity_blocks: int = 4096
    max_model_len: int = 8192  # maximum number of tokens of prompt and answer together
    prefill_tokens_per_s: float = 10_000.0  # speed at a prompt's start; 0: prefill takes no time
    attention_tokens: float = 32768.0  # at this position, prefill of a token takes twice as long
    decode_step_s: float = 0.008  # seconds of every step, in addition to prefill
    decode_per_seq_s: float = 0.00005  # additional seconds of a step for each decoding sequence
    max_running: int = 128  # maximum number of sequences in the batch
    max_batched_tokens: int = 2048  # maximum number of tokens in a step
    stream_interval: int = 1  # number of tokens in each chunk of an answer after the first chunk
    prefix_caching: bool = True
    pin_share: float = 0.3  # maximum share of the KV cache for pins
    host: TierFacts | None = None  # tier in host memory; needs prefix_caching
    adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that can be loaded
    max_loras: int = 4  # maximum number of different adapters in a batch
    max_cpu_loras: int = 16  # maximum number of adapters in memory; at least max_loras
    lora_load_s: float = LOAD_S  # seconds to load an adapter, in which no step runs
    vocabulary: Sequence[int] = range(1000, 1512)  # generated token ids, without a tokenizer


@dataclass(slots=True, eq=False)
class _Job:
    """A request in the engine."""

    request: GenerateRequest
    sampling: Sampling
    max_tokens: int  # maximum number of tokens of each choice
    order: tuple[float, int]  # sort key: time on the engine's clock, then number of arrival
    unfinished: int  # number of choices that have not finished
    cached_tokens: int | None = None  # cached prompt tokens at the first admission
    outputs: asyncio.Queue[Output | None] = field(default_factory=asyncio.Queue)  # None: the end


@dataclass(slots=True, eq=False)
class _RunningChoice:
    """One of a job's sequences, waiting or in the batch."""

    job: _Job
    index: int
    table: Table
    generator: TokenGenerator
    text: StopText
    computed: int = 0  # number of leading tokens whose KV is computed
    generated: int = 0  # number of generated tokens
    unsent: list[Output] = field(default_factory=list)  # outputs of one token each

    @property
    def order(self) -> tuple[float, int, int]:
        """Return the sort key: the smallest is admitted first and preempted last."""
        return (*self.job.order, self.index)

    @property
    def lora(self) -> str:
        return self.job.request.lora

    @property
    def keep(self) -> RetentionHint:
        return self.job.request.keep or RetentionHint()

    @property
    def missing(self) -> int:
        """Return the number of tokens to compute before the next token can be drawn."""
        return len(self.table.token_ids) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.generated > 0 and self.missing == 1


Batch = dict[_RunningChoice, int]  # choice -> number of its tokens that a step computes
ORDER = attrgetter("order")


class SimulatedEngine(Engine):
    """An engine that generates meaningless words."""

    def __init__(self, config: SimulatedConfig, *, tokenizer: str | None = None) -> None:
        """Create an engine.

        Args:
            config: The engine's sizes and speed.
            tokenizer: A folder with a tokenizer.json, from which the words are taken. Without it,
                the words are numbers.
        """
        self.config = config
        self.facts = EngineFacts(
            block_size=config.block_size,
            capacity_blocks=config.capacity_blocks,
            max_model_len=config.max_model_len,
            prefill_tokens_per_s=config.prefill_tokens_per_s or INSTANT_TOKENS_PER_S,
            attention_tokens=config.attention_tokens,
            prefix_caching=config.prefix_caching,
            pin_blocks=pin_budget(
                config.pin_share if config.prefix_caching else 0.0,
                capacity_blocks=config.capacity_blocks,
                block_size=config.block_size,
                max_model_len=config.max_model_len,
            ),
            max_num_seqs=config.max_running,
            step_tokens=config.max_batched_tokens,
            max_cpu_loras=config.max_cpu_loras,
            engine="simulated",
            content_format="string",
            host=config.host,
        )
        self._vocabulary = (
            Vocabulary.of_tokenizer(tokenizer)
            if tokenizer
            else Vocabulary.of_numbers(config.vocabulary)
        )
        self.members = (0,) if config.host is None else (0, HOST_GROUPS)
        self._pool = BlockPool(
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
        self._adapters = Residents(self.facts.max_cpu_loras)
        self._pins: dict[str, Table] = {}
        self._host_pins: dict[str, int] = {}
        self._jobs: set[_Job] = set()
        self._arrivals = count()
        self._waiting: list[_RunningChoice] = []  # sorted by `order`
        self._running: list[_RunningChoice] = []  # in the order of admission
        self._reloads = Copies[
            _RunningChoice
        ]()  # admitted choices that wait for copies from host memory
        self._events: list[KVEvent] = []
        self._has_events = asyncio.Event()
        self._has_work = asyncio.Event()
        self._pace = _Pace()
        self._scheduler: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def pins(self) -> Mapping[str, int]:
        return {name: len(table.blocks) for name, table in self._pins.items()}

    @property
    def host_pins(self) -> Mapping[str, int]:
        return self._host_pins

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
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
        """Generate tokens without an HTTP response: for warm-ups, pins and canaries."""
        sampling = Sampling(max_tokens=request.max_tokens, temperature=0.0)
        async with aclosing(self._outputs(request, sampling)) as outputs:
            async for output in outputs:
                is_last = output.finish_reason is not None
                emit(Chunk(output.token_ids, output.cached_tokens, is_last))

    async def _outputs(
        self, request: GenerateRequest, sampling: Sampling
    ) -> AsyncGenerator[Output, None]:
        """Yield an output for each delta that another engine has generated, then new outputs.

        Raises:
            ValueError: This engine can never run the request.
        """
        prepared()
        job = self._job(request, sampling)
        for output in self._repeated(job):
            yield output
        async with aclosing(self._stream(job)) as outputs:
            async for output in outputs:
                yield output

    def _job(self, request: GenerateRequest, sampling: Sampling) -> _Job:
        """Return a job for the request. Raises ValueError if this engine can never run it."""
        if request.pin:
            admit_pin(request, self)
        if request.lora and request.lora not in self.config.adapters:
            names = ", ".join(sorted(self.config.adapters))
            raise ValueError(f"this replica has no LoRA adapter {request.lora!r}; it has {names}")
        prompt_tokens = len(request.prompt_ids)
        longest = self.config.max_model_len - 1
        if not 1 <= prompt_tokens <= longest:
            raise ValueError(f"the prompt has {prompt_tokens} tokens; send 1 to {longest} tokens")
        max_tokens = min(sampling.max_tokens, self.config.max_model_len - prompt_tokens)
        # The last token's KV is never computed.
        blocks = -(-(prompt_tokens + max_tokens - 1) // self.config.block_size)
        if blocks > self.config.capacity_blocks:
            raise ValueError(
                f"prompt and answer need {blocks} KV blocks, but the engine has only "
                f"{self.config.capacity_blocks}; send a shorter prompt or a smaller max_tokens"
            )
        order = asyncio.get_running_loop().time() + request.order_s, next(self._arrivals)
        return _Job(request, sampling, max_tokens, order, unfinished=sampling.n)

    def _repeated(self, job: _Job) -> Iterator[Output]:
        """Yield the outputs that another engine has generated already."""
        call, answered = job.request.call, iter(job.request.answered_ids.tolist())
        choice = self._new_choice(job, 0)
        for tokens in call.deltas if call else ():
            yield joined([self._output(choice, next(answered)) for _ in range(tokens)])

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
            len(self._running),
            len(self._waiting) + len(self._reloads),
            self._pool.used_blocks,
            tuple(self._adapters.names),
            self.config.lora_load_s,
        )

    async def check(self) -> None:
        has_ended = self._scheduler is not None and self._scheduler.done()
        if self._is_closed or has_ended:
            raise EngineDeadError("the simulated engine has stopped") from self._failure

    async def unpin(self, name: str) -> None:
        if table := self._pins.pop(name, None):
            self._pool.free(table)
        if self._host_pins.pop(name, None):
            self._pool.unpin_in_host(name)

    async def end_session(self, session: int) -> None:
        for job in self._jobs:  # blocks of running requests are evicted first, too
            if job.request.keep and job.request.keep.session == session:
                job.request = replace(job.request, keep=RetentionHint(Order.ENDED, session))
        self._pool.end_session(session)

    async def emit_held(self) -> None:
        self._pool.emit_held()
        self._publish()

    async def reset_prefix_cache(self) -> bool:
        if self._running or self._reloads:
            return False
        for name in {*self.pins, *self.host_pins}:
            await self.unpin(name)
        is_cleared = self._pool.reset()
        self._publish()
        return is_cleared

    async def close(self) -> None:
        """Stop the engine; open streams end with EngineDeadError."""
        self._is_closed = True
        self._has_events.set()
        if self._scheduler is not None:
            self._scheduler.cancel()
            with suppress(asyncio.CancelledError):
                await self._scheduler

    async def _stream(self, job: _Job) -> AsyncGenerator[Output, None]:
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
            self._abort(job)

    def _submit(self, job: _Job) -> None:
        if self._scheduler is None:
            self._scheduler = asyncio.create_task(self._run())
            self._scheduler.add_done_callback(self._end_streams)
        self._jobs.add(job)
        self._queue(self._choice(job, 0))
        self._has_work.set()

    def _queue(self, choice: _RunningChoice) -> None:
        insort(self._waiting, choice, key=ORDER)

    def _end_streams(self, scheduler: asyncio.Task[None]) -> None:
        self._failure = None if scheduler.cancelled() else scheduler.exception()
        for job in self._jobs:
            job.outputs.put_nowait(None)

    def _choice(self, job: _Job, index: int) -> _RunningChoice:
        """Return a choice that continues where another engine has stopped."""
        choice = self._new_choice(job, index)
        for token_id in job.request.answered_ids.tolist():
            self._output(choice, token_id)  # already delivered; a stop string may begin in it
        return choice

    def _new_choice(self, job: _Job, index: int) -> _RunningChoice:
        request, sampling = job.request, job.sampling
        return _RunningChoice(
            job,
            index,
            self._pool.table(request.token_ids, request.scope),
            TokenGenerator(self._vocabulary, request.token_ids, salt=salt(sampling, index)),
            StopText(sampling.stop),
        )

    def _abort(self, job: _Job) -> None:
        """Remove the job from the engine."""
        if not job.unfinished:
            return
        job.unfinished = 0
        first = bisect_left(self._waiting, (*job.order, 0), key=ORDER)
        end = bisect_left(self._waiting, (*job.order, job.sampling.n), lo=first, key=ORDER)
        del self._waiting[first:end]
        for choice in [choice for choice in self._running if choice.job is job]:
            self._leave(choice, choice.keep if choice.generated else None)
        for choice in [choice for choice in self._reloads if choice.job is job]:
            self._reloads.drop(choice)
            self._pool.drop_reload(choice.table)

    def _leave(self, choice: _RunningChoice, keep: RetentionHint | None = None) -> None:
        """Remove a choice from the batch; `keep` is its blocks' retention if it has ended."""
        self._running.remove(choice)
        self._pool.free(choice.table, keep)

    async def _run(self) -> None:
        self._pace.restart()
        while True:
            if not (self._running or self._waiting or self._reloads):
                self._has_work.clear()
                await self._has_work.wait()
                self._pace.restart()
            self._end_reloads()
            batch = self._schedule()
            if batch or not self._reloads:
                await self._pace.spend(self._loading_s(batch) + self._step_s(batch))
            else:
                await self._wait_for_reload()
            self._publish()
            self._deliver(batch)
            if self.config.host is not None:
                self._publish()  # computed blocks have been stored in host memory

    async def _wait_for_reload(self) -> None:
        """Wait until the first copy from host memory has ended, or until a request arrives."""
        self._has_work.clear()
        left_s = self._reloads.next_end_s - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._has_work.wait()
        self._pace.restart()

    def _end_reloads(self) -> None:
        """Add choices whose copies from host memory have ended to the batch."""
        while self._reloads and self._reloads.next_end_s <= asyncio.get_running_loop().time():
            choice = self._reloads.pop()
            self._pool.end_reload(choice.table)
            choice.computed = choice.table.cached * self.config.block_size
            self._running.append(choice)

    def _schedule(self) -> Batch:
        """Return the next step; the blocks that it fills are held and cached now, as in vLLM."""
        running = len(self._running)
        batch, budget = self._continue_running(self.config.max_batched_tokens)
        if len(self._running) == running:  # after a preemption no request is admitted
            batch |= self._admit_waiting(budget)
        return batch

    def _continue_running(self, budget: int) -> tuple[Batch, int]:
        """Divide the token budget among running choices in the order of admission.

        If there are too few free blocks, choices that are last in order are preempted. All choices
        except the last admitted are decoding, so a long prefill gets the rest of the budget.

        Returns:
            The batch, and the rest of the budget.
        """
        batch: Batch = {}
        while budget and len(batch) < len(self._running):
            choice = self._running[len(batch)]
            tokens = min(choice.missing, budget)
            while not self._pool.extend(choice.table, choice.computed + tokens):
                victim = self._preempt_latest()
                budget += batch.pop(victim, 0)
                if victim is choice:
                    return batch, budget
            batch[choice] = tokens
            budget -= tokens
        return batch, budget

    def _preempt_latest(self) -> _RunningChoice:
        victim = max(self._running, key=ORDER)
        self._pool.forget(victim.table, victim.computed)
        self._leave(victim)
        victim.computed = 0
        self._queue(victim)
        return victim

    def _admit_waiting(self, budget: int) -> Batch:
        batch: Batch = {}
        while budget and len(self._running) + len(self._reloads) < self.config.max_running:
            choice = self._next_waiting()
            if choice is None:
                break
            hit_blocks = self._pool.admit(choice.table)
            if hit_blocks is None:
                break
            self._waiting.remove(choice)
            choice.computed = hit_blocks * self.config.block_size
            reloaded = self._reload(choice)
            if choice.job.cached_tokens is None:
                choice.job.cached_tokens = choice.computed + reloaded
            if reloaded:
                continue
            self._running.append(choice)
            tokens = min(choice.missing, budget)
            self._pool.extend(choice.table, choice.computed + tokens)
            batch[choice] = tokens
            budget -= tokens
        return batch

    def _reload(self, choice: _RunningChoice) -> int:
        """Copy blocks after the choice's hits from host memory, if this is faster than computing.

        Returns the number of tokens of these blocks.
        """
        blocks = self._pool.hits_in_host(choice.table)
        if not blocks or self.config.host is None:
            return 0
        copy_s, tokens = self.config.host.reload_s(blocks), blocks * self.config.block_size
        if copy_s >= self._prefill.seconds(choice.computed, choice.computed + tokens):
            return 0
        self._pool.begin_reload(choice.table, blocks)
        self._reloads.begin(choice, copy_s, asyncio.get_running_loop().time())
        return tokens

    def _next_waiting(self) -> _RunningChoice | None:
        """Return the first waiting choice that can be admitted.

        Its adapter must have a place in the batch. If its blocks are just being copied for another
        choice, it waits until both can share the blocks.
        """
        loras = {choice.lora for choice in (*self._running, *self._reloads) if choice.lora}
        is_full = len(loras) >= self.config.max_loras
        for choice in self._waiting:
            has_place = not (is_full and choice.lora and choice.lora not in loras)
            if has_place and not self._pool.is_reloading(choice.table):
                return choice
        return None

    def _loading_s(self, batch: Batch) -> float:
        """Load the batch's adapters, and return the time that this takes."""
        loras = {choice.lora for choice in batch if choice.lora}
        return self.config.lora_load_s * sum(map(self._adapters.use, loras))

    def _step_s(self, batch: Batch) -> float:
        prefill_s = 0.0
        decoding = 0
        for choice, tokens in batch.items():
            if choice.is_decoding:
                decoding += 1
            else:
                prefill_s += self._prefill.seconds(choice.computed, choice.computed + tokens)
        return prefill_s + self.config.decode_step_s + self.config.decode_per_seq_s * decoding

    def _publish(self) -> None:
        self._events += self._pool.drain()
        if len(self._events) > MAX_WAITING_EVENTS:
            self._events = [EventsLost()]
        if self._events:
            self._has_events.set()

    def _deliver(self, batch: Batch) -> None:
        for choice, tokens in batch.items():
            if not choice.job.unfinished:
                continue  # aborted while the step ran
            choice.computed += tokens
            self._pool.write_through(choice.table, choice.computed)
            if not choice.missing:
                self._generate_token(choice)

    def _generate_token(self, choice: _RunningChoice) -> None:
        """Draw the choice's next token, and deliver it if a chunk is complete."""
        job = choice.job
        token_id = choice.generator.next_token()
        choice.table.token_ids.append(token_id)
        output = self._output(choice, token_id)
        choice.unsent.append(output)
        is_due = len(choice.unsent) == self.config.stream_interval
        if is_due or choice.generated == 1 or output.finish_reason:
            job.outputs.put_nowait(joined(choice.unsent))
            choice.unsent = []
        if choice.index == 0 and choice.generated == 1:
            self._queue_siblings(job)
        if output.finish_reason:
            job.unfinished -= 1
            if job.request.pin:
                self._pin(job.request, choice.table)
            self._leave(choice, choice.keep)

    def _pin(self, request: GenerateRequest, table: Table) -> None:
        blocks = len(request.prompt_ids) // self.config.block_size
        if request.is_host_pin:
            self._pool.pin_in_host(request.pin, table, blocks)
            self._host_pins[request.pin] = blocks
            return
        replaced = self._pins.get(request.pin)
        self._pins[request.pin] = self._pool.share(table, blocks)
        if replaced:
            self._pool.free(replaced)

    def _output(self, choice: _RunningChoice, token_id: int) -> Output:
        """Add a token to the choice, and return its output."""
        choice.generated += 1
        text, finish_reason = self._text(choice, token_id)
        return Output(
            choice.index,
            text,
            (token_id,),
            choice.job.cached_tokens or 0,
            self._logprobs(choice.job, token_id),
            finish_reason,
        )

    def _text(self, choice: _RunningChoice, token_id: int) -> tuple[str, str | None]:
        """Return the text to send after this token, and the finish reason if it is the last."""
        text = self._vocabulary.words[token_id]
        if choice.generated > choice.job.sampling.min_tokens:
            text, is_stopped = choice.text.add(text)
            if is_stopped:
                return text, "stop"
        if choice.generated == choice.job.max_tokens:
            return text + choice.text.rest(), "length"
        return text, None

    def _logprobs(self, job: _Job, token_id: int) -> tuple[TokenLogprob, ...]:
        alternatives = job.sampling.logprobs
        if alternatives is None:
            return ()
        return (self._vocabulary.logprob(token_id, alternatives=alternatives),)

    def _queue_siblings(self, job: _Job) -> None:
        """Queue the job's other choices, which find the prompt in the cache."""
        for index in range(1, job.sampling.n):
            self._queue(self._choice(job, index))


class _Pace:
    """Keeps modelled time: steps have the right mean duration although sleeps are inexact."""

    def __init__(self) -> None:
        self._ends_at_s = 0.0  # end of the last step, on the event loop's clock

    def restart(self) -> None:
        """Let the next step begin now."""
        self._ends_at_s = asyncio.get_running_loop().time()

    async def spend(self, step_s: float) -> None:
        """Wait until the step ends; time lost by long sleeps and computations is subtracted."""
        now_s = asyncio.get_running_loop().time()
        self._ends_at_s = max(self._ends_at_s + step_s, now_s - LONGEST_LAG_S)
        left_s = self._ends_at_s - now_s
        await asyncio.sleep(left_s if left_s >= SHORTEST_SLEEP_S else 0)
