"""Words for messages to people."""


def plural(count: int, noun: str) -> str:
    """Return a number with a noun, such as "1 check" and "2 checks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Return a number of bytes in a unit in which it is not 0.0, such as "1.5 MB"."""
    for unit, per_unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= per_unit:
            return f"{count / per_unit:,.1f} {unit}"
    return plural(int(count), "byte")
