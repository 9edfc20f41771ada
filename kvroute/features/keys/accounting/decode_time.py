"""Divides a replica's time among the requests that decode there at the same time.

While n requests decode, each is charged 1/n of the elapsed time. Time in which the engine computes
prompts, as predicted by the speed model, is not charged for decoding. So the charges for decoding
and for prefill add up to the time that the replica was busy.

A clock for each replica counts the time that is charged to a request that decodes without a pause.
A request is charged the difference between the clock's values at its last and its first token.

The result is an estimate. The router learns of other routers' requests some milliseconds late. It
updates the clock only when one of its own requests starts or ends decoding. For the time between
two updates, n is the mean of its values at the two updates.
"""

from kvroute.router.placement.load import ReplicaLoad


class DecodeTime:
    """One replica's clock; see the module. It exists while requests of this router decode there."""

    def __init__(self, load: ReplicaLoad, now_s: float) -> None:
        self._load = load
        self._updated_s = now_s  # time of the last update
        self._requests = len(load.decoding)  # number of requests that decoded at the last update
        self._prefilled_s = load.prefilled_s  # the replica's total prefill at the last update
        self._prefill_s = 0.0  # prefill that is not yet subtracted from the elapsed time
        self._charged_s = 0.0  # the clock: seconds charged to a request that decodes all the time
        self._starts_s: dict[str, float] = {}  # request id -> value of the clock at its first token

    @property
    def is_over(self) -> bool:
        """Return whether no request of this router decodes there any more."""
        return not self._starts_s

    def begin(self, request_id: str, now_s: float) -> None:
        """Record a request's first token. The replica's load must already include the request."""
        self._advance(now_s, requests=len(self._load.decoding) - 1)
        self._starts_s[request_id] = self._charged_s

    def end(self, request_id: str, now_s: float) -> float:
        """End a request, and return the seconds charged to it; 0 if it had no first token.

        The replica's load must no longer include the request.
        """
        self._advance(now_s, requests=len(self._load.decoding) + 1)
        return self._charged_s - self._starts_s.pop(request_id, self._charged_s)

    def _advance(self, now_s: float, *, requests: int) -> None:
        """Advance the clock to `now_s`.

        Args:
            requests: number of requests that decoded just before `now_s`.
        """
        load, gap_s = self._load, max(0.0, now_s - self._updated_s)
        self._prefill_s += load.speed.slowness * (load.prefilled_s - self._prefilled_s)
        decoding_s = max(0.0, gap_s - self._prefill_s)
        self._prefill_s -= gap_s - decoding_s
        self._charged_s += decoding_s / max(1.0, (self._requests + requests) / 2)
        self._updated_s += gap_s
        self._requests = len(load.decoding)
        self._prefilled_s = load.prefilled_s
