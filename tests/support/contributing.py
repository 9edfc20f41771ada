"""The pages for contributors. Most have an example as a diff, and commands that check it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.documents import ROOT, blocks, commands

PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
# Pages with an example that changes the code as it is now. That of engine-hook was a change for an
# earlier vLLM. Feature names a feature of kvroute as its example, and release needs none.
EXAMPLES = [page for page in PAGES if page.stem not in ("engine-hook", "feature", "release")]
PYTHON = ".venv/bin/python"
# A line that git shows as the heading of a hunk below it: it is not indented.
TITLE = re.compile(r"[A-Za-z_$]")
FOLDERS = (
    *("kvroute", "replica", "router", "tests", "docs", "dashboards", "deploy"),
    *("requirements", "scripts"),
)
FILES = ("*.md", "*.yaml", "mkdocs.yml", "LICENSE", "Makefile", "pyproject.toml")
IGNORED = shutil.ignore_patterns("__pycache__", ".*_cache")


def copy_checkout(folder: Path) -> None:
    """Copy the files of this checkout that the pages' commands need."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=IGNORED)
    for pattern in FILES:
        for file in ROOT.glob(pattern):
            shutil.copy(file, folder)


def changes(page: Path) -> dict[str, str]:
    """Return the page's example, if it has one: path of a changed file -> diff."""
    example = "".join(block.text for block in blocks(page) if block.language == "diff")
    parts = re.split(r"^(?=--- a/)", example, flags=re.MULTILINE)
    return {part.splitlines()[0].removeprefix("--- a/"): part for part in parts if part}


def writing_commands(page: Path) -> list[str]:
    """Return the page's commands that generate files."""
    return _commands(page)[:-1]


def apply_example(page: Path, folder: Path, *, without: str = "") -> None:
    """Change a copy of the checkout as the page does.

    Args:
        page: The page.
        folder: The copy of the checkout.
        without: The path of a file that is not changed, or a command that is not run.
    """
    for path, change in changes(page).items():
        if path != without:
            _succeed(["git", "apply", "-"], folder, change)
    write_files(page, folder, without=without)


def check_that_it_fits(page: Path) -> None:
    """Fail if the page's changes cannot be applied to this checkout."""
    for change in changes(page).values():
        _succeed(["git", "apply", "--check", "-"], ROOT, change)


def wrong_headings(page: Path) -> list[str]:
    """Return the headings of hunks in Python files that name another place than the changed one."""
    wrong = []
    for path, change in changes(page).items():
        if not path.endswith(".py"):
            continue
        lines = (ROOT / path).read_text().splitlines()
        for hunk in re.split(r"^(?=@@ )", change, flags=re.MULTILINE)[1:]:
            heading, *body = hunk.splitlines()
            old = [line[1:] for line in body if not line.startswith("+")]
            places = [at for at in range(len(lines)) if lines[at : at + len(old)] == old]
            titles = [next(filter(TITLE.match, reversed(lines[:at])), "") for at in places]
            named = heading.split("@@")[2].strip()
            if not any(title.startswith(named) for title in titles):
                wrong.append(f"{path}: {heading}; it is one of {titles}")
    return wrong


def undo_example(page: Path, folder: Path) -> None:
    """Undo the page's change in a copy of the checkout."""
    for change in changes(page).values():
        _succeed(["git", "apply", "--reverse", "-"], folder, change)


def write_files(page: Path, folder: Path, *, without: str = "") -> None:
    """Run the page's commands that generate files."""
    for command in writing_commands(page):
        if command != without:
            _succeed(_arguments(command), folder)


def check(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the page's last command, which checks the change."""
    return _run(_arguments(check_command(page)), folder)


def check_command(page: Path) -> str:
    """Return the page's last command."""
    return _commands(page)[-1]


def lint(page: Path, folder: Path) -> None:
    """Check that the formatter and the linter accept the files of the example."""
    files = [path for path in changes(page) if path.endswith(".py")]
    for verb in (["format", "--check"], ["check"]):
        _succeed([sys.executable, "-m", "ruff", *verb, "--no-cache", *files], folder)


def _commands(page: Path) -> list[str]:
    (shell,) = (block.text for block in blocks(page) if block.language == "sh")
    return list(commands(shell))


def _arguments(command: str) -> list[str]:
    python, *arguments = command.split()
    assert python == PYTHON, command
    return [sys.executable, *arguments]


def _succeed(command: list[str], folder: Path, given: str | None = None) -> None:
    done = _run(command, folder, given)
    assert done.returncode == 0, output(done)


def _run(
    command: list[str], folder: Path, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        input=given,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
    )


def output(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a command has printed."""
    return done.stdout[-3000:] + done.stderr[-2000:]
