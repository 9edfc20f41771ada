"""OpenAI's HTTP routes for conversations.

A conversation can only be used by the tenant and with the `cache_salt` that created it.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from kvroute.features.responses.continuing import OPTION
from kvroute.features.responses.conversation_bodies import ConversationBody, ItemsBody, MetadataBody
from kvroute.features.responses.conversations import ConversationObjects
from kvroute.features.responses.items.reading import ItemReader
from kvroute.features.responses.response_routes import Salt, page, stores_of
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.router.api.bodies import BodyReader
from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints.pages import Page
from kvroute.router.middleware.caller_check import caller_of
from kvroute.router.serving.models import Served

CONVERSATIONS = "/v1/conversations"
CONVERSATION = f"{CONVERSATIONS}/{{conversation_id}}"
ITEMS = f"{CONVERSATION}/items"
ITEM = f"{ITEMS}/{{item_id}}"

routes = APIRouter()


async def _reader(
    request: Request, models: Served, salt: Annotated[str, Query(alias="cache_salt")] = ""
) -> ItemReader:
    """Return the reader of the items that the request adds."""
    sides = [model.feature(RouterResponses) for model in models.all]
    side = next((side for side in sides if side.conversations is not None), sides[0])
    return side.reader(caller_of(request), salt)


async def _objects(models: Served) -> ConversationObjects:
    """Return the conversations of all models.

    Raises:
        ApiError: this server does not store conversations.
    """
    if stores := stores_of(models):
        return stores[0].objects
    raise ApiError(
        404,
        f"this server does not store conversations; start it with {OPTION}",
        code="not_found",
    )


Objects = Annotated[ConversationObjects, Depends(_objects)]
Reader = Annotated[ItemReader, Depends(_reader)]


@routes.post(CONVERSATIONS)
async def create_conversation(
    request: Request, objects: Objects, salt: Salt, bodies: BodyReader, reader: Reader
) -> Response:
    """Create a conversation, which responses read and extend."""
    body = await bodies.parsed(ConversationBody, request)
    items = await reader.storable(body.items)
    return JSONResponse(await objects.create(items, body.metadata, salt))


@routes.get(CONVERSATION)
async def get_conversation(conversation_id: str, objects: Objects, salt: Salt) -> Response:
    """Return a conversation without its items."""
    return JSONResponse(await objects.get(conversation_id, salt))


@routes.post(CONVERSATION)
async def update_conversation(
    conversation_id: str, request: Request, objects: Objects, salt: Salt, bodies: BodyReader
) -> Response:
    """Replace the metadata of a conversation."""
    body = await bodies.parsed(MetadataBody, request)
    return JSONResponse(await objects.update(conversation_id, body.metadata, salt))


@routes.delete(CONVERSATION)
async def delete_conversation(conversation_id: str, objects: Objects, salt: Salt) -> Response:
    """Delete a conversation with its items. Responses that have used it are kept."""
    await objects.delete(conversation_id, salt)
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@routes.post(ITEMS)
async def add_items(
    conversation_id: str,
    request: Request,
    objects: Objects,
    salt: Salt,
    bodies: BodyReader,
    reader: Reader,
) -> Response:
    """Add items at the end of a conversation."""
    body = await bodies.parsed(ItemsBody, request)
    added = await objects.add(conversation_id, await reader.storable(body.items), salt)
    return JSONResponse(Page[dict[str, Any]](added, has_more=False).as_object(added))


@routes.get(ITEMS)
async def list_items(
    conversation_id: str, request: Request, objects: Objects, salt: Salt
) -> Response:
    """Return the items of a conversation, the newest first."""
    return page(await objects.items(conversation_id, salt), request)


@routes.get(ITEM)
async def get_item(conversation_id: str, item_id: str, objects: Objects, salt: Salt) -> Response:
    """Return one item of a conversation."""
    return JSONResponse(await objects.item(conversation_id, item_id, salt))


@routes.delete(ITEM)
async def delete_item(conversation_id: str, item_id: str, objects: Objects, salt: Salt) -> Response:
    """Delete one item of a conversation, and return the conversation."""
    return JSONResponse(await objects.delete_item(conversation_id, item_id, salt))
