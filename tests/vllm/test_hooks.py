"""The installed vLLM has what kvroute uses of it: an upgrade begins with this list."""

import importlib
import re

import pytest

from kvroute.process import vllm_build
from kvroute.replica.vllm_engine import hooks
from kvroute.replica.vllm_engine.hooks import GoneError, as_installed, listed, name_of
from tests.support.documents import ROOT
from tests.support.hooks import imported, replaced

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
    assert hooks.problems() == []


def test_names_that_moved_are_found() -> None:
    compat = importlib.import_module("kvroute.replica.vllm_engine.compat")
    assert all(callable(getattr(compat, name)) for name in compat.__all__)
    assert vllm_build.problem(vllm_build.installed_version()) == ""


@pytest.mark.parametrize("hook", listed(), ids=name_of)
def test_each_broken_hook_is_noticed(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a version that was not tested, a replica then runs vLLM without kvroute's changes."""
    name = name_of(hook)
    monkeypatch.setattr(hooks, "listed", lambda: [hook])
    original = hooks._object

    def without(wanted: str) -> object:
        if wanted == name.removesuffix(hooks.ALL):
            raise GoneError(wanted)
        return original(wanted)

    monkeypatch.setattr(hooks, "_object", without)
    assert hooks.problems() == [f"{name} is gone"]


@pytest.mark.parametrize(
    ("hook", "now", "fits"),
    [
        ("vllm.f(self, a)", "vllm.f(self, a)", True),
        ("vllm.f(self, a)", "vllm.f(self, a, b)", False),
        ("vllm.C.*: a, b", "vllm.C.*: a, b, c", True),
        ("vllm.C.*: a, b", "vllm.C.*: a, c", False),
        ("vllm.NAME", "vllm.NAME", True),
    ],
)
def test_a_class_may_have_more_and_a_function_may_not(hook: str, now: str, fits: bool) -> None:
    assert hooks._fits(hook, now) is fits


def test_the_document_names_only_hooks_of_the_list() -> None:
    """And names what the list has of it by the same words."""
    known = {part for hook in listed() for part in re.findall(r"\w+", hook)}
    known |= {part for name in imported() | replaced() for part in name.split(".")}
    known |= {"_get_constraint_bounds"}  # compat.py has it
    rows = (ROOT / "docs" / "upgrading.md").read_text().splitlines()
    firsts = [row.split("|")[1] for row in rows if row.startswith("| ")]
    named = {
        each.rpartition(".")[2] for first in firsts for each in re.findall(r"`([\w.]+)`", first)
    }
    assert len(named) > 30
    assert named - known == set()
