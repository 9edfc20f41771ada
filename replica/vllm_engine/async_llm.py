"""The Engine interface on vLLM, with one VllmEngine for each data parallel rank."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from kvroute.contract.adapters import Adapter
from kvroute.contract.generation import (
    CannotRunError,
    Chunk,
    Emit,
    EngineDeadError,
    GenerateRequest,
    PinRefusedError,
)
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.contract.records import EngineFacts, Load
from kvroute.replica.engine.kv_events import EventsLost, KVEvent
from kvroute.replica.engine.pins import admit_pin
from kvroute.replica.engine.protocol import AdapterCheck, Engine, any_files
from kvroute.replica.fabric.pull import Exchanging, PullResult
from kvroute.replica.vllm_engine.blocks.cache_salt import cache_salt
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.blocks.events import EventBatch, event_of
from kvroute.replica.vllm_engine.blocks.retention_hints import hint_args
from kvroute.replica.vllm_engine.core.continued import ContinuingLLM
from kvroute.replica.vllm_engine.core.lora import RankAdapters
from kvroute.replica.vllm_engine.core.priority import priority_of
from kvroute.replica.vllm_engine.core.rank_core import RankCore
from kvroute.replica.vllm_engine.core.scheduler import HOST_PIN, PIN
from kvroute.replica.vllm_engine.core.step_limits import step_args
from kvroute.replica.vllm_engine.core.subscription import Subscription
from kvroute.replica.vllm_engine.engine_args import front_args
from kvroute.replica.vllm_engine.facts import facts_of
from kvroute.replica.vllm_engine.host.args import check_tier
from kvroute.replica.vllm_engine.host.pull_orders import pull_args
from kvroute.replica.vllm_engine.http.app import HttpApp
from kvroute.replica.vllm_engine.http.chosen_parsers import choose_reasoning_parser
from kvroute.replica.vllm_engine.http.sampling_checks import check_takes_tokens
from kvroute.replica.vllm_engine.optional_parts import CONTINUATION, is_on
from kvroute.replica.vllm_engine.process import fork_server
from kvroute.replica.vllm_engine.process.cpu_affinity import Cores
from kvroute.replica.vllm_engine.process.crash_log import CrashLog
from kvroute.replica.vllm_engine.process.engine_health import EngineHealth
from kvroute.replica.vllm_engine.pulls import EnginePulls, weights_of
from kvroute.replica.vllm_engine.replaced import BEFORE_START, BEFORE_START_ON_CPU, apply
from kvroute.replica.vllm_engine.smoke_test import run_smoke_test
from kvroute.replica.vllm_engine.vllm_args import engine_args
from kvroute.settings.replica import ReplicaSettings

log = logging.getLogger("kvroute.replica")

# Environment variable with vLLM's own limit on the time to compile a regular expression, in
# seconds.
REGEX_TIMEOUT = "VLLM_REGEX_COMPILATION_TIMEOUT_S"


class VllmEngine(Engine):
    """One rank of an AsyncLLM, with its prefix cache, KV events and statistics.

    All ranks share the AsyncLLM and the HTTP application.
    """

    def __init__(
        self,
        core: RankCore,
        facts: EngineFacts,
        group_entries: Sequence[int | None],
        subscription: Subscription,
        stats: "_Stats",
        adapters: RankAdapters,
        http: HttpApp,
        crash_log: CrashLog,
        pulls: EnginePulls,
    ) -> None:
        self.facts = facts
        self.can_add_adapters = adapters.can_add
        self.group_entries = group_entries
        self._core = core
        self._llm = core.llm
        self._subscription = subscription
        self._stats = stats
        self._adapters = adapters
        self._http = http
        self._crash_log = crash_log
        self._pulls = pulls
        self._pins: dict[str, int] = {}
        self._host_pins: dict[str, int] = {}
        # The engine's child processes. The object of rank 0 watches them for all ranks.
        self._processes = [] if core.rank else psutil.Process().children(recursive=True)
        self._unfinished = 0  # number of requests that are running or waiting
        self._health = EngineHealth()

    @classmethod
    async def start(
        cls,
        settings: ReplicaSettings,
        model: str,
        cores: Cores,
        *,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        unfit: str = "",
    ) -> "list[VllmEngine]":
        """Start vLLM, and return one object for each rank.

        Args:
            settings: The replica's settings.
            model: A folder, or a name on the Hugging Face Hub.
            cores: The CPU cores for the engine's processes.
            host: The address on which a rank may listen for other replicas.
            secret: The replica's secret; empty: no rank listens.
            unfit: Which optional parts are off because they do not fit the installed vLLM, and why.

        Raises:
            CannotRunError: vLLM rejects the model, or crashes while it generates the first tokens.
        """
        crash_log, ranks = CrashLog(), range(settings.data_parallel_size)
        weights = weights_of(settings, model)
        subscriptions, stats = [Subscription() for _ in ranks], [_Stats() for _ in ranks]
        try:
            args = engine_args(settings, model, subscriptions)
            front = front_args(settings.engine_args)
            choose_reasoning_parser(args, front.get("chat_template"))
            llm = await asyncio.to_thread(_load, args, stats, cores)
            if weights:
                weights.start()
            for subscription in subscriptions:
                await subscription.connect(has_publisher=settings.prefix_caching)
            rank_cores = [RankCore(llm, rank) for rank in ranks]
            divisions = [await _begin(core, settings) for core in rank_cores]
            can_add = settings.lora_root is not None
            adapters = [
                RankAdapters(core, settings.adapters, can_add=can_add) for core in rank_cores
            ]
            http = await HttpApp.start(
                llm,
                front,
                adapters,
                max_compile_s=settings.max_compile_s,
                merges_system=settings.inline_system == "merge",
            )
            for core in rank_cores:
                await run_smoke_test(core, crash_log)
            pulls = [
                await EnginePulls.start(core, settings, host, secret, weights)
                for core in rank_cores
            ]
            await asyncio.to_thread(_freeze_objects)
        except BaseException as error:
            if weights:
                weights.stop()
            for subscription in subscriptions:
                subscription.close()
            if isinstance(error, CannotRunError) or not isinstance(error, Exception):
                raise
            raise crash_log.start_error(error) from error
        return [
            cls(
                core,
                replace(
                    facts_of(
                        llm,
                        settings,
                        division,
                        pulls[core.rank].opened,
                        content_format=http.content_format,
                        tool_parser=http.tool_parser,
                    ),
                    unfit=unfit,
                ),
                division.group_entries,
                subscriptions[core.rank],
                stats[core.rank],
                adapters[core.rank],
                http,
                crash_log,
                pulls[core.rank],
            )
            for core, division in zip(rank_cores, divisions, strict=True)
        ]

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        self._unfinished += 1
        try:
            with self._pulls.reported(request, emit) as reporting:
                if request.call is None:
                    await self._generate_raw(request, reporting)
                else:
                    await self._http.respond(request, reporting)
        except (EngineDeadError, VllmDeadError) as error:
            raise self._dead(error) from error
        finally:
            self._unfinished -= 1

    def admit_adapter(self, adapter: Adapter, check: AdapterCheck = any_files) -> None:
        if not self.can_add_adapters:
            super().admit_adapter(adapter)
        self._adapters.admit(adapter, check)

    async def load_adapter(self, name: str) -> None:
        await self._adapters.ready(name)

    async def drop_adapter(self, name: str) -> None:
        await self._adapters.drop(name)

    def exchanging(self) -> Exchanging:
        return self._pulls.exchanging

    async def pull(self, request: GenerateRequest) -> PullResult:
        return await self._pulls.only(request, partial(self._generate_raw, only_pulls=True))

    async def end_session(self, session: int) -> None:
        await self._core.call("kvroute_end_session", session)

    async def render(self, call: HttpCall) -> Rendered:
        return await self._http.render(call)

    async def _generate_raw(
        self, request: GenerateRequest, emit: Emit, *, only_pulls: bool = False
    ) -> None:
        """Generate tokens without vLLM's HTTP application: for requests that no client has sent."""
        check_takes_tokens(self._llm.model_config)
        if request.pin:
            admit_pin(request, self)
        prompt = tokens_input(request.token_ids.tolist(), cache_salt=cache_salt(request))
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=hint_args(request)
            | step_args(request)
            | pull_args(request, is_all=only_pulls)
            | _pin_args(request)
            or None,
        )
        try:
            lora = await self._adapters.ready(request.variant)
            async for output in self._llm.generate(
                prompt,
                params,
                request.request_id,
                lora_request=lora,
                trace_headers=request.trace,
                priority=priority_of(request),
                data_parallel_rank=self._core.rank,
            ):
                ids = tuple(output.outputs[0].token_ids)
                emit(Chunk(ids, output.num_cached_tokens or 0, output.finished))
            if request.pin:
                await self._count_pin(request)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    @property
    def pins(self) -> Mapping[str, int]:
        return self._pins

    @property
    def host_pins(self) -> Mapping[str, int]:
        return self._host_pins

    async def _count_pin(self, request: GenerateRequest) -> None:
        """Record the size of a request's pin, in blocks.

        Raises:
            PinRefusedError: Some blocks of the prompt were evicted before they could be pinned.
        """
        if request.is_host_pin:
            self._host_pins[request.pin] = len(request.prompt_ids) // self.facts.block_size
            return
        hit_tokens = self.facts.layout.hit_tokens if self.facts.layout else self.facts.block_size
        full_tokens = (len(request.prompt_ids) - 1) // hit_tokens * hit_tokens
        tokens: int = await self._core.call("kvroute_pinned", request.pin)
        self._pins[request.pin] = tokens // self.facts.block_size
        if tokens < full_tokens:
            await self.unpin(request.pin)
            raise PinRefusedError(
                f"only {tokens} of the {full_tokens} tokens of {request.pin} are still cached; "
                "try again"
            )

    async def unpin(self, name: str) -> None:
        if name in self._pins or name in self._host_pins:
            self._pins.pop(name, None)
            self._host_pins.pop(name, None)
            self._stats.kv_usage = await self._core.call("kvroute_unpin", name)

    async def events(self) -> AsyncIterator[list[KVEvent]]:
        decoder = msgspec.msgpack.Decoder(EventBatch)
        async for payload in self._subscription.batches():
            batch = decoder.decode(payload).events if payload else ()
            self._pulls.record(batch)
            events = map(event_of, batch) if payload else [EventsLost()]
            yield [event for event in events if event is not None]

    def load(self) -> Load:
        return Load(
            running=self._stats.running,
            waiting=self._stats.waiting,
            used_blocks=round(self._stats.kv_usage * self.facts.capacity_blocks),
            variants=tuple(self._adapters.loaded),
            setup_s=self._adapters.load_s,
            rendering_differences=self._http.rendering_differences(self._core.rank),
        )

    async def unstarted(self, request_ids: Sequence[str]) -> list[str]:
        waiting: list[str] = await self._core.call("kvroute_unstarted", [*request_ids])
        return waiting

    async def check(self) -> None:
        try:
            await self._llm.check_health()
        except VllmDeadError as error:
            raise self._dead(error) from error
        reason = self._health.check(
            is_stopped=self._is_stopped(),
            has_work=self._unfinished > 0,
            steps=self._stats.steps,
        )
        if reason is not None:
            raise EngineDeadError(reason)

    def _dead(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(self._crash_log.message() or str(error))

    def _is_stopped(self) -> bool:
        # A process that no longer exists is not stopped: vLLM reports its death.
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(process.status() == psutil.STATUS_STOPPED for process in self._processes)
        return False

    async def emit_held(self) -> None:
        await self._core.call("kvroute_emit_held")

    async def reset_prefix_cache(self) -> bool:
        is_cleared = bool(await self._core.call("reset_prefix_cache"))
        if is_cleared:
            self._pins.clear()
            self._host_pins.clear()
        return is_cleared

    async def close(self) -> None:
        """Close this rank. Closing rank 0 shuts vLLM down for all ranks."""
        self._pulls.close()
        if self._core.rank == 0:
            self._http.close()
            await asyncio.to_thread(self._llm.shutdown, timeout=self._pulls.stop_s)
        self._subscription.close()


class _Stats(StatLoggerBase):
    """Numbers of a rank's scheduler at its last step.

    vLLM calls `record` after each step, in the replica's process.
    """

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0  # share of the KV blocks that requests hold
        self.steps = 0

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        pass


def _load(args: AsyncEngineArgs, stats: Sequence[_Stats], cores: Cores) -> AsyncLLM:
    """Start vLLM and load the model.

    Call this in a separate thread: the thread is bound to `cores`, and the engine's processes
    inherit that.

    Args:
        args: vLLM's arguments.
        stats: Receives the scheduler's numbers; one item for each rank.
        cores: The CPU cores for the engine's processes.
    """
    if current_platform.is_cpu():
        os.environ[fork_server.THREADS] = str(cores.threads(len(stats)))
        apply(BEFORE_START_ON_CPU)
    apply(BEFORE_START)
    os.environ[REGEX_TIMEOUT] = "0"  # no limit by vLLM; kvroute's --max-compile-s replaces it
    with cores.bound():
        loggers = [lambda _, rank: stats[rank]]
        kind = ContinuingLLM if is_on(CONTINUATION) else AsyncLLM
        llm: AsyncLLM = kind.from_engine_args(args, stat_loggers=loggers)
        return llm


def _freeze_objects() -> None:
    """Exclude all objects that exist now from later garbage collections.

    Otherwise each full collection would stop this process's event loop for 0.4 s.
    """
    gc.collect()
    gc.freeze()


async def _begin(core: RankCore, settings: ReplicaSettings) -> Division:
    """Make the scheduler's events have fingerprints, and return how its cache is divided.

    Call this before the first request.
    """
    plain = await core.call(
        "kvroute_begin", settings.served_model_name, settings.revision, settings.block_size
    )
    division = msgspec.convert(plain, Division)
    if division.host_block_bytes:
        is_caching = bool(core.llm.vllm_config.cache_config.enable_prefix_caching)
        check_tier(settings, division, is_caching=is_caching)
    return division


def _pin_args(request: GenerateRequest) -> dict[str, str]:
    """Return the entries of vLLM's extra_args for the request's pin."""
    if not request.pin:
        return {}
    return {HOST_PIN if request.is_host_pin else PIN: request.pin}
