"""Run all tests in parts, and go on where the last run stopped: `make test-all`.

Results are kept in .parts/ with the commit. Parts that passed at this commit are not run again, and
neither are those that passed at another one if only tests of other parts have changed since. If
files differ from the commit, results are kept, but every run repeats the parts.
"""

import signal
from typing import Annotated

import typer

from tests.parts.all_parts import PARTS, Part
from tests.parts.results import (
    FOLDER,
    Result,
    Revision,
    changed_since,
    load,
    modules,
    revision,
    save,
    table,
    write_page,
)
from tests.parts.running import INTERRUPTED, run


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Parts to run; else all.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also run parts that passed at this commit.")
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the parts, and run none.")
    ] = False,
    only_table: Annotated[
        bool, typer.Option("--table", help="Print the table of this commit, and run nothing.")
    ] = False,
    only_modules: Annotated[
        bool, typer.Option("--modules", help="Print the last times of each module; run nothing.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write the table of a complete run to docs/tests.md.")
    ] = False,
) -> None:
    chosen = names or [*PARTS]
    if unknown := {*chosen} - {*PARTS}:
        raise typer.BadParameter(f"no such part: {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    FOLDER.mkdir(exist_ok=True)
    if only_list:
        typer.echo(_listed(chosen), nl=False)
    elif only_modules:
        typer.echo(modules(_last(chosen)), nl=False)
    elif only_table:
        raise typer.Exit(_report(chosen, write=write))
    else:
        is_interrupted = _run(chosen, again=again)
        worst = _report(chosen, write=write and not is_interrupted)
        raise typer.Exit(INTERRUPTED if is_interrupted else worst)


def _run(names: list[str], *, again: bool) -> bool:
    """Run the parts that have not passed at this commit; return whether the user ended the run."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    if not revision().is_clean:
        typer.echo("Files differ from the commit, so the next run will repeat these parts.")
    for number, name in enumerate(names, start=1):
        part = PARTS[name]
        if not again and _has_passed(load(name), part, revision()):
            continue
        needs = f" Needs {part.needs}." if part.needs else ""
        typer.secho(f"== {name} ({number}/{len(names)}): {part.about}.{needs}", bold=True)
        result = run(name, part)
        save(name, result)
        typer.secho(f"== {name}: {result.state}, {result.wall_s / 60:.1f} min", bold=True)
        if result.state == "interrupted":
            return True
    return False


def _has_passed(result: Result | None, part: Part, now: Revision) -> bool:
    """Return whether the part passed with these files, so that it need not run again."""
    return result is not None and result.is_final and now.is_clean and _holds(result, part, now)


def _holds(result: Result, part: Part, now: Revision) -> bool:
    """Return whether the part cannot have another result at this commit than at the result's."""
    then = result.revision.commit
    if then == now.commit:
        return True
    changed = changed_since(then)
    return changed is not None and part.cannot_notice(changed)


def _last(names: list[str]) -> dict[str, Result]:
    """Return the last result of each part that has one."""
    return {name: result for name in names if (result := load(name))}


def _report(names: list[str], *, write: bool) -> int:
    """Print the table of this commit's results; return the worst exit code.

    With `write`, the table is also written to docs/tests.md, if all parts have passed.
    """
    now = revision()
    results = {
        name: result for name, result in _last(names).items() if _holds(result, PARTS[name], now)
    }
    text = f"Commit {now}.\n\n{table(results, now.commit)}"
    typer.echo(f"\n{text}", nl=False)
    for name, result in results.items():
        for failed in result.failed():
            typer.echo(f"failed in {name}: {failed}")
    if missing := [name for name in names if name not in results]:
        typer.echo(f"not run at this commit: {', '.join(missing)}")
    worst = max((result.exit_code for result in results.values()), default=0)
    if write:
        has_all = results.keys() == PARTS.keys()
        if has_all and all(result.is_final for result in results.values()):
            write_page(text)
        else:
            typer.echo("not written to docs/tests.md, since not all parts have passed at a commit")
            return worst or 1
    return worst


def _listed(names: list[str]) -> str:
    """Return a line for each part: its name, how long it took here, and what it is."""
    lines = []
    for name in names:
        part, result = PARTS[name], load(name)
        took = f"{result.wall_s / 60:.1f} min" if result else ""
        needs = f"; needs {part.needs}" if part.needs else ""
        lines.append(f"{name:24}{took:>9}  {part.about}{needs}\n")
    return "".join(lines)


if __name__ == "__main__":
    typer.run(main)
