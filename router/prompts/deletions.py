"""What a template deletes from texts puts no special token together.

Such as SmolLM3's: `<|im_/no_thinkend|>` without `/no_think` is `<|im_end|>`.
"""

import ast
import re
from collections.abc import Callable, Sequence

from kvroute.router.prompts.patterns import starts_of

QUOTED = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
DELETED = re.compile(rf"""\breplace\(\s*{QUOTED}\s*,\s*(?:""|'')\s*[,)]""", re.DOTALL)
ROUNDS = 2  # of deletions; a text that needs more has been made to do harm


def deleted_by(template: str) -> list[str]:
    """The literals of its `.replace("literal", "")`, in its order."""
    found = dict.fromkeys(_meant(match[1]) for match in DELETED.finditer(template))
    return [*filter(None, found)]


class Deletions:
    """Those of one template."""

    def __init__(self, literals: Sequence[str]) -> None:
        self.literals = literals
        self._starts = starts_of(literals)

    def broken(self, text: str, mark: str, is_bad: Callable[[str], bool]) -> str:
        """The text; if deletions may make it bad, with the mark in all that they would delete."""
        if not self._may_become(text, is_bad):
            return text
        return self._starts.sub(lambda start: start[0] + mark, text)

    def _may_become(self, text: str, is_bad: Callable[[str], bool]) -> bool:
        """By one deletion, or by all of them, one after the other, again and again."""
        if any(is_bad(text.replace(each, "")) for each in self.literals if each in text):
            return True
        for _ in range(ROUNDS):
            before = text
            for literal in self.literals:
                if literal in text:
                    text = text.replace(literal, "")
                    if is_bad(text):
                        return True
            if text == before:
                return False
        return True


def _meant(quoted: str) -> str:
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        return quoted[1:-1]
