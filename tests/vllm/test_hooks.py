"""The installed vLLM has what kvroute uses of it: an upgrade begins with this list."""

import re

import pytest

from tests.support.documents import ROOT
from tests.support.hooks import GoneError, as_installed, imported, listed, name_of, replaced

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_every_hook_is_as_in_the_pinned_version() -> None:
    pinned = {name_of(hook): hook for hook in listed()}
    changed = []
    for name in (*sorted(imported() | replaced()), *pinned):
        try:
            now = as_installed(name)
        except GoneError:
            changed.append(f"{name} is gone")
        else:
            if name in pinned and now != pinned[name]:
                changed.append(f"{pinned[name]} is now {now}")
    assert not changed, "\n".join(["", *dict.fromkeys(changed)])


def test_the_document_names_only_hooks_of_the_list() -> None:
    """And names what the list has of it by the same words."""
    known = {part for hook in listed() for part in re.findall(r"\w+", hook)}
    known |= {part for name in imported() | replaced() for part in name.split(".")}
    rows = (ROOT / "docs" / "upgrading.md").read_text().splitlines()
    firsts = [row.split("|")[1] for row in rows if row.startswith("| ")]
    named = {
        each.rpartition(".")[2] for first in firsts for each in re.findall(r"`([\w.]+)`", first)
    }
    assert len(named) > 30
    assert named - known == set()
