"""Logs each outage of Redis twice: when it begins and when it ends."""

import logging
import time


class Outage:
    """The outages of Redis that one component observes."""

    def __init__(self, log: logging.Logger, effect: str) -> None:
        self._log = log
        self._effect = effect  # what the component does during the outage; part of the log line
        self._began_s: float | None = None  # start of the outage on the monotonic clock

    @property
    def is_on(self) -> bool:
        return self._began_s is not None

    def begin(self, error: Exception) -> None:
        """Record a failed call to Redis."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._log.warning("Redis is away (%r); %s", error, self._effect)

    def end(self) -> None:
        """Record a successful call to Redis."""
        if self._began_s is not None:
            self._log.warning("Redis is back after %.1f s", time.monotonic() - self._began_s)
            self._began_s = None
