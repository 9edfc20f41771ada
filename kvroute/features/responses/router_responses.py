"""The stored responses of one model in one router: what the core calls."""

from typing import TYPE_CHECKING

from fastapi import Request, Response
from prometheus_client import CollectorRegistry

from kvroute.features.expanded import Expanded
from kvroute.features.responses import PREVIOUS_NOT_FOUND
from kvroute.features.responses.background.background_answers import begin
from kvroute.features.responses.background.own_request import IS_BACKGROUND
from kvroute.features.responses.background.unfinished import Unfinished
from kvroute.features.responses.continuing import (
    BACKGROUND,
    CONTINUING,
    Conversations,
    without_store,
)
from kvroute.features.responses.conversations import ConversationObjects
from kvroute.features.responses.response_options import ResponseOptions
from kvroute.features.responses.stores.background_store import BackgroundStore
from kvroute.features.responses.stores.conversation_store import ConversationStore
from kvroute.features.responses.stores.response_store import Responses
from kvroute.features.router_feature import RouterFeature
from kvroute.process.exposition import Readings
from kvroute.router.api.calls import RESPONSES, Call
from kvroute.router.api.errors import ApiError

if TYPE_CHECKING:
    from kvroute.router.serving.router_base import RouterBase


class RouterResponses(RouterFeature):
    """The stored responses and conversations of one model."""

    name = "responses"
    extends = (RESPONSES,)

    def __init__(self, base: "RouterBase") -> None:
        self.conversations: Conversations | None = None  # None: this server does not store them
        self.unfinished: Unfinished | None = None
        options = base.settings.of(self.name, ResponseOptions)
        if options.response_store_mb:
            self._responses = Responses.opened(base, options, base.redis, base.model)
            store = ConversationStore.opened(base, options, base.redis)
            self.conversations = Conversations(self._responses, ConversationObjects(store))
            background = BackgroundStore.opened(base, options, base.redis)
            self.unfinished = Unfinished(background, self.conversations)

    def metrics(self, registry: CollectorRegistry, readings: Readings) -> None:
        if self.conversations is None:
            return
        readings.labelled_counter(
            "outcome",
            "kvroute_stored_responses",
            "Responses to store, by outcome: stored, too_large, known (a response has this id "
            "already), failed (Redis is away, slow or full).",
            lambda: self._responses.counts,
        )
        readings.counter(
            "kvroute_evicted_responses",
            "Stored responses that this router evicted to store new ones.",
            lambda: self._responses.evicted,
        )
        readings.gauge(
            "kvroute_stored_response_bytes",
            "Bytes of all stored responses in Redis when this router last stored one.",
            lambda: self._responses.bytes,
        )

    async def answer(self, call: Call, request: Request) -> Response | None:
        if not call.body.get(BACKGROUND) or request.scope.get(IS_BACKGROUND):
            return None
        return await begin(call, request)

    async def expand(self, call: Call) -> Expanded:
        if self.conversations is not None:
            try:
                return await self.conversations.expand(call)
            except ApiError as error:
                unfinished = self.unfinished if error.code == PREVIOUS_NOT_FOUND else None
                if unfinished is None or not await unfinished.keep(call):
                    raise
            return await self.conversations.expand(call)
        for name in CONTINUING:
            if (id_ := call.body.get(name)) is not None:
                raise without_store(name, id_, "send the complete conversation as input")
        return Expanded(call)
