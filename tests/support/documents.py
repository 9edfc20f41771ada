"""The documents taken apart: code blocks, commands, links and anchors."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
README = ROOT / "README.md"
SETTINGS, METRICS, API, CLIENTS, DEPLOYMENT, SECURITY = (
    ROOT / "docs" / f"{name}.md"
    for name in ("settings", "metrics", "api", "clients", "deployment", "security")
)
ADDRESS = "http://127.0.0.1:8000"  # of the cluster, in every document

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A code block; language is empty where none is given."""

    language: str
    text: str


def name(document: Path) -> str:
    """Its path in the repository."""
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> list[Block]:
    """Its code blocks, in order."""
    return [Block(*found) for found in FENCED.findall(document.read_text())]


def steps(document: Path) -> Iterator[Block]:
    """What a reader would run, in order: each shell command alone, and each Python program."""
    for block in blocks(document):
        if block.language == "sh":
            yield from (Block("sh", command) for command in commands(block.text))
        elif block.language == "python":
            yield block


def commands(text: str) -> Iterator[str]:
    """The commands of a shell block; one ends with the first line after which no quote is open."""
    begun = ""
    for line in text.splitlines(keepends=True):
        begun += line
        if _is_whole(begun):
            if words(begun):
                yield begun.strip()
            begun = ""
    assert not begun, f"a command that does not end: {begun}"


def words(command: str) -> list[str]:
    """Without its comment."""
    return shlex.split(command, comments=True)


def _is_whole(command: str) -> bool:
    try:
        words(command)
    except ValueError:  # an open quote
        return False
    return not command.rstrip().endswith("\\")


def links(document: Path) -> list[str]:
    """Where it links to, in this repository; code blocks have no links."""
    targets = LINK.findall(_prose(document))
    return [target for target in targets if "://" not in target]


def anchors(document: Path) -> set[str]:
    """Its headings, as GitHub makes anchors of them."""
    headings = (heading.lower() for heading in HEADING.findall(_prose(document)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def _prose(document: Path) -> str:
    return FENCED.sub("", document.read_text())
