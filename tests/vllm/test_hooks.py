"""The installed vLLM has what kvroute uses of it: an upgrade begins with this list."""

import importlib
import re
from collections.abc import Iterator

import pytest

from kvroute.process import vllm_build
from kvroute.replica.vllm_engine import hooks, optional_parts
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
    assert hooks.problems(listed()) == []


def test_names_that_moved_are_found() -> None:
    compat = importlib.import_module("kvroute.replica.vllm_engine.compat")
    assert all(callable(getattr(compat, name)) for name in compat.__all__)
    assert vllm_build.problem(vllm_build.installed_version()) == ""


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the installed version of vLLM be one that was not tested."""
    caches = (optional_parts.misfit, optional_parts.misfit_of_the_rest)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(vllm_build, "TESTED", ("none",))
    yield
    for cached in caches:
        cached.cache_clear()


MODULES = [(module, hook) for module, hooks_ in hooks.by_module().items() for hook in hooks_]


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize(("module", "hook"), MODULES, ids=[name_of(hook) for _, hook in MODULES])
def test_each_broken_hook_switches_its_part_off(
    module: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that no part has for itself switches all of kvroute's changes off."""
    name = name_of(hook)
    monkeypatch.setattr(optional_parts, "by_module", lambda: {module: [hook]})
    original = hooks._object

    def without(wanted: str) -> object:
        if wanted == name.removesuffix(hooks.ALL):
            raise GoneError(wanted)
        return original(wanted)

    monkeypatch.setattr(hooks, "_object", without)
    expected = {
        part: f"{name} is gone"
        for part in optional_parts.OPTIONAL_PARTS
        if module.startswith(part.modules)
    }
    assert optional_parts.misfits() == expected
    assert optional_parts.misfit_of_the_rest() == ("" if expected else f"{name} is gone")


@pytest.mark.usefixtures("untested")
def test_all_parts_are_on_if_all_hooks_fit() -> None:
    assert optional_parts.misfits() == {}
    assert optional_parts.misfit_of_the_rest() == ""
    for part in optional_parts.OPTIONAL_PARTS:
        assert any(module.startswith(part.modules) for module in hooks.by_module())


@pytest.mark.parametrize("number", range(len(optional_parts.OPTIONAL_PARTS) + 1))
def test_every_part_that_is_off_is_named_however_long_the_reasons_are(number: int) -> None:
    off = dict.fromkeys(optional_parts.OPTIONAL_PARTS[:number], "a reason" * 200)
    text = optional_parts.described(off, 1000)
    assert len(text) <= 1000
    assert all(f"{part.name}: off, because a reason" in text for part in off)


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
