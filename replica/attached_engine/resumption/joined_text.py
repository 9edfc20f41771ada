"""The text of an answer that two servers have generated, with stop strings across the cut."""

from collections.abc import Sequence


class JoinedText:
    """The text of the second server, as one server would have sent it.

    A server sends text only if it cannot be the beginning of a stop string any more. The text that
    the first server has not sent is sent here. The second server knows nothing of that text: it
    finds only stop strings that begin in its own text.

    Args:
        before: The last characters of the text before the second server's, as many as a stop
            string can begin with. Without stop strings, there are none.
        stops: The stop strings.
        includes_stop: Whether the answer ends with the stop string, instead of before it. The
            second server's text always does.
    """

    def __init__(self, before: str, stops: Sequence[str], *, includes_stop: bool) -> None:
        self.ended_by: str | None = None  # the stop string that begins before the cut, if found
        self._text = before  # the text that is not yet sent, after what may be looked at again
        self._cut = len(before)  # where the second server's text begins; below 0: far back
        self._sent = len(before) if includes_stop else 0
        self._stops = stops
        self._includes_stop = includes_stop
        self._held = 0 if includes_stop else held_characters(stops)

    def add(self, text: str, *, is_last: bool, stop_reason: object) -> str:
        """Add the second server's next text, and return the text to send.

        Args:
            text: The text.
            is_last: Whether the second server's answer ends with it.
            stop_reason: The stop string that ends the second server's answer, if there is one.
        """
        if not self._stops:
            return text
        self._text += text
        own = stop_reason if is_last and isinstance(stop_reason, str) else None
        if (end := self._straddling_end(own)) is not None:
            self._text, is_last = self._text[:end], True
        elif own is not None and not self._includes_stop:
            self._text = self._text.removesuffix(own)
        end = len(self._text) if is_last else max(self._sent, len(self._text) - self._held)
        sent, self._sent = self._text[self._sent : end], end
        if len(self._text) - self._cut > held_characters(self._stops):
            self._text, self._cut, self._sent = self._text[end:], -1, 0
        return sent

    def _straddling_end(self, own: str | None) -> int | None:
        """Return where the answer ends, if a stop string begins before the cut; None: none does.

        As in vLLM, the stop string counts that ends first, and of several that end there, the one
        that is first in the list.

        Args:
            own: The stop string with which the text ends, if the second server has found one.
        """
        if self._cut < 0:
            return None
        # Where each stop string ends, its number, and where it begins; -1: after the cut.
        found = [(len(self._text), self._stops.index(own), -1)] if own in self._stops else []
        for number, stop in enumerate(self._stops):
            least, most = max(0, self._cut - len(stop) + 1), self._cut + len(stop) - 1
            begin = self._text.find(stop, least, most)
            if begin >= 0 and begin + len(stop) > self._cut:
                found.append((begin + len(stop), number, begin))
        end, number, begin = min(found, default=(0, 0, -1))
        if begin < 0:
            return None
        self.ended_by = self._stops[number]
        return end if self._includes_stop else begin


def held_characters(stops: Sequence[str]) -> int:
    """Return how many characters may be the beginning of a stop string, without all of it."""
    return max(map(len, stops), default=1) - 1
