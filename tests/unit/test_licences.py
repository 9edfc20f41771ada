"""docs/licences.md has every locked package, and the licences are read from metadata."""

import re

import pytest

from scripts.licences import LOCKS, PAGE, RUNNING, licence, locked, page


def sections() -> tuple[set[str], set[str]]:
    """Return the packages in the page's two tables of packages."""
    _, running, others = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    rows = re.compile(r"^\| ([a-z0-9-]+) \| .+ \|$", re.MULTILINE)
    _, packages = running.split("| package |")
    return {*rows.findall(packages)} - {"---"}, {*rows.findall(others)} - {"---", "package"}


def test_the_page_has_every_locked_package() -> None:
    running, others = sections()
    needed = set().union(*(locked(LOCKS / f"{name}.lock") for name in RUNNING))
    assert running == needed, "run `make licences`"
    everything = set().union(*map(locked, LOCKS.glob("*.lock")))
    assert others == everything - needed, "run `make licences`"


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"license_expression": "MIT OR Apache-2.0", "license": "ignored"}, "MIT OR Apache-2.0"),
        ({"license": "Apache License, Version 2.0"}, "Apache-2.0"),
        ({"license": "A licence of our own"}, "A licence of our own"),
        (
            {"license": "Copyright\nAll of it", "classifier": ["License :: OSI Approved :: MIT"]},
            "MIT",
        ),
        ({"license": "MIT License\n\nCopyright and the whole text"}, "MIT"),
        ({"classifier": ["License :: OSI Approved", "Typing :: Typed"]}, "not declared"),
        (
            {
                "classifier": [
                    "License :: OSI Approved :: MIT License",
                    "License :: OSI Approved :: Apache Software License",
                ]
            },
            "Apache-2.0 OR MIT",
        ),
    ],
)
def test_a_licence_has_one_name(metadata: dict[str, object], name: str) -> None:
    assert licence(metadata) == name


def test_the_page_says_who_needs_a_package() -> None:
    locks = {"cpu": {"ray": "MIT"}, "gpu": {"ray": "MIT", "torch": "BSD"}, "dev": {"ray": "MIT"}}
    text = page({**locks, "site": {"mkdocs": "ISC"}})
    assert "| ray | MIT | yes | yes |" in text
    assert "| torch | BSD | yes | yes |" in text
    assert text.index("No image and no wheel") < text.index("| mkdocs | ISC |")
    assert text.count("| ray |") == 1
