"""Finds the cause in vLLM's list of what is wrong with a body.

The type of a field is often a union: of a text and a list, or of objects with different types. The
list has what is wrong with the value for each of them. So most of the list is about types that the
client did not mean.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_PARSED = 100_000  # characters of a list that are read
MAX_VALUE = 80  # most characters of a value in a sentence
MAX_REASONS = 4  # most reasons in a sentence
HEAD = re.compile(r"\d+ validation errors?\b.*\n")  # first line of a list of problems
_VLLMS = re.compile(  # a problem in vLLM's own list: kind, place, reason, value
    r"""^  \{'type': '(\w+)', 'loc': '([^']*)', 'msg': ('[^']*'|"[^"]*")(?:, 'input': (.*?))?"""
    r"""(?:, 'ctx': .*)?\}$""",
    re.MULTILINE,
)
_PYDANTICS = re.compile(  # a problem in pydantic's own list: place, reason, kind, value
    r"^(\S+)\n  (.+?) \[type=(\w+)(?:, input_value=(.*?))?(?:, input_type=\w+)?\]$", re.MULTILINE
)
_CONTAINER = re.compile(r"<(dict|list) of \d+ items>|^[{\[].*")
_CUT = re.compile(r"^  \.\.\.and \d+ more errors?$", re.MULTILINE)
_CHOICES = re.compile(r"'([^']*)'")  # the values in the reason of a literal
_TAGS = re.compile(r"Input tag '(.*)' found using '(\w+)' .* expected tags: (.*)", re.DOTALL)
DISCRIMINATOR = "type"  # the field that says which object of a union is meant
OBJECTS = ("model_type", "dict_type", "model_attributes_type")  # the value is no object


class BodyProblem(NamedTuple):
    """One thing that is wrong with a body."""

    kind: str  # pydantic's name for it
    place: tuple[str, ...]  # fields, indices, and the classes of the members of unions
    reason: str
    value: str

    @property
    def field(self) -> str:
        return ".".join(part for part in self.place if not _is_class(part))

    @property
    def choices(self) -> list[str]:
        """Return the allowed values if only certain values are allowed."""
        return _CHOICES.findall(self.reason) if self.kind == "literal_error" else []


def cause(message: str) -> tuple[str, str] | None:
    """Return the field that is wrong and a sentence about it; None if the list is of another form.

    Args:
        message: a list of problems, as vLLM's application or pydantic writes it.
    """
    text = message[:MAX_PARSED]
    if not (problems := [*_listed(text)]):
        return None
    is_cut = _CUT.search(text) is not None
    found = _innermost(_whole(problems) if is_cut else problems, 0)
    first = found[0]
    if _is_missing(first):
        return first.field, f"{first.field} is missing"
    if is_cut and first.choices and first.place[-1] == DISCRIMINATOR:
        parent = first.field.rpartition(".")[0]  # the right type may be in the rest of the list
        return parent, f"{parent} is not a valid object of the type {first.value}"
    if choices := dict.fromkeys(choice for each in found for choice in each.choices):
        expected = "expected " + ", ".join(f"'{choice}'" for choice in choices)
    else:
        expected = ", or ".join([*dict.fromkeys(each.reason for each in found)][:MAX_REASONS])
    return first.field, f"{first.field} is {first.value}; {expected}"


def _whole(problems: list[BodyProblem]) -> list[BodyProblem]:
    """Return the problems without those of the last member of a union, whose list may be cut."""
    last = problems[-1].place
    end = max((index + 1 for index, part in enumerate(last) if _is_class(part)), default=0)
    whole = [problem for problem in problems if not end or problem.place[:end] != last[:end]]
    return whole or problems


