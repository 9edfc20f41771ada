"""How a replica's time is divided among the requests that decode there at the same time.

Time is counted as it passes for one of them: 1/n of a second in each while n requests decode, and
nothing while the engine computes prompts, for as long as the speed model says that takes. So what
each request gets, together with all prefills, is the time that the replica was busy.

This is as exact as what the router knows. It hears of other routers' requests some milliseconds
later, and looks only when a request of its own begins or ends to decode: between two of these, the
number of requests is taken to be the mean of both.
"""

from kvroute.router.placement.load import ReplicaLoad


class DecodeTime:
    """One replica's, from the time on that one of this router's requests decodes there."""

    def __init__(self, load: ReplicaLoad, now_s: float) -> None:
        self._load = load
        self._at_s = now_s  # time of the last call
        self._requests = len(load.decoding)
        self._prefilled_s = load.prefilled_s
        self._prefill_s = 0.0  # prefill seconds that are not yet subtracted from the passing time
        self._passed_s = 0.0  # seconds that each decoding request has had so far
        self._begun: dict[str, float] = {}  # request id -> when it began, on that clock

    @property
    def is_over(self) -> bool:
        return not self._begun

    def begin(self, request_id: str, now_s: float) -> None:
        """Record that the request has its first token; the load counts it already."""
        self._pass(now_s, requests=len(self._load.decoding) - 1)
        self._begun[request_id] = self._passed_s

    def end(self, request_id: str, now_s: float) -> float:
        """Return the GPU seconds of the request; 0: it had not begun. The load drops it."""
        self._pass(now_s, requests=len(self._load.decoding) + 1)
        return self._passed_s - self._begun.pop(request_id, self._passed_s)

    def _pass(self, now_s: float, *, requests: int) -> None:
        """Divide the time since the last call among the requests that have decoded until now."""
        load, gap_s = self._load, max(0.0, now_s - self._at_s)
        self._prefill_s += load.speed.slowness * (load.prefilled_s - self._prefilled_s)
        decoding_s = max(0.0, gap_s - self._prefill_s)
        self._prefill_s -= gap_s - decoding_s
        self._passed_s += decoding_s / max(1.0, (self._requests + requests) / 2)
        self._at_s += gap_s
        self._requests = len(load.decoding)
        self._prefilled_s = load.prefilled_s
