"""The stored responses of one model in one router: what the core calls."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import Request, Response
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvroute.features.expanded import Expanded
from kvroute.features.gate import Caller
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
from kvroute.features.responses.items.compaction import (
    COMPACT,
    Compacting,
    for_compact,
    has_summary,
    shortened,
    summarizing,
    without_trigger,
)
from kvroute.features.responses.items.context_management import (
    COMPACTED,
    FIELD,
    Leading,
    compacted,
    threshold_of,
)
from kvroute.features.responses.items.encrypting import Encrypting, wants_encrypted
from kvroute.features.responses.items.input_items import InputItem, input_items, with_input
from kvroute.features.responses.items.reading import ItemReader
from kvroute.features.responses.response_options import ResponseOptions
from kvroute.features.responses.stores.background_store import BackgroundStore
from kvroute.features.responses.stores.conversation_store import ConversationStore
from kvroute.features.responses.stores.item_places import ItemPlaces
from kvroute.features.responses.stores.response_store import Responses
from kvroute.features.responses.storing import ResponseEdit
from kvroute.features.router_feature import RouterFeature
from kvroute.process.exposition import Readings
from kvroute.router.api.calls import RESPONSES, Call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.parsing import json_object
from kvroute.router.history.readable import say_left_out

if TYPE_CHECKING:
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.router_base import RouterBase

Finish = Callable[[Response], Awaitable[Response]]


class RouterResponses(RouterFeature):
    """The stored responses and conversations of one model."""

    name = "responses"
    extends = (RESPONSES, COMPACT, COMPACTED)

    def __init__(self, base: "RouterBase") -> None:
        self.conversations: Conversations | None = None  # None: this server does not store them
        self.unfinished: Unfinished | None = None
        self._secret = base.settings.redis_url  # see Cipher
        options = base.settings.of(self.name, ResponseOptions)
        if options.response_store_mb:
            self._responses = Responses.opened(base, options, base.redis, base.model)
            store = ConversationStore.opened(base, options, base.redis)
            places = ItemPlaces.opened(base, options, base.redis)
            objects = ConversationObjects(store, places)
            self.conversations = Conversations(self._responses, objects)
            background = BackgroundStore.opened(base, options, base.redis)
            self.unfinished = Unfinished(background, self.conversations, self.reader)

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

    def reader(self, caller: Caller, cache_salt: str | None) -> ItemReader:
        """Return the reader of the items of a caller's requests with this `cache_salt`."""
        references = self.conversations.references if self.conversations else None
        return ItemReader(caller, cache_salt, self._secret, references)

    def attach(self, parts: "Parts") -> None:
        self._max_model_len = parts.max_model_len

    async def answer(self, call: Call, request: Request) -> Response | Call | None:
        if call.body.get(BACKGROUND) and not request.scope.get(IS_BACKGROUND):
            return await begin(call, request)
        if call.path != RESPONSES or call.body.get(FIELD) is None:
            return None
        threshold = threshold_of(call.body, self._max_model_len())
        return None if threshold is None else await compacted(call, request, threshold)

    async def expand(self, call: Call) -> Expanded:
        reader = self.reader(call.caller, call.body.get("cache_salt"))
        is_window, compacts, made = call.path == COMPACT, call.path == COMPACT, list[InputItem]()
        if call.path != RESPONSES or reader.must_read(call):
            items, is_triggered = without_trigger(await reader.read(input_items(call)))
            compacts = is_window or is_triggered
            if call.path == COMPACTED:
                items, made = items[:-1], [items[-1]]
            call = for_compact(call, items) if is_window else with_input(call, items)
        expanded = await self._continued(replace(call, path=RESPONSES))
        call, edits = expanded.call, list[ResponseEdit]()
        if compacts or made or has_summary(call):
            has_all = not expanded.has_more_messages  # whether `body` has all of the input
            whole = call if has_all else replace(call, body=json_object(call.raw))
            window = [*input_items(whole), *made]
            items = shortened(window, reader.cipher, reader.left_out)
            call = summarizing(call, items) if compacts else with_input(call, items)
        if compacts:
            edits.append(Compacting(reader.cipher, window if is_window else None))
        edits += (Leading(item.value) for item in made)
        if wants_encrypted(call):
            edits.append(Encrypting(reader.cipher))
        finish = None if is_window else expanded.finish  # what the route answers is not stored
        if edits or reader.left_out:
            finish = _after(edits, finish, [*reader.left_out])
        return replace(expanded, call=call, finish=finish)

    async def _continued(self, call: Call) -> Expanded:
        """Return a call with the conversation before it, and with the storing of its response."""
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


def _after(edits: Sequence[ResponseEdit], finish: Finish | None, left_out: list[str]) -> Finish:
    """Return a function that edits a response, finishes it, and says in it what is left out."""

    async def finished(response: Response) -> Response:
        for edit in edits:
            response = await edit.finish(response)
        if finish:
            response = await finish(response)
        say_left_out(response, left_out)
        return response

    return finished
