"""Parses the documents: code blocks, commands, links and anchors."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
README = ROOT / "README.md"
START = ROOT / "docs" / "start.md"
SETTINGS, METRICS, API, CLIENTS, DEPLOYMENT, SECURITY, ERRORS = (
    ROOT / "docs" / f"{name}.md"
    for name in ("settings", "metrics", "api", "clients", "deployment", "security", "errors")
)
ADDRESS = "http://127.0.0.1:8000"  # address of a cluster with the default options

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\n\n^```(?:text|json)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A code block. The language is empty if the document gives none."""

    language: str
    text: str
    output: str = ""  # what the document shows directly after the block: what its last step prints


def name(document: Path) -> str:
    """Return the document's path in the repository."""
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> list[Block]:
    """Return the document's code blocks in order."""
    text = document.read_text()
    return [
        Block(found[1], found[2], _output(text, found.end())) for found in FENCED.finditer(text)
    ]


def _output(text: str, start: int) -> str:
    """Return the output block that begins at this place; empty if there is none."""
    found = OUTPUT.match(text, start)
    return found[1] if found else ""


def steps(document: Path) -> Iterator[Block]:
    """Yield what a reader would run, in order: single shell commands and Python programs."""
    for block in blocks(document):
        if block.language == "sh":
            *before, last = commands(block.text)
            yield from (Block("sh", command) for command in before)
            yield Block("sh", last, block.output)
        elif block.language == "python":
            yield block


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell block.

    A command ends at the first line after which no quote is open.
    """
    command = ""
    for line in text.splitlines(keepends=True):
        command += line
        if _is_complete(command):
            if words(command):
                yield command.strip()
            command = ""
    assert not command, f"a command that does not end: {command}"


def words(command: str) -> list[str]:
    """Return the words of a command, without its comment."""
    return shlex.split(command, comments=True)


def _is_complete(command: str) -> bool:
    try:
        words(command)
    except ValueError:  # an open quote
        return False
    return not command.rstrip().endswith("\\")


def links(document: Path) -> list[str]:
    """Return the targets of the document's links within the repository."""
    targets = LINK.findall(_prose(document))
    return [target for target in targets if "://" not in target]


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes from the document's headings."""
    headings = (heading.lower() for heading in HEADING.findall(_prose(document)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def _prose(document: Path) -> str:
    return FENCED.sub("", document.read_text())
