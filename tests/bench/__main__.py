"""Runs all benchmarks and prints Markdown: `make bench`. Pass options as ARGS="--json FILE"."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tests.bench.apart import apart
from tests.bench.decision import decision
from tests.bench.dtype import dtype
from tests.bench.events import memory, rate
from tests.bench.keys import keys
from tests.bench.metrics import metrics
from tests.bench.order import order
from tests.bench.path import path
from tests.bench.policies import policies, policies_on_generated
from tests.bench.report import Section
from tests.bench.resize import resize
from tests.bench.routers import routers
from tests.bench.sizing import growth, streaming
from tests.bench.stream.tables import tables
from tests.bench.successor import successor

GENERATED = ("agents", "documents")  # generated traces, in addition to a recorded one


def main(
    trace: Annotated[
        Path | None,
        typer.Option(
            envvar="KVROUTE_BENCH_TRACE",
            help="A trace in Mooncake's format: adds tables of policies, in about half an hour.",
        ),
    ] = None,
    with_routers: Annotated[
        bool,
        typer.Option(
            "--routers", help="Adds clusters of 1, 2, 4 and 8 routers, in about half an hour."
        ),
    ] = False,
    with_successor: Annotated[
        bool,
        typer.Option(
            "--successor", help="Adds a new router's load of five million blocks, in a minute."
        ),
    ] = False,
    with_resize: Annotated[
        bool,
        typer.Option(
            "--resize", help="Adds a fleet that grows and shrinks by its load, in eight minutes."
        ),
    ] = False,
    with_sizing: Annotated[
        bool,
        typer.Option("--sizing", help="Adds the costs that grow with a fleet, in some minutes."),
    ] = False,
    with_dtype: Annotated[
        bool,
        typer.Option(
            "--dtype", help="Adds the built-in model in bfloat16 and float32, in some minutes."
        ),
    ] = False,
    with_order: Annotated[
        bool,
        typer.Option(
            "--order",
            help="Adds the cost of kvroute's order of eviction in vLLM's block pool, in a minute.",
        ),
    ] = False,
    with_stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Adds the costs of a streamed token and of a short request, in ten minutes.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file as JSON.")
    ] = None,
) -> None:
    if trace is not None and not trace.is_file():
        raise typer.BadParameter(
            f"--trace is {str(trace)!r}, which is not a file; expected a file in Mooncake's "
            "format, such as conversation_trace.jsonl of github.com/kvcache-ai/Mooncake"
        )
    report = []
    flags = (
        with_routers,
        with_successor,
        with_resize,
        with_sizing,
        with_dtype,
        with_order,
        with_stream,
    )
    for section in sections(trace, *flags):
        typer.echo(section.markdown() + "\n")
        report.append({"title": section.title, "rows": section.rows, "notes": [*section.notes]})
    if trace is None:
        typer.echo("The tables of policies are left out; `--trace FILE` adds them.")
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def sections(
    trace: Path | None,
    with_routers: bool,
    with_successor: bool,
    with_resize: bool,
    with_sizing: bool,
    with_dtype: bool,
    with_order: bool,
    with_stream: bool,
) -> Iterator[Section]:
    yield apart(decision)
    yield memory()
    yield rate()
    yield apart(path)
    yield metrics()
    yield keys()
    if with_routers:
        yield routers()
    if with_successor:
        yield apart(successor)
    if with_resize:
        yield resize()
    if with_sizing:
        yield growth()
        yield streaming()
    if with_dtype:
        yield apart(dtype)
    if with_order:
        yield apart(order)
    if with_stream:
        yield from apart(tables)
    if trace is not None:
        yield apart(policies, trace)
        yield from (apart(policies_on_generated, workload) for workload in GENERATED)


if __name__ == "__main__":
    typer.run(main)
