"""The kind of text that changes in a prompt from turn to turn, such as a date.

Reports and logs show the kind, because the text itself may be private.
"""

import re

# Prompt tokens on each side of a change that are searched too, for marks such as "<total_tokens>".
CONTEXT_TOKENS = 12
MAX_TOKENS = 64  # longest change in tokens; longer text is not a date or a counter
# Each kind of text and its pattern. If several patterns match, the first one counts.
KINDS = (
    ("a count of the tokens that are left", re.compile(r"total_tokens|tokens (?:left|remaining)")),
    ("a time of day", re.compile(r"\d{1,2}:\d{2}")),
    ("a date", re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}|(?:19|20)\d{2}")),
    ("an identifier", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|(?=\w*\d)[0-9a-f]{12,}")),
    ("a number", re.compile(r"\d")),
)


def kind_of(text: str) -> str:
    """Return the kind of the changed text, or "" if it is of no known kind.

    Args:
        text: the new text at the place of the change, with some of the prompt before and after it.
    """
    return next((kind for kind, pattern in KINDS if pattern.search(text)), "")
