"""The records of files and batches in the store.

Each record is a small JSON file. All of them but progress.json are written only once.

Layout of the store:

    files/FILE.json              FileRecord
    files/FILE.data              content of an uploaded file
    batches/BATCH/batch.json     BatchRecord
    batches/BATCH/started.json   Started: the input can be used
    batches/BATCH/run-N.json     Run: a router has begun to run the batch, for the Nth time
    batches/BATCH/progress.json  Progress, the only file that is replaced
    batches/BATCH/output-N.jsonl results of the Nth run; errors-N.jsonl: its failed lines
    batches/BATCH/cancel.json    Cancelled: a client has cancelled the batch
    batches/BATCH/end.json       End
    batches/BATCH/index          the lines' places and order (batch/prepare.py)
"""

import re
import uuid
from typing import Literal

from msgspec import Struct

from kvroute.batch.lines import Fault
from kvroute.batch.usage import TokenUsage
from kvroute.contract.priority import Priority

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
FILE_ID = re.compile(FILE_PREFIX + r"[0-9a-f]{32}\Z")
BATCH_ID = re.compile(BATCH_PREFIX + r"[0-9a-f]{32}\Z")

Kind = Literal["output", "errors"]
KINDS: tuple[Kind, ...] = ("output", "errors")
FinalStatus = Literal["completed", "failed", "expired", "cancelled"]


class FileRecord(Struct, frozen=True, omit_defaults=True):
    """A file of the Files API."""

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: int  # Unix time in seconds, as all times here
    expires_at: int | None = None  # None: it does not expire
    bytes: int = 0  # size of an uploaded file
    batch: str = ""  # id of the batch whose results these are; empty: an uploaded file
    kind: Kind = "output"  # which results of the batch


class BatchRecord(Struct, frozen=True, omit_defaults=True):
    """A batch as it was created."""

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int  # end of the completion window
    output_file_id: str
    error_file_id: str
    priority: Priority = "default"  # most urgent priority class of the API key that created it
    metadata: dict[str, str] | None = None
    output_ttl_s: int | None = None  # seconds until the results expire


class Started(Struct, frozen=True):
    """The batch's input has been checked."""

    in_progress_at: int
    total: int  # number of lines


class Segment(Struct, frozen=True, array_like=True):
    """The first `size` bytes of a file with results. Only these bytes count."""

    name: str  # name of the file in the batch's folder
    size: int  # bytes


class Run(Struct, frozen=True):
    """One run of a batch, by one router.

    `output` and `errors` say which results of earlier runs count. The results of the latest run
    itself count, too. If the router of an earlier run goes on writing, for example because it was
    stopped for a while, its later results are ignored, and the latest run computes these lines
    again.
    """

    number: int  # 1 for the first run
    router: str
    output: tuple[Segment, ...] = ()  # results of earlier runs
    errors: tuple[Segment, ...] = ()  # failed lines of earlier runs

    def segments(self, kind: Kind) -> tuple[Segment, ...]:
        """Return the results of earlier runs."""
        return self.output if kind == "output" else self.errors

    def own(self, kind: Kind) -> str:
        """Return the name of the file with this run's results."""
        return f"{kind}-{self.number}.jsonl"


class Progress(Struct, frozen=True, omit_defaults=True):
    """How many lines of a batch have a result."""

    completed: int = 0
    failed: int = 0
    usage: TokenUsage = TokenUsage()
    finalizing_at: int | None = None  # when the batch stopped sending lines
    updated_at: int = 0  # when a report last had a new result


class Cancelled(Struct, frozen=True):
    cancelling_at: int


class End(Struct, frozen=True, omit_defaults=True):
    """The end of a batch. Its results do not change any more."""

    status: FinalStatus
    at: int
    progress: Progress = Progress()
    output: tuple[Segment, ...] = ()
    errors: tuple[Segment, ...] = ()
    faults: tuple[Fault, ...] = ()  # why the input cannot be used

    def segments(self, kind: Kind) -> tuple[Segment, ...]:
        """Return the results."""
        return self.output if kind == "output" else self.errors


def new_file_id() -> str:
    return f"{FILE_PREFIX}{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"{BATCH_PREFIX}{uuid.uuid4().hex}"
