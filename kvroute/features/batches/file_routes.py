"""OpenAI's Files API, for the inputs and results of batches."""

import re
from operator import attrgetter
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from kvroute.features.batches.batches import MAX_TTL_S, ExpiresAfter
from kvroute.features.batches.files import FileUpload
from kvroute.features.batches.records import FILE_PREFIX, FileRecord
from kvroute.features.batches.service import BatchService, Service, needing_store
from kvroute.router.api.errors import ApiError, invalid, shown
from kvroute.router.api.parsing import json_object
from kvroute.router.endpoints.form import UploadForm
from kvroute.router.endpoints.idempotency import new_id
from kvroute.router.endpoints.pages import in_order, page_of
from kvroute.router.middleware.caller_check import at_gate, caller_of

FILES = "/v1/files"
MAX_LISTED = 10_000  # the most files in one page, as in OpenAI's API
PURPOSES = ("batch", "user_data", "evals")
DEFAULT_TTL_S = 30 * 86_400  # seconds until the input of a batch expires, as in OpenAI's API
EXPIRES = "expires_after"  # name of the field that says when a file expires
MAX_NAME = 255  # longest name of a file, in characters
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")

routes = APIRouter()


@routes.post(FILES)
async def upload_file(request: Request, service: Service) -> Response:
    """Store an uploaded file. Until it is stored, it is one of its tenant's running requests."""
    form = UploadForm(request, expected="`purpose` and `file`")
    with at_gate(request):
        await form.begin()
        if "purpose" in form.fields:
            _described(form)  # refuses bad fields before the file is read
        with needing_store():
            record = await service.files.add(
                form.content(),
                lambda: _described(form),  # some clients send fields after the file
                caller_of(request),
                new_id(request, FILE_PREFIX),
            )
    return JSONResponse(as_object(record))


@routes.get(FILES)
async def list_files(request: Request, service: Service, purpose: str | None = None) -> Response:
    """Return the client's files."""
    with needing_store():
        records = await service.files.listed(caller_of(request).tenant)
        if purpose is not None:
            records = [record for record in records if record.purpose == purpose]
        query = request.query_params
        page = page_of(
            in_order(records, query),
            query,
            id_of=attrgetter("id"),
            default=MAX_LISTED,
            most=MAX_LISTED,
        )
        files = await service.files.sized(page.items)
    return JSONResponse(page.as_object([as_object(record) for record in files]))


@routes.get(f"{FILES}/{{file_id}}")
async def get_file(file_id: str, request: Request, service: Service) -> Response:
    """Return what is known about a file."""
    return JSONResponse(as_object(await _found(file_id, request, service)))


@routes.delete(f"{FILES}/{{file_id}}")
async def delete_file(file_id: str, request: Request, service: Service) -> Response:
    """Delete a file."""
    record = await _found(file_id, request, service)
    with needing_store():
        if record.id in await service.batches.inputs():
            raise ApiError(
                409, f"file {record.id} is the input of a batch that has not ended", "id"
            )
        await service.files.delete(record)
    return JSONResponse({"id": record.id, "object": "file", "deleted": True})


@routes.get(f"{FILES}/{{file_id}}/content")
async def get_content(file_id: str, request: Request, service: Service) -> Response:
    """Return the content of a file, or a part of it: `Range: bytes=0-99`.

    The results of a batch can be read while it runs.
    """
    record = await _found(file_id, request, service)
    start, end = _range(request.headers.get("range", ""), record.bytes)
    headers = {
        "content-length": str(end - start),
        "accept-ranges": "bytes",
        "content-disposition": f'attachment; filename="{_plain(record.filename)}"',
    }
    status = 200
    if (start, end) != (0, record.bytes):
        status = 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{record.bytes}"
    content = service.files.content(record, start, end)
    return StreamingResponse(content, status, headers, media_type="application/octet-stream")


def as_object(record: FileRecord) -> dict[str, Any]:
    """Return a file in the format of OpenAI's API."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


async def _found(file_id: str, request: Request, service: BatchService) -> FileRecord:
    with needing_store():
        return await service.files.get(file_id, caller_of(request).tenant)


def _described(form: UploadForm) -> FileUpload:
    """Return what the fields of a form say about its file. Raises ApiError."""
    return FileUpload(
        filename=(form.filename or "file")[:MAX_NAME],
        purpose=_purpose(form.fields),
        ttl_s=_ttl_s(form.fields),
    )


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise invalid(
            "purpose",
            f"purpose is {shown(purpose)}; expected {', '.join(PURPOSES)}, as a field of the form",
        )
    return purpose


def _ttl_s(fields: dict[str, str]) -> int | None:
    """Return after how many seconds the file expires; None: it does not expire.

    The value is one field with JSON, or one field for each of its members.
    """
    names = {name: f"{EXPIRES}[{name}]" for name in ExpiresAfter.model_fields}
    given: Any = {name: fields[own] for name, own in names.items() if own in fields}
    if not given and EXPIRES not in fields:
        return DEFAULT_TTL_S if fields.get("purpose") == "batch" else None
    try:
        given = given or json_object(fields[EXPIRES].encode())
        return ExpiresAfter.model_validate(given).seconds
    except (ApiError, ValidationError):
        raise invalid(
            EXPIRES,
            f"{EXPIRES} is {shown(given or fields[EXPIRES])}; expected "
            '{"anchor": "created_at", "seconds": 3600}, with up to '
            f"{MAX_TTL_S} seconds",
        ) from None


def _range(header: str, size: int) -> tuple[int, int]:
    """Return the start and the end of the requested bytes.

    Headers that cannot be understood are ignored, as RFC 9110 requires.

    Raises:
        ApiError: 416.
    """
    found = RANGE.match(header)
    if not found or found.groups() == ("", ""):
        return 0, size
    first, last = found.groups()
    if not first:  # the last bytes
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= end:
        raise ApiError(
            416,
            f"Range is {header}; the file has {size} bytes",
            headers={"content-range": f"bytes */{size}"},
        )
    return start, end


def _plain(filename: str) -> str:
    """Return a name that can stand in quotes in a header."""
    return re.sub(r'[^ -~]|["\\\\]', "_", filename)
