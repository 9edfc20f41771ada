"""What kind of text changes in a prompt from one turn to the next, without saying the text."""

import re

CONTEXT_TOKENS = 12  # prompt tokens on each side of a change, for marks such as "<total_tokens>"
MAX_TOKENS = 64  # tokens of a change; a longer change is no date and no counter
# The first that is found counts.
KINDS = (
    ("a count of the tokens that are left", re.compile(r"total_tokens|tokens (?:left|remaining)")),
    ("a time of day", re.compile(r"\d{1,2}:\d{2}")),
    ("a date", re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}|(?:19|20)\d{2}")),
    ("an identifier", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|(?=\w*\d)[0-9a-f]{12,}")),
    ("a number", re.compile(r"\d")),
)


def kind_of(text: str) -> str:
    """Return what kind of text a change is; empty if it is none that changes by itself.

    Args:
        text: what stands there now, with some of the prompt before and behind it.
    """
    return next((kind for kind, pattern in KINDS if pattern.search(text)), "")
