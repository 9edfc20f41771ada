"""A router with all that belongs to it: models, services and background tasks."""

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI

from kvroute.features import FEATURES
from kvroute.features.gate import Gate
from kvroute.features.router_service import RouterServices
from kvroute.process.builtin_model import resolve
from kvroute.process.surroundings import Surroundings
from kvroute.router.api.bodies import Bodies
from kvroute.router.application import application
from kvroute.router.connections.replica_source import ReplicaSource
from kvroute.router.middleware.caller_check import gate_of
from kvroute.router.middleware.stopping import RunningAnswers
from kvroute.router.observability import request_spans
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Models
from kvroute.router.serving.router_base import RouterBase, router_base
from kvroute.settings.router import RouterSettings

# Unfinished answers are ended with an error this many seconds before the router ends.
LAST_ERRORS_S = 1.0


class AssembledRouter:
    """One of several equal routers. Each has its own copy of every model's index in memory."""

    def __init__(
        self, models: Models, answers: RunningAnswers, services: RouterServices, drain_s: float
    ) -> None:
        """Create the router; use `start`.

        Args:
            models: The models.
            answers: The running answers.
            services: The features' services.
            drain_s: Seconds that answers may take after the end has been announced.
        """
        self.models = models
        self._answers = answers
        self._services = services
        self._bodies = Bodies(limit_mb=models.settings.max_body_mb)
        self._ending = asyncio.create_task(self._end(drain_s), name="end")

    @classmethod
    async def start(
        cls,
        models: Sequence[tuple[RouterSettings, ReplicaSource]],
        surroundings: Surroundings,
    ) -> "AssembledRouter":
        """Start a router and return it.

        Args:
            models: For each model, its settings and its replicas.
            surroundings: The place where the router runs.
        """
        id_ = uuid.uuid4().hex[:12]
        request_spans.start(id_)
        settings = models[0][0]
        gate = await asyncio.to_thread(gate_of, settings)
        started = Models(
            id_, [await _model_router(id_, *model, gate, surroundings) for model in models]
        )
        services = await asyncio.to_thread(_services, started.first.base)
        router = cls(started, RunningAnswers(), services, settings.drain_timeout_s)
        surroundings.log(started.only)
        await asyncio.gather(*(model.lifecycle.start() for model in started.all))
        services.start(started.first.telemetry.readings)
        return router

    def application(self) -> FastAPI:
        """Return the HTTP application."""
        return application(
            self.models, self._bodies, answers=self._answers, services=self._services
        )

    async def stop(self) -> int:
        """Refuse new requests from now on, and return the number of running answers."""
        running = self._answers.stop()
        await self._services.stop()
        return running

    def end_answers(self) -> None:
        """End all running answers with an error."""
        self._answers.end()

    def check(self) -> None:
        """Raise the error of a background task that has ended."""
        for model in self.models.all:
            model.lifecycle.check()
        self._services.check()

    async def close(self) -> None:
        """Close the router."""
        self._ending.cancel()
        await self._services.stop()
        self._services.close()
        await asyncio.gather(
            self._bodies.close(), *(model.lifecycle.close() for model in self.models.all)
        )
        await asyncio.to_thread(request_spans.close)

    async def _end(self, drain_s: float) -> None:
        """End the router's work in time when its end has been announced."""
        await self.models.first.base.surroundings.draining()
        await self._services.stop()
        await asyncio.sleep(max(0.0, drain_s - LAST_ERRORS_S))
        self._answers.end()


def _services(base: RouterBase) -> RouterServices:
    services = (feature.service(base) for feature in FEATURES)
    return RouterServices(service for service in (base.gate, *services) if service is not None)


async def _model_router(
    id_: str,
    settings: RouterSettings,
    source: ReplicaSource,
    gate: Gate,
    surroundings: Surroundings,
) -> ModelRouter:
    """Load the model's tokenizer, and return its router."""
    folder = await asyncio.to_thread(resolve, settings.model)
    load = partial(Prompts, escapes=settings.escapes_special_tokens)
    tokenizer = await asyncio.to_thread(load, folder, settings.revision, settings.engine_args)
    base = router_base(id_, settings, tokenizer, gate, surroundings)
    return ModelRouter(Parts(base, source))
