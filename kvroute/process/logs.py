"""Records of kvroute's loggers go to Ray Serve's log of the process, as text or as JSON.

Serve configures only its own logger, which adds the deployment, the replica and the request's id.
Records of other loggers are lost below WARNING, or appear without their level.
"""

import logging

from ray.serve.schema import LoggingConfig


class _ServeLog(logging.Handler):
    """Forwards records to Serve's logger and its current handlers."""

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self._serve = logging.getLogger("ray.serve")
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        if self._model is not None:
            vars(record)["model"] = self._model
        self._serve.handle(record)


def logging_config(log_format: str) -> LoggingConfig:
    """Serve's configuration, for one deployment or for all of Serve; the format is text or json."""
    return LoggingConfig(encoding=log_format.upper(), additional_log_standard_attrs=["name"])


def log_to_serve(model: str | None) -> None:
    """Forwards this process's records from now on. model: its name for clients, if the process has
    only one; JSON lines include it."""
    ours = logging.getLogger("kvroute")
    ours.handlers = [_ServeLog(model)]
    ours.setLevel(logging.INFO)
    ours.propagate = False
