"""The options of files and batches, which routers receive."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError

from kvroute.settings.help import Option
from kvroute.settings.options.common import ENDPOINT, Positive

BUCKETS = ("s3://", "s3a://", "gs://", "az://")  # beginnings of the URLs of buckets


def place(text: str | None) -> str | None:
    """Make a path absolute; return a bucket's URL, or "off", unchanged."""
    if text is None or text == "off" or text.startswith(BUCKETS):
        return text
    if "://" in text:
        raise PydanticCustomError(
            "place",
            "expected a folder, off, or a bucket: {schemes}",
            {"schemes": " ".join(BUCKETS)},
        )
    return str(Path(text).absolute())


class BatchOptions(BaseModel):
    """The options of the Files and Batch API."""

    files_dir: Annotated[
        str | None,
        AfterValidator(place),
        Option(
            ENDPOINT,
            "Folder for uploaded files, batches and their results, or a bucket, such as "
            "s3://bucket/prefix. If routers run on several nodes, all of them must share it. off: "
            "no files and no batches.",
            example="/shared/files",
            default="~/.local/state/kvroute/files, on each router's node",
        ),
    ] = None
    max_file_mb: Annotated[
        int, Positive, Option(ENDPOINT, "Maximum size of an uploaded file in MB.")
    ] = 512
    files_quota_mb: Annotated[
        int | None,
        Positive,
        Option(
            ENDPOINT,
            "Maximum size of all files together in MB: uploads, and results of batches.",
            example="100000",
            default="half of the disk space that files could use",
        ),
    ] = None


def check_files_dir(files_dir: str | None) -> None:
    """Create the folder for files and batches. Raise StartError if it is not writable."""
    from kvroute.local.before_start import check_writable

    if files_dir and files_dir != "off" and not files_dir.startswith(BUCKETS):
        check_writable("--files-dir", Path(files_dir))
