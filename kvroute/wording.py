"""Words for messages to people."""


def plural(count: int, noun: str) -> str:
    """Return a number with a noun, such as "1 check" and "2 checks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
