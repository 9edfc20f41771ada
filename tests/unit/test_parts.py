"""`make test-all` runs every test in exactly one part, and goes on where it stopped."""

import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import psutil
import pytest
import typer
from msgspec.json import encode
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.parts import __main__ as command
from tests.parts import results, running
from tests.parts.all_parts import PARTS, TIERS, Part, parts_table
from tests.parts.counting import COUNTS_FILE, Counts
from tests.parts.results import Result, Revision
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

RUNNER = CliRunner()
CLEAN, OTHER = Revision("c0ffee", is_clean=True), Revision("decade", is_clean=True)
CHANGED = Revision("c0ffee", is_clean=False)


def part(program: str) -> Part:
    return Part(about="does something", command=(sys.executable, "-c", program))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep results elsewhere, of a checkout without changes."""
    for module in (results, running, command):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    check_out(monkeypatch, CLEAN)
    return tmp_path


def check_out(monkeypatch: pytest.MonkeyPatch, revision: Revision) -> None:
    for module in (running, command):
        monkeypatch.setattr(module, "revision", lambda: revision)


def list_parts(monkeypatch: pytest.MonkeyPatch, folder: Path, *, codes: str) -> None:
    """Make parts "0", "1", ... that end with these exit codes and append a line to a file."""
    program = "open({file!r}, 'a').write({name!r}); raise SystemExit({code})"
    parts = {
        f"{number}": part(
            program.format(file=str(folder / "runs"), name=f"{number}", code=int(code))
        )
        for number, code in enumerate(codes)
    }
    monkeypatch.setattr(command, "PARTS", parts)


def make(folder: Path, *options: str) -> tuple[int, str, str]:
    """Return the exit code of a run, the parts that it ran, and its output."""
    (folder / "runs").unlink(missing_ok=True)
    app = typer.Typer()
    app.command()(command.main)
    done = RUNNER.invoke(app, options)
    runs = folder / "runs"
    return done.exit_code, runs.read_text() if runs.exists() else "", done.output


def test_every_module_of_tests_belongs_to_exactly_one_part() -> None:
    owners = Counter(
        module for part in PARTS.values() if part.owns_tests for module in part.modules()
    )
    assert {*owners} == {*(ROOT / "tests").rglob("test_*.py")}
    assert [str(module) for module, count in owners.items() if count > 1] == []


def test_the_first_parts_are_make_test() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    tiers = [f"tests/{name}" for part in TIERS.values() for name in part.tests]
    assert tiers == settings["testpaths"]
    assert [*PARTS][: len(TIERS)] == [*TIERS]


def test_every_part_is_in_the_page_about_tests() -> None:
    assert parts_table() in results.PAGE.read_text()


def test_a_run_goes_on_with_the_parts_that_have_not_passed(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    list_parts(monkeypatch, folder, codes="020")
    assert make(folder)[:2] == (2, "012")
    assert make(folder)[:2] == (2, "1")
    list_parts(monkeypatch, folder, codes="000")
    assert make(folder)[:2] == (0, "1")
    assert make(folder)[:2] == (0, "")
    assert make(folder, "--again", "0", "2")[:2] == (0, "02")


def test_parts_run_again_at_another_commit_or_with_changed_files(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    list_parts(monkeypatch, folder, codes="0")
    for revision in (CLEAN, OTHER, CHANGED, CHANGED, CLEAN):
        check_out(monkeypatch, revision)
        assert make(folder)[:2] == (0, "0")
    assert make(folder)[:2] == (0, "")


def test_a_part_keeps_its_result_while_only_tests_of_other_parts_change(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    list_parts(monkeypatch, folder, codes="0")
    runs = next(iter(PARTS["queues"].modules()))
    others = PARTS["access"].modules()
    for changed, repeats in (
        (others, False),
        ({*others, runs}, True),
        ({ROOT / "README.md"}, True),
        ({ROOT / "tests/support/waiting.py"}, True),
        (None, True),  # this checkout does not know the commit of the result
    ):
        monkeypatch.setattr(command, "changed_since", lambda _, files=changed: files)
        check_out(monkeypatch, CLEAN)
        make(folder, "--again")
        monkeypatch.setattr(Part, "modules", lambda _, runs=runs: {runs})
        check_out(monkeypatch, OTHER)
        _, ran, output = make(folder)
        assert ran == ("0" if repeats else "")
        assert "| 0 | passed |" in output if repeats else "| 0 | passed at c0ffee |" in output


def test_a_part_that_reads_all_files_keeps_no_result() -> None:
    test = {ROOT / "tests/slow/image/test_running.py"}
    assert PARTS["queues"].cannot_notice(test)
    assert not PARTS["image"].cannot_notice(test)
    assert not PARTS["unit"].cannot_notice(test)


def test_a_run_ends_with_a_table_of_the_parts_at_this_commit(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    list_parts(monkeypatch, folder, codes="00")
    assert "| 0 | passed |" in make(folder, "0")[2]
    _, runs, output = make(folder, "1")
    assert runs == "1"
    assert "| 0 | passed |" not in output
    assert "| 1 | passed |" in output
    assert "| 1 | passed |" in make(folder, "--table")[2]


def test_only_a_table_in_which_all_parts_have_passed_is_written(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    page = folder / "tests.md"
    page.write_text(f"Before.\n\n{results.HEADING}\nThe old table.\n")
    monkeypatch.setattr(results, "PAGE", page)
    list_parts(monkeypatch, folder, codes="00")
    skipped = Result(revision=CLEAN, state="skipped", exit_code=0, wall_s=0.0, cpu_s=None)
    for incomplete in ("not run", "skipped", "with changes"):
        make(folder, "0")
        if incomplete == "skipped":
            results.save("1", skipped)
        elif incomplete == "with changes":
            results.save("1", replace(skipped, revision=CHANGED, state="passed"))
        code, _, output = make(folder, "--table", "--write")
        assert (code, "not written" in output) == (1, True), incomplete
        assert "The old table." in page.read_text()
    assert make(folder, "--write")[:2] == (0, "1")
    assert page.read_text().startswith("Before.\n\n")
    assert "| 1 | passed |" in page.read_text()
    assert "The old table." not in page.read_text()


def test_tests_are_counted_by_module_with_the_reasons_of_skipped_ones(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (folder / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): raise ValueError\n"
        "def test_broken_after(request): request.addfinalizer(lambda: 1 / 0)\n"
        "def test_skipped(): pytest.skip('no GPU')\n"
    )
    options = ("-p", "no:cacheprovider", f"--rootdir={folder}", "--numprocesses=0")
    counted = Part(about="counts", tests=(f"{folder}/test_some.py",), options=options)
    result = running.run("counted", counted)
    assert (result.state, result.exit_code, result.revision) == ("failed", 1, CLEAN)
    assert sorted(result.tests().values()) == ["failed", "failed", "no GPU", "passed"]
    (counts,) = result.modules.values()
    assert counts.wall_s > 0
    results.save("counted", result)
    text = results.table({"counted": results.load("counted") or result}, CLEAN.commit)
    assert "| counted | failed | 4 | 1 | 2 | 1 |" in text
    assert "| counted | 1: no GPU |" in text


def test_a_part_whose_tests_are_all_skipped_is_skipped(folder: Path) -> None:
    counts = {"test_some.py": Counts(tests={"test_some.py": "needs root"})}
    nothing_collected = 5  # pytest's exit code if each module is skipped
    program = (
        f"import os; open(os.environ[{COUNTS_FILE!r}], 'wb').write({encode(counts)!r});"
        f"raise SystemExit({nothing_collected})"
    )
    result = running.run("skipped", part(program))
    assert (result.state, result.exit_code) == ("skipped", 0)
    assert "| skipped | 1: needs root |" in results.table({"skipped": result}, CLEAN.commit)


def test_a_part_that_ends_leaves_no_process(folder: Path) -> None:
    program = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000'], start_new_session=True);"
        "print(child.pid)"
    )
    result: Result = running.run("leaves", part(program))
    pid = int((folder / "leaves.log").read_text())
    assert result.state == "passed"
    assert not psutil.pid_exists(pid)


def test_ctrl_c_ends_the_part_and_what_it_started(folder: Path) -> None:
    waits = folder / "waits"
    program = (
        "import subprocess, pathlib;"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True);"
        f"pathlib.Path({str(waits)!r}).write_text(str(child.pid)); child.wait()"
    )
    runner = (
        "import signal; from pathlib import Path; from tests.parts import running;"
        "from tests.parts.all_parts import Part;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # ignored in the background
        f"running.FOLDER = Path({str(folder)!r});"
        f"part = Part(about='waits', command=({sys.executable!r}, '-c', {program!r}));"
        "print(running.run('waits', part).state)"
    )
    process = subprocess.Popen(
        (sys.executable, "-c", runner), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: waits.exists() and waits.read_text())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert "interrupted" in output
    assert not psutil.pid_exists(int(waits.read_text()))
