"""ARCHITECTURE.md is short, and what it names exists."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MOST_WORDS = 3_500

FOLDERS = ("kvroute", "dashboards", "deploy", "docs", "tests")
FILES = [*ROOT.iterdir(), *chain.from_iterable((ROOT / name).rglob("*") for name in FOLDERS)]
PATHS = [f"/{file.relative_to(ROOT)}" for file in FILES]
SOURCES = "".join(file.read_text() for file in (ROOT / "kvroute").rglob("*.py"))

QUOTED = sorted({" ".join(each.split()) for each in re.findall(r"`([^`]+)`", TEXT)})
QUOTED_PATHS = [each for each in QUOTED if re.fullmatch(r"[\w./-]+(/|/\w+|\.(py|yaml|md))", each)]
QUOTED_NAMES = [each for each in QUOTED if re.fullmatch(r"-{0,2}\w[\w.-]*", each)]

WALKS = re.findall(
    r"(?:^\d\. .*\n(?:   .*\n)*)+", TEXT[TEXT.index("## Four walks") :], flags=re.MULTILINE
)
STOP = re.compile(r"^\d\. `([\w/.]+)`(.*(?:\n   .*)*)", flags=re.MULTILINE)


def _rooms() -> Iterator[str]:
    """The rows of the table of rooms."""
    for row in re.findall(r"^\| `(kvroute\S*)` \|", TEXT, flags=re.MULTILINE):
        yield row.removesuffix(".py").replace("/", ".")


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= MOST_WORDS


@pytest.mark.parametrize("path", QUOTED_PATHS)
def test_a_path_exists(path: str) -> None:
    """Whole, or from some folder on."""
    assert any(each.endswith("/" + path.rstrip("/")) for each in PATHS)


@pytest.mark.parametrize("name", sorted(set(QUOTED_NAMES) - set(QUOTED_PATHS)))
def test_a_name_is_in_the_sources(name: str) -> None:
    """An option stands there as its field."""
    for part in name.split("."):
        assert (part[2:].replace("-", "_") if part.startswith("--") else part) in SOURCES


def test_the_table_has_the_rooms_in_the_order_of_imports() -> None:
    imports = (ROOT / "tests" / "unit" / "test_imports.py").read_text()
    assert list(_rooms()) == re.findall(r'^    "(kvroute\S*)",$', imports, flags=re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS, ids=[str(number) for number in range(1, len(WALKS) + 1)])
def test_a_walk_enters_a_room_once_and_names_its_modules(walk: str) -> None:
    stops = dict(STOP.findall(walk))
    assert len(stops) == len(re.findall(r"^\d\. ", walk, flags=re.MULTILINE)) > 3
    for room, text in stops.items():
        for module in re.findall(r"`(\w+\.py)`", text):
            assert (ROOT / "kvroute" / room / module).is_file()
