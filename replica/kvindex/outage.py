"""Redis is away: said once when it goes and once when it is back, however often it is tried."""

import logging
import time


class Outage:
    """What one user of Redis knows of its being away."""

    def __init__(self, log: logging.Logger, effect: str) -> None:
        self._log = log
        self._effect = effect  # what is different until it is back
        self._began_s: float | None = None  # on the monotonic clock

    @property
    def is_on(self) -> bool:
        return self._began_s is not None

    def begin(self, error: Exception) -> None:
        """A call failed."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._log.warning("Redis is away (%r); %s", error, self._effect)

    def end(self) -> None:
        """A call was answered."""
        if self._began_s is not None:
            self._log.warning("Redis is back after %.1f s", time.monotonic() - self._began_s)
            self._began_s = None
