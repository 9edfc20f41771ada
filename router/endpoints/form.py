"""Reads a form with a file from the body of a request, part by part, without keeping the file."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from kvroute.router.api.body_parts import BodyParts
from kvroute.router.api.errors import ApiError, invalid

SILENCE_S = 60.0  # longest time between two parts of a body, in seconds
# After SILENCE_S, a body must have come with at least this many bytes per second on average. Even a
# modem on a telephone line is five times as fast. Slower clients hold a place that others need.
LEAST_RATE = 1000
MAX_FIELD_BYTES = 4096  # longest value of a field, and of the headers of a part
MAX_FIELDS = 16  # the most fields, including the file
FILE = "file"  # name of the field with the file


@dataclass
class _Part:
    """A field of the form that is being read."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_name: bytes = b""
    header_value: bytes = b""
    value: bytes = b""
    name: str = ""
    filename: str = ""


class UploadForm:
    """A form with a file. The fields before the file are known once `begin` has returned.

    Args:
        request: the request; its body is the form.
        expected: the names of the fields that the form should have, for error messages.
        max_fields: the most fields, including the file.
        max_field_bytes: longest value of a field, and of the headers of a part.
        on_bytes: is awaited with each part of the body, before the part is parsed.
    """

    def __init__(
        self,
        request: Request,
        *,
        expected: str,
        max_fields: int = MAX_FIELDS,
        max_field_bytes: int = MAX_FIELD_BYTES,
        on_bytes: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> None:
        """Read the form's boundary.

        Raises:
            ApiError: the body is not a form.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(
                415,
                "a file is uploaded as a form: send Content-Type: multipart/form-data with a "
                f"boundary, and the fields {expected}",
            )
        self.boundary = boundary
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._max_fields = max_fields
        self._max_field_bytes = max_field_bytes
        self._on_bytes = on_bytes
        self._has_file = False
        self._start_s = time.monotonic()
        self._received = 0  # bytes of the body
        self._body = BodyParts(request, silence_s=SILENCE_S)
        self._parts = 0  # number of fields so far
        self._part = _Part()
        self._data: list[bytes] = []  # parts of the file that were read but not yet returned
        self._preamble: bytes | None = b""  # text before the first boundary; None: that was read
        self._is_closed = False  # whether the last boundary was read
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._part_data,
                    "on_part_end": self._end_part,
                    "on_end": self._close,
                },
            )
        except FormParserError as error:
            raise invalid(None, f"the form is not valid: {error}") from None

    async def begin(self) -> None:
        """Read the form up to the file.

        Raises:
            ApiError: the form is not valid, or has no file.
        """
        while not self._has_file:
            if not await self._read():
                raise invalid(FILE, "the form has no field `file`; send the file in it")

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the content of the file, and read the form to its end.

        Raises:
            ApiError: the form is not valid, or the client has disconnected.
        """
        is_complete = False
        while True:
            for data in self._data:
                yield data
            self._data.clear()
            if is_complete:
                return
            is_complete = not await self._read()

    async def _read(self) -> bool:
        """Read a part of the body; return False at its end."""
        try:
            chunk = await self._body.next()
            if chunk is None:
                self._parser.finalize()
                self._check_end()
                return False
            self._received += len(chunk)
            self._check_rate()
            chunk = self._after_preamble(chunk)
            if self._on_bytes is not None:
                await self._on_bytes(chunk)
            self._parser.write(chunk)
        except FormParserError as error:
            raise invalid(None, f"the form is not valid: {error}") from None
        return True

    def _after_preamble(self, chunk: bytes) -> bytes:
        """Return a part of the body without the text that may come before the first boundary.

        That text means nothing, says RFC 2046; the parser knows only empty lines there.
        """
        if self._preamble is None:
            return chunk
        self._preamble += chunk
        place = (b"\r\n" + self._preamble).find(b"\r\n--" + self.boundary)
        if place < 0:
            if len(self._preamble) > len(chunk) + self._max_field_bytes:
                raise invalid(None, f"the form does not begin: {self._line()} was expected")
            return b""
        form, self._preamble = self._preamble[place:], None
        return form

    def _check_end(self) -> None:
        """Raise ApiError if the body ends before the form does, as if it was cut off."""
        if not self._is_closed and self._received:
            raise invalid(
                None, f"the form is not complete: its last line, {self._line()}--, is missing"
            )

    def _line(self) -> str:
        """Return the line that begins each field, for error messages."""
        return f"--{self.boundary.decode(errors='replace')[:80]}"

    def _check_rate(self) -> None:
        """Raise ApiError if the body comes too slowly."""
        elapsed_s = time.monotonic() - self._start_s
        if self._received < LEAST_RATE * (elapsed_s - SILENCE_S):
            raise ApiError(
                408,
                f"{self._received} bytes came in {elapsed_s:.0f} s, which is less than "
                f"{LEAST_RATE} bytes per second; upload it again over a faster connection",
            )

    # Callbacks of the parser. Each gets a buffer and the range in it.

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > self._max_fields:
            raise invalid(None, f"the form has more than {self._max_fields} fields; send fewer")
        self._part = _Part()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name = self._bounded(self._part.header_name + data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value = self._bounded(self._part.header_value + data[start:end])

    def _end_header(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        self._bounded(b"".join(part.headers))
        part.header_name = part.header_value = b""

    def _end_headers(self) -> None:
        disposition = self._part.headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition.decode("latin-1"))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        self._part.filename = _decoded(options.get(b"filename", b""))
        if b"filename*" in disposition.lower():
            self._part.filename = _extended_name(disposition) or self._part.filename
        if self._part.name == FILE:
            if self._has_file:
                raise invalid(FILE, "the form has two files; send one")
            self._has_file, self.filename = True, self._part.filename

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == FILE:
            self._data.append(data[start:end])
        else:
            self._part.value = self._bounded(self._part.value + data[start:end])

    def _end_part(self) -> None:
        if self._part.name != FILE:
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _close(self) -> None:
        self._is_closed = True

    def _bounded(self, value: bytes) -> bytes:
        """Return a value. Raises ApiError if it is too long."""
        if len(value) > self._max_field_bytes:
            raise invalid(
                self._part.name or None,
                f"a field or header of the form has more than {self._max_field_bytes} bytes; "
                "send a shorter one",
            )
        return value


def _extended_name(disposition: bytes) -> str:
    """Return the file's name in the form `filename*=UTF-8''na%C3%AFve.txt`; "" if it has none."""
    message = Message()
    message["content-disposition"] = disposition.decode("latin-1")
    values = message.get_params([], header="content-disposition")
    extended = (value for name, value in values if name == "filename" and isinstance(value, tuple))
    return next(map(collapse_rfc2231_value, extended), "")


def _decoded(filename: bytes) -> str:
    """Decode a file's name, in which clients escape three characters, as HTML's standard says."""
    text = filename.decode(errors="replace")
    return text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
