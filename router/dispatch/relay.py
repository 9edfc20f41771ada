"""What a replica's HTTP application answers to a call becomes the response to the client."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvroute.contract.http_call import HttpPart
from kvroute.router.api.errors import EVENTS, ApiError, replica_error
from kvroute.router.dispatch.generation import Generation

SHOWN_REPLICAS = 32  # replicas that a header names

Ending = Callable[[bytes], bytes]  # changes the last bytes of a response
# Why a stream ends too early, and what was sent last, to its last event.
Failed = Callable[[ApiError, bytes], bytes]
Refused = Callable[[bytes, int], bytes]  # body and status of a replica's error to the client's body


class Answer:
    """One prompt's response, which may come from several replicas."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.status = 0
        self.content_type = ""
        self.is_complete = False
        self._begun: bytes | None = None  # bytes that came together with the status

    async def begin(self) -> None:
        """Wait until the status is known.

        Raises:
            ApiError: no replica can continue.
        """
        data = b""
        while not self.status and (more := await self._next()) is not None:
            data += more
        self._begun = data

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith(EVENTS)

    async def next(self) -> bytes | None:
        """Return all that has come since the last call; None after the last part.

        Raises:
            ApiError: no replica can continue.
        """
        data, self._begun = self._begun, None
        return await self._next() if data is None else data

    async def whole(self) -> bytes:
        """Return the whole answer.

        Raises:
            ApiError: no replica can continue.
        """
        parts = []
        while not self.is_complete and (data := await self.next()) is not None:
            parts.append(data)
        return b"".join([self._begun or b"", *parts])

    async def _next(self) -> bytes | None:
        chunk = await self.generation.next()
        if chunk is None or chunk.http is None:
            return None
        if self.is_stream and chunk.http.status >= 400:  # from a replica that should have continued
            raise ApiError(500, "the answer could not go on after a lost replica", "server_error")
        if chunk.http.status:
            self.status, self.content_type = chunk.http.status, chunk.http.content_type
        self.is_complete = chunk.is_last
        return chunk.http.data


class Relay(StreamingResponse):
    """Server-sent events as the replica writes them."""

    def __init__(
        self, answer: Answer, headers: Mapping[str, str], *, ending: Ending, failed: Failed
    ) -> None:
        super().__init__((), answer.status, headers, media_type=EVENTS)
        self._answer = answer
        self._ending = ending
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.generation.close()

    async def stream_response(self, send: Send) -> None:
        """Send the response; the last event goes out together with the end of the response."""
        answer, status = self._answer, self.status_code
        await send({"type": "http.response.start", "status": status, "headers": self.raw_headers})
        last = b""
        try:
            while (data := await answer.next()) is not None and not answer.is_complete:
                if data:
                    last = data
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = self._ending(data or b"")
        except ApiError as error:
            data = self._failed(error, last)
        await send({"type": "http.response.body", "body": data, "more_body": False})


def placement_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Return headers with the replicas of the call's prompts, expected hits and the longest wait.

    Each replica is named once, since load balancers refuse responses whose headers take more than
    some kilobytes. Hits are in tokens; the wait is the longest of a prompt in the router.
    """
    replicas = dict.fromkeys(generation.replica_id for generation in generations)
    longest = max((generation.wait for generation in generations), key=attrgetter("waited_s"))
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
        "x-kvroute-queued-s": f"{longest.waited_s:.3f}",
        "x-kvroute-queued-for": longest.reason,
    }


async def relayed(
    generation: Generation,
    headers: Mapping[str, str],
    *,
    ending: Ending,
    failed: Failed,
    refused: Refused,
) -> Response:
    """Return the response to a call with one prompt.

    Raises:
        ApiError: no replica can go on.
    """
    answer = Answer(generation)
    is_relayed = False
    try:
        await answer.begin()
        is_relayed = answer.is_stream
        if is_relayed:
            return Relay(answer, headers, ending=ending, failed=failed)
        data = await answer.whole()
    finally:
        if not is_relayed:  # complete, or the client has left
            generation.close()
    data = ending(data) if answer.status == 200 else refused(data, answer.status)
    return Response(data, answer.status, headers, media_type=answer.content_type)


def whole_response(part: HttpPart, *, path: str) -> Response:
    """Return a response that a replica gave as one part, to a request of this path."""
    is_error = part.status >= 400
    data = replica_error(part.data, part.status, path=path) if is_error else part.data
    return Response(data, part.status, media_type=part.content_type)
