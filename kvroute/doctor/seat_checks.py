"""The seats of sessions in words: how many are held, who waits for one, and what helps."""

from collections.abc import Iterable, Iterator

from kvroute.doctor.checks import Check, Facts

REMEDY = (
    "more replicas, or host memory for caches (--host-cache-gb); --max-sessions off lets all send, "
    "and computes again what they evict from each other"
)


def seats(found: Iterable[Facts]) -> Iterator[Check]:
    """found: the seats of each model whose sessions may need them, as one router sees them."""
    for each in found:
        is_waiting = each["is_limited"] and each["all_routers"]["waiting"]
        if is_waiting:
            yield Check("seats", "warning", seated(each), REMEDY)
        else:
            yield Check("seats", "ok", _free(each))


def seated(seats: Facts) -> str:
    """Say who holds seats and who waits, while sessions need them."""
    waiting = seats["all_routers"]["waiting"]
    text = f"{_counted(seats['seats'], 'session')} of {seats['sessions']:,} for {seats['model']} "
    text += f"with a seat, since {_why(seats)}; {_counted(waiting, 'request')} waiting for one"
    if waiting:
        text += f", the first for {seats['all_routers']['oldest_s']:.0f} s"
    return text


def _free(seats: Facts) -> str:
    if seats["is_limited"]:
        return seated(seats)
    return (
        f"{_counted(seats['sessions'], 'active session')} for {seats['model']}; none needs a seat"
    )


def _why(seats: Facts) -> str:
    if seats["most"] is not None:
        return f"--max-sessions is {seats['most']:,}"
    return (
        f"the contexts of active sessions have {seats['tokens']:,} tokens and the caches room for "
        f"{seats['limit_tokens']:,}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
