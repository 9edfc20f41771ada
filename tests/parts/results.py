"""Results of parts, which are kept in the checkout's folder .parts/, and their table."""

import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tests.parts.counting import Counts
from tests.support.repository import ROOT

FOLDER = ROOT / ".parts"  # git ignores it
PAGE = ROOT / "docs" / "tests.md"
HEADING = "## The last complete run\n"  # the end of the page is generated
COLUMNS = ("part", "result", "tests", "passed", "failed", "skipped", "minutes", "CPU s")
HEAD = f"| {' | '.join(COLUMNS)} |\n|---|---{'|---:' * (len(COLUMNS) - 2)}|\n"
REASON_WIDTH = 160  # characters of a reason in the table


State = Literal["passed", "failed", "skipped", "interrupted"]


class Revision(msgspec.Struct, frozen=True):
    """What is checked out."""

    commit: str
    is_clean: bool  # whether nothing differs from the commit

    def __str__(self) -> str:
        return f"{self.commit}{'' if self.is_clean else ', with changes that are not committed'}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the last run of a part."""

    revision: Revision
    state: State
    exit_code: int
    wall_s: float
    cpu_s: float | None  # None: it cannot be measured here
    modules: dict[str, Counts] = {}  # none if the part has no tests for pytest
    why_skipped: str = ""  # the reason if the whole part cannot run

    @property
    def is_final(self) -> bool:
        """Return whether the part has passed, with the files of a commit."""
        return self.state == "passed" and self.revision.is_clean

    def tests(self) -> dict[str, str]:
        """Return what came of each test, by its id."""
        return {name: end for counts in self.modules.values() for name, end in counts.tests.items()}

    def failed(self) -> list[str]:
        return [name for name, end in self.tests().items() if end == "failed"]

    def reasons(self) -> Counter[str]:
        """Count the skipped tests by reason."""
        return Counter(end for end in self.tests().values() if end not in ("passed", "failed"))


def revision() -> Revision:
    """Return what is checked out now."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None or changes is None:
        return Revision("no commit", is_clean=False)
    return Revision(commit.strip(), is_clean=not changes)


def changed_since(commit: str) -> set[Path] | None:
    """Return the files that differ between a commit and what is checked out now.

    Returns None if this checkout does not have the commit.
    """
    names = _git("diff", "--name-only", "--no-renames", commit, "HEAD")
    return None if names is None else {ROOT / name for name in names.splitlines()}


def _git(*words: str) -> str | None:
    """Return the output of a git command; None: it has failed."""
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def load(part: str) -> Result | None:
    """Return the result of the part's last run, if there is one."""
    file = FOLDER / f"{part}.json"
    return msgspec.json.decode(file.read_bytes(), type=Result) if file.exists() else None


def save(part: str, result: Result) -> None:
    (FOLDER / f"{part}.json").write_bytes(msgspec.json.encode(result))


def table(results: Mapping[str, Result], commit: str) -> str:
    """Return a table in Markdown, with one of the skipped tests below it.

    A result of another commit than this one is marked.
    """
    rows = [_row(part, result, commit) for part, result in results.items()]
    tests = [end for result in results.values() for end in result.tests().values()]
    counts = Counter(end if end in ("passed", "failed") else "skipped" for end in tests)
    cpu_s = sum(result.cpu_s or 0.0 for result in results.values())
    wall_s = sum(result.wall_s for result in results.values())
    numbers = (len(tests), counts["passed"], counts["failed"], counts["skipped"])
    rows.append(_cells("all", "", *numbers, f"{wall_s / 60:.1f}", f"{cpu_s:.0f}"))
    return HEAD + "".join(rows) + _skipped(results)


def _row(part: str, result: Result, commit: str) -> str:
    tests, failed = result.tests(), len(result.failed())
    skipped = sum(result.reasons().values())
    numbers = (len(tests), len(tests) - failed - skipped, failed, skipped)
    cpu = "" if result.cpu_s is None else f"{result.cpu_s:.0f}"
    counts = numbers if tests else ("",) * len(numbers)
    state: str = result.state
    if result.revision.commit != commit:
        state += f" at {result.revision.commit[:8]}"
    if not result.revision.is_clean:
        state += ", with changed files"
    return _cells(part, state, *counts, f"{result.wall_s / 60:.1f}", cpu)


def _cells(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _skipped(results: Mapping[str, Result]) -> str:
    """Return a table with a row for each part with skipped tests."""
    rows = ""
    for part, result in results.items():
        reasons = [f"{count}: {_short(why)}" for why, count in result.reasons().items()]
        if result.why_skipped:
            reasons.append(_short(result.why_skipped))
        if reasons:
            rows += _cells(part, "; ".join(reasons))
    return f"\n| part | skipped tests, and why |\n|---|---|\n{rows}" if rows else ""


def _short(reason: str) -> str:
    """Return the reason's first line, shortened, for a cell of a table in Markdown."""
    line = next(iter(reason.splitlines()), "")[:REASON_WIDTH]
    return "".join(f"\\{each}" if each in "|<[`*_" else each for each in line)


def write_page(text: str) -> None:
    """Replace the end of docs/tests.md."""
    before, heading, _ = PAGE.read_text().partition(HEADING)
    assert heading, f"{PAGE} has no {HEADING!r}"
    PAGE.write_text(f"{before}{heading}\n{text}")


def modules(results: Mapping[str, Result]) -> str:
    """Return a table of all modules, the longest ones of each part first."""
    rows = [
        _cells(part, module, f"{counts.wall_s:.0f}", f"{counts.cpu_s:.0f}")
        for part, result in results.items()
        for module, counts in sorted(result.modules.items(), key=lambda item: -item[1].wall_s)
    ]
    return "| part | module | s | CPU s |\n|---|---|---:|---:|\n" + "".join(rows)
