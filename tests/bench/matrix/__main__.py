"""Compares kvroute with the best rival in each cell: `make bench-policies ARGS="--help"`.

A cell is a combination of a trace, an engine, a load and a size of the caches (cells.py). A rival
is another routing policy. Times are modelled, so that results depend only on the code and the seed.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from kvroute.replay.policies.production import POLICIES
from tests.bench.matrix.cells import CELLS, Cell
from tests.bench.matrix.runs import Result, measure, saturation
from tests.bench.matrix.table import compared, compared_sessions
from tests.bench.matrix.workloads import FILES, Files
from tests.bench.report import Section

# In nearly all cells, the best rival is one of these.
RIVALS = "llm-d,llm-d-requests,llm-d-blend,sglang,dynamo-wspt,lmetric"
RIVALS_OF_SLOW = ["least-loaded"]  # additional rivals in cells with slow replicas

Run = tuple[str, str, int]  # cell, policy and seed


def main(
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help=f"A recorded trace instead of a generated one: {', '.join(FILES)}.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Cells whose name has all of these words, such as 'agents 95%'; may be repeated."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies of kvroute, comma-separated.")] = "kvroute",
    rivals: Annotated[
        str, typer.Option(help="Policies to compare with, comma-separated.")
    ] = RIVALS,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of seeds in a cell.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file.")
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            help="A file of --json with the same traces: saturations and rivals are taken from "
            "there, so that a changed policy meets the same arrivals.",
            exists=True,
        ),
    ] = None,
    list_cells: Annotated[bool, typer.Option("--list", help="Print the cells' names.")] = False,
) -> None:
    cells = [cell for cell in CELLS if matches(str(cell), only or [])]
    if list_cells:
        typer.echo("\n".join(f"{cell}, {len(cell.seeds)} seeds" for cell in cells))
        return
    ours, theirs = _policies(policy), _policies(rivals)
    files = _files(trace or [])
    before = json.loads(earlier.read_text()) if earlier else {"saturations": {}, "results": []}
    reused = [Result(**row) for row in before["results"] if row["policy"] not in ours]
    saturations: dict[str, float] = before["saturations"]
    results: list[Result] = []
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    try:
        for name, saturation_rps in _saturations(pool, cells, files, saturations):
            saturations[name] = saturation_rps
        runs = _runs(cells, ours, theirs, seeds)
        results += [result for result in reused if _run_of(result) in runs]
        results += _measured(pool, runs, reused, files, saturations)
    finally:  # so that --earlier can continue a run that was stopped
        pool.shutdown(cancel_futures=True)
        if json_file:
            report = {"saturations": saturations, "results": [result.row() for result in results]}
            json_file.write_text(json.dumps(report, indent=1) + "\n")
    for title, rows in (
        ("First tokens", compared(results, ours)),
        ("Sessions", compared_sessions(results, ours)),
    ):
        if rows:
            section = Section(f"{title}: ratios to the best rival, the worst cell first", rows)
            typer.echo(section.markdown() + "\n")


def matches(name: str, only: Sequence[str]) -> bool:
    """Return whether a cell is selected: its name has all words of one of the filters."""
    words = name.split()
    return not only or any(set(filter_.split()) <= {*words} for filter_ in only)


def _saturations(
    pool: ProcessPoolExecutor, cells: Sequence[Cell], files: Files, measured: Collection[str]
) -> Iterator[tuple[str, float]]:
    """Yield the saturation of each cell that has a load, with the cell's name at saturation.

    The names in `measured` are left out.
    """
    needed = {str(cell.at_saturation): cell.at_saturation for cell in cells if cell.load}
    running = {
        pool.submit(saturation, cell, files): name
        for name, cell in needed.items()
        if name not in measured
    }
    for future in _watched(running, lambda future: f"{running[future]}: {future.result():.3f}/s"):
        yield running[future], future.result()


def _runs(
    cells: Sequence[Cell], ours: Sequence[str], theirs: Sequence[str], seeds: int | None
) -> dict[Run, Cell]:
    """Return the cell of each run, sorted by cell."""
    return {
        (str(cell), policy, seed): cell
        for cell in cells
        for seed in cell.seeds[:seeds]
        for policy in dict.fromkeys([*ours, *theirs, *(RIVALS_OF_SLOW if cell.is_slow else [])])
    }


def _run_of(result: Result) -> Run:
    return result.cell, result.policy, result.seed


def _measured(
    pool: ProcessPoolExecutor,
    runs: Mapping[Run, Cell],
    reused: Sequence[Result],
    files: Files,
    saturations: Mapping[str, float],
) -> Iterator[Result]:
    """Yield the results of the runs that have no reused result, as soon as they are done."""
    done = {_run_of(result) for result in reused}
    futures = [
        pool.submit(measure, cell, policy, seed, files, saturations)
        for (name, policy, seed), cell in runs.items()
        if (name, policy, seed) not in done
    ]
    for future in _watched(futures, lambda future: _line(future.result())):
        yield future.result()


def _watched(
    futures: Sequence[Future[Any]] | Mapping[Future[Any], str],
    described: Callable[[Future[Any]], str],
) -> Iterator[Future[Any]]:
    """Yield the futures as soon as they are done, and print their descriptions."""
    begun_s = time.monotonic()
    for done, future in enumerate(as_completed(futures), 1):
        after = f"{time.monotonic() - begun_s:4.0f} s, {done} of {len(futures)}"
        print(f"{after}: {described(future)}", file=sys.stderr, flush=True)
        yield future


def _line(result: Result) -> str:
    times = " / ".join(
        f"{time_s:.2f}" for time_s in (result.ttft_p50_s, result.ttft_p90_s, result.ttft_p99_s)
    )
    return f"{result.cell}, {result.policy}, seed {result.seed}: {times} s, {result.hit_share:.3f}"


def _policies(names: str) -> list[str]:
    policies = [name.strip() for name in names.split(",")]
    if unknown := [name for name in policies if name not in POLICIES]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not a policy; choose among {', '.join(POLICIES)}"
        )
    return policies


def _files(given: Sequence[str]) -> dict[str, Path]:
    files = {}
    for option in given:
        name, _, file = option.partition("=")
        if name not in FILES or not Path(file).is_file():
            raise typer.BadParameter(
                f"--trace is {option!r}; expected NAME=FILE, with a name of {', '.join(FILES)}, "
                "and a file in Mooncake's format"
            )
        files[name] = Path(file)
    return files


if __name__ == "__main__":
    typer.run(main)
