"""Forwards kvroute's log records to Ray Serve's log of the process, as text or as JSON.

Serve configures only its own logger, which adds the deployment, the replica and the request's id.
Without this module, records of other loggers below WARNING are lost, and their warnings appear
without a level.

A record that cannot be written, for example because the disk is full, is counted and dropped. By
default, Python prints such a failure to standard error. Serve writes standard error to the same
log, so each failure would cause another one.
"""

import logging
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from ray.serve.schema import LoggingConfig

DROPPED = Counter(
    "kvroute_dropped_log_lines", "Lines missing in the process's log, since it cannot be written."
)
FREE = Gauge(
    "kvroute_log_disk_free_bytes", "Free space on the disk of the process's log.", ["path"]
)


class _ServeLog(logging.Handler):
    """A handler that forwards records to Serve's logger."""

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self._serve = logging.getLogger("ray.serve")
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        if self._model is not None:
            vars(record)["model"] = self._model
        self._serve.handle(record)


def logging_config(log_format: str) -> "LoggingConfig":
    """Return a logging configuration for one of Serve's deployments, or for all of Serve.

    Args:
        log_format: "text" or "json".
    """
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(encoding=log_format.upper(), additional_log_standard_attrs=["name"])


def log_to_serve(model: str | None) -> None:
    """Forward all further log records of this process to Serve's log.

    Args:
        model: the model name that clients send, for the JSON lines; None: several models.
    """
    logging.Handler.handleError = _drop  # type: ignore[method-assign,assignment]
    for folder in _folders(logging.getLogger("ray.serve").handlers):
        FREE.labels(folder).set_function(partial(_free_bytes, folder))
    ours = logging.getLogger("kvroute")
    ours.handlers = [_ServeLog(model)]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _drop(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Count a record that a handler cannot write. This replaces logging's Handler.handleError."""
    DROPPED.inc()


def _folders(handlers: list[logging.Handler]) -> set[str]:
    """Return the folders of the log files. A handler may be a buffer before a file's handler."""
    targets = (getattr(handler, "target", handler) for handler in handlers)
    return {
        os.path.dirname(target.baseFilename)
        for target in targets
        if isinstance(target, logging.FileHandler)
    }


def _free_bytes(folder: str) -> float:
    return shutil.disk_usage(folder).free
