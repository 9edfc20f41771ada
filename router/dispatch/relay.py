"""Makes the response to the client from the chunks that a replica's HTTP application writes."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from operator import attrgetter

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvroute.contract.http_call import HttpPart
from kvroute.router.api.errors import EVENTS, JSON, ApiError, event
from kvroute.router.dispatch.generation import Generation
from kvroute.router.dispatch.replica_errors import failure_event, replica_error

ERROR = b'data: {"error"'  # beginning of an event of vLLM that ends a stream with an error
SHOWN_REPLICAS = 32  # the most replica ids in a header

# Changes the last bytes of the response to some prompts.
Ending = Callable[[Sequence[Generation], bytes], Awaitable[bytes]]


class RelayedAnswer:
    """The HTTP response to one prompt. Several replicas may have written it."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.status = 0
        self.content_type = ""
        self.is_complete = False
        self._first: bytes | None = None  # bytes that came with the status, until they are read

    async def wait_for_status(self) -> None:
        """Wait until the status is known.

        Raises:
            ApiError: no replica can continue.
        """
        data = b""
        while not self.status and (more := await self._next()) is not None:
            data += more
        self._first = data

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith(EVENTS)

    async def next(self) -> bytes | None:
        """Return the bytes that have arrived since the last call; None after the last part.

        Raises:
            ApiError: no replica can continue.
        """
        data, self._first = self._first, None
        return await self._next() if data is None else data

    async def read_all(self) -> bytes:
        """Return the complete body.

        Raises:
            ApiError: no replica can continue.
        """
        parts = []
        while not self.is_complete and (data := await self.next()) is not None:
            parts.append(data)
        self.generation.close()
        return b"".join([self._first or b"", *parts])

    async def _next(self) -> bytes | None:
        chunk = await self.generation.next()
        if chunk is None or chunk.http is None:
            return None
        if self.is_stream and chunk.http.status >= 400:  # refused by the replica that continues
            raise ApiError(
                500,
                "the answer could not be continued after a replica was lost; try again",
            )
        if chunk.http.status:
            self.status, self.content_type = chunk.http.status, chunk.http.content_type
        self.is_complete = chunk.is_last
        data = chunk.http.data
        return failure_event(data) if data.startswith(ERROR) else data


class Relay(StreamingResponse):
    """A stream of server-sent events, forwarded as the replica writes them."""

    def __init__(self, answer: RelayedAnswer, *, path: str, ending: Ending) -> None:
        headers = placement_headers([answer.generation])
        super().__init__((), answer.status, headers, media_type=EVENTS)
        self._answer = answer
        self._path = path
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.generation.close()

    async def stream_response(self, send: Send) -> None:
        """Send the response. Its last event and its end are one message."""
        answer, status = self._answer, self.status_code
        await send({"type": "http.response.start", "status": status, "headers": self.raw_headers})
        last = b""
        try:
            while (data := await answer.next()) is not None and not answer.is_complete:
                if data:
                    last = data
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._ending([answer.generation], data or b"")
        except ApiError as error:
            data = event(error, last, path=self._path)
        await send({"type": "http.response.body", "body": data, "more_body": False})


def placement_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Return the headers that describe the placement of a call's prompts.

    They contain the replicas, the sum of the expected hits in tokens, and the longest wait of a
    prompt in the router with its reason. Each replica is listed once. At most SHOWN_REPLICAS are
    listed, since load balancers refuse responses with too many kilobytes of headers.
    """
    replicas = dict.fromkeys(generation.replica_id for generation in generations)
    longest = max((generation.sent.wait for generation in generations), key=attrgetter("waited_s"))
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
        "x-kvroute-queued-s": f"{longest.waited_s:.3f}",
        "x-kvroute-queued-for": longest.reason,
    }


async def relay_response(generation: Generation, *, path: str, ending: Ending) -> Response:
    """Return the response to a call with one prompt.

    Args:
        path: the call's route.
        ending: changes the last bytes of the response.

    Raises:
        ApiError: no replica can continue the response.
    """
    answer = RelayedAnswer(generation)
    is_stream = False
    try:
        await answer.wait_for_status()
        is_stream = answer.is_stream
        if is_stream:
            return Relay(answer, path=path, ending=ending)
        data = await answer.read_all()
    finally:
        if not is_stream:  # complete, or the client has disconnected
            generation.close()
    headers = placement_headers([generation])
    if answer.status != 200:
        data = replica_error(data, answer.status, path=path)
        return Response(data, answer.status, headers, media_type=JSON)
    data = await ending([generation], data)
    return Response(data, 200, headers, media_type=answer.content_type)


def complete_response(part: HttpPart, *, path: str) -> Response:
    """Return a response that a replica has sent in one part.

    Args:
        path: path of the request.
    """
    if part.status >= 400:
        data = replica_error(part.data, part.status, path=path)
        return Response(data, part.status, media_type=JSON)
    return Response(part.data, part.status, media_type=part.content_type)
