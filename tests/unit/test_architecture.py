"""The paths and names in ARCHITECTURE.md and in the pages about the design exist."""

import re
from collections.abc import Iterator
from itertools import chain

import pytest

from kvroute.blocks.fingerprint import FINGERPRINT_VERSION
from kvroute.features import FEATURES
from tests.support.repository import LINKED, ROOT, product_modules

CORE = (ROOT / "ARCHITECTURE.md").read_text()
MAX_WORDS = 3500  # of the core's page
PAGES = ("glossary", "packages", "parts")
TEXT = "\n".join([CORE, *((ROOT / "docs/design" / f"{page}.md").read_text() for page in PAGES)])

FOLDERS = ("kvroute", "router", "replica", "dashboards", "deploy", "docs", "tests")
FILES = [*ROOT.iterdir(), *chain.from_iterable((ROOT / name).rglob("*") for name in FOLDERS)]
PATHS = [f"/{file.relative_to(ROOT)}" for file in FILES]
SOURCES = "".join(file.read_text() for file in product_modules())

# The text without diagrams.
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
QUOTED = sorted({" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", PROSE)})
QUOTED_PATHS = [text for text in QUOTED if re.fullmatch(r"[\w./-]+(/|/\w+|\.(py|yaml|md))", text)]
QUOTED_NAMES = [text for text in QUOTED if re.fullmatch(r"-{0,2}\w[\w.-]*", text)]

WALKS = re.findall(
    r"(?:^\d\. .*\n(?:   .*\n)*)+", TEXT[TEXT.index("## Three walks") :], flags=re.MULTILINE
)
STOP = re.compile(r"^\d\. `([\w/.]+)`(.*(?:\n   .*)*)", flags=re.MULTILINE)


def _packages() -> Iterator[str]:
    """Yield the dotted names of the table's packages."""
    names = "|".join(("kvroute", *LINKED))
    for path in re.findall(rf"^\| `((?:{names})\S*)` \|", TEXT, flags=re.MULTILINE):
        name = path.removesuffix(".py").replace("/", ".")
        yield f"kvroute.{name}" if name.startswith(LINKED) else name


# A row of the table about the way of a chat: the module, and its functions.
STAGE = re.compile(r"^\| [()\w]+ \| `([\w/]+\.py)` \| (`.+?`) \|", flags=re.MULTILINE)


def test_the_functions_on_the_way_of_a_chat_exist() -> None:
    stages = STAGE.findall(CORE)
    named = [(path, name) for path, names in stages for name in re.findall(r"`(\w+)`", names)]
    sources = {path: (ROOT / path).read_text() for path, _ in named}
    assert len(stages) > 7
    assert [each for each in named if f"def {each[1]}(" not in sources[each[0]]] == []


def test_the_table_of_features_has_each_feature() -> None:
    linked = re.findall(r"\(kvroute/features/(\w+)/README\.md\)", CORE)
    assert sorted(linked) == sorted(feature.name for feature in FEATURES)


@pytest.mark.parametrize("feature", [feature.name for feature in FEATURES])
def test_the_readme_of_a_feature_lists_its_modules(feature: str) -> None:
    folder = ROOT / "kvroute" / "features" / feature
    page = (folder / "README.md").read_text()
    modules = {file.name for file in folder.glob("*.py")} - {"__init__.py"}
    assert [module for module in sorted(modules) if f"`{module}`" not in page] == []


def test_the_page_about_the_core_is_short() -> None:
    assert len(CORE.split()) <= MAX_WORDS


def test_every_path_exists() -> None:
    """A path may begin at the root or at any folder."""
    tails = {path.rstrip("/") for path in QUOTED_PATHS} - {FINGERPRINT_VERSION}
    assert [tail for tail in tails if not any(path.endswith(f"/{tail}") for path in PATHS)] == []


def test_every_name_is_in_the_sources() -> None:
    """The sources have an option as the name of its field."""
    parts = {part for name in {*QUOTED_NAMES} - {*QUOTED_PATHS} for part in name.split(".")}
    written = {part: part[2:].replace("-", "_") if part[:2] == "--" else part for part in parts}
    assert [part for part, name in written.items() if name not in SOURCES] == []


def test_the_table_has_the_packages_in_the_order_of_imports() -> None:
    imports = (ROOT / "tests" / "unit" / "test_imports.py").read_text()
    assert list(_packages()) == re.findall(r'^    "(kvroute\S*)",$', imports, flags=re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS, ids=[str(number) for number in range(1, len(WALKS) + 1)])
def test_a_walk_enters_a_package_once_and_names_its_modules(walk: str) -> None:
    stops = dict(STOP.findall(walk))
    assert len(stops) == len(re.findall(r"^\d\. ", walk, flags=re.MULTILINE)) > 3
    for package, text in stops.items():
        for module in re.findall(r"`(\w+\.py)`", text):
            assert (ROOT / "kvroute" / package / module).is_file()