def _innermost(problems: Sequence[BodyProblem], depth: int) -> Sequence[BodyProblem]:
    """Return the problems at the innermost place, which is most likely the cause.

    Args:
        problems: problems whose places have the same first parts.
        depth: the number of these parts.
    """
    members: dict[str, list[BodyProblem]] = {}
    for problem in problems:
        if len(problem.place) > depth:
            members.setdefault(problem.place[depth], []).append(problem)
    if not members:
        return problems
    if not _is_class(next(iter(members))):
        wrong = [problem for problem in members.get(DISCRIMINATOR, ()) if problem.choices]
        return wrong or _innermost(next(iter(members.values())), depth + 1)
    here = [problem for problem in problems if len(problem.place) == depth]
    return _in_union([*members.values()], here, depth + 1)


def _in_union(
    branches: list[list[BodyProblem]], here: Sequence[BodyProblem], depth: int
) -> Sequence[BodyProblem]:
    """Return the problems of the member of a union that the client most likely meant.

    Args:
        branches: the problems of each member of the union that is an object.
        here: the problems of the other members.
        depth: the number of parts of the place of a branch.
    """
    objects = [
        branch
        for branch in branches
        if branch[0].kind not in OBJECTS or len(branch[0].place) > depth
    ]
    if not objects:
        told = branches[0][0]
        return here or [told._replace(place=told.place[:depth], reason="expected an object")]
    fitting = [branch for branch in objects if not _at_discriminator(branch, depth)]
    if not fitting:
        wrong = [problem for branch in objects for problem in _at_discriminator(branch, depth)]
        return [problem for problem in wrong if problem.choices] or wrong
    fewest = min(_missing(branch, depth) for branch in fitting)
    found = [_innermost(each, depth) for each in fitting if _missing(each, depth) == fewest]
    deepest = max(found, key=lambda each: each[0].field.count("."))
    field = deepest[0].field
    return [problem for each in found for problem in each if problem.field == field]


def _at_discriminator(branch: Sequence[BodyProblem], depth: int) -> list[BodyProblem]:
    return [
        problem
        for problem in branch
        if problem.place[depth:] == (DISCRIMINATOR,) and (problem.choices or _is_missing(problem))
    ]


def _missing(branch: Sequence[BodyProblem], depth: int) -> int:
    """Return how many fields of the object itself are missing."""
    return sum(_is_missing(problem) and len(problem.place) == depth + 1 for problem in branch)


def _is_missing(problem: BodyProblem) -> bool:
    return problem.kind == "missing"


def _is_class(part: str) -> bool:
    return part[:1].isupper()


def _listed(text: str) -> Iterator[BodyProblem]:
    """Yield the problems of a list, in vLLM's form or in pydantic's."""
    for kind, place, quoted, value in _VLLMS.findall(text):
        yield _problem(kind, place.removeprefix("body."), quoted[1:-1], value)
    for place, reason, kind, value in _PYDANTICS.findall(text):
        yield _problem(kind, place, reason, value)


def _problem(kind: str, place: str, reason: str, value: str) -> BodyProblem:
    parts = tuple(place.split("."))
    if kind == "union_tag_invalid" and (found := _TAGS.match(reason)):
        value, name, tags = found.groups()
        return BodyProblem("literal_error", (*parts, name), tags, value)
    if kind == "union_tag_not_found":
        return BodyProblem("missing", (*parts, DISCRIMINATOR), "", "")
    if kind == "missing" and _is_class(parts[-1]):
        parts = (*parts, "arguments")  # vLLM takes this name for one of pydantic's, and drops it
    shown = _CONTAINER.sub(_named, value.strip("'\""))
    return BodyProblem(
        kind, parts, _worded(reason), shown if len(shown) <= 80 else shown[:80] + "…"
    )


def _named(container: re.Match[str]) -> str:
    return "a list" if container[0].startswith(("[", "<list")) else "an object"


def _worded(reason: str) -> str:
    """Return pydantic's reason in kvroute's words."""
    reason = reason.removeprefix("Value error, ").replace("Input should be", "expected")
    reason = reason.replace("a valid dictionary", "an object")
    return reason[:1].lower() + reason[1:]
