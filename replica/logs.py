"""What our loggers say stands in Ray Serve's log of the process, as text or as JSON.

Serve configures its own logger only: it adds the deployment, the replica and the request's id to a
record, and what others log is lost below WARNING, or comes without its level.
"""

import logging

from ray.serve.schema import LoggingConfig


class _ServeLog(logging.Handler):
    """Hands records on to Serve's logger, whatever handlers that has by then."""

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self._serve = logging.getLogger("ray.serve")
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        if self._model is not None:
            vars(record)["model"] = self._model
        self._serve.handle(record)


def logging_config(log_format: str) -> LoggingConfig:
    """Serve's configuration, for a deployment or for all of Serve; the format is text or json."""
    return LoggingConfig(encoding=log_format.upper(), additional_log_standard_attrs=["name"])


def log_to_serve(model: str | None) -> None:
    """From now on in this process. model: as clients name it, where it is the process's only one;
    JSON lines have it."""
    ours = logging.getLogger("kvroute")
    ours.handlers = [_ServeLog(model)]
    ours.setLevel(logging.INFO)
    ours.propagate = False
