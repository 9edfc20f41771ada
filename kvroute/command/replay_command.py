"""The command `kvroute replay`."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvroute.replay.output import check_folder
from kvroute.replay.profiles import DEFAULT_ENGINE, PROFILES, Profile, ProfileError, load_profile

DEFAULT_LOAD = 0.8


def replay(
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's format (JSON lines).")],
    replicas: Annotated[int, typer.Option(min=1, help="Engines to replay it on.")] = 16,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Profile of each engine: {', '.join(PROFILES)}; or a JSON file with your own "
            "numbers, as kvroute calibrate measures them.",
        ),
    ] = DEFAULT_ENGINE,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=512, help="KV cache of each, in tokens (default: the engine's)."),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help=f"Arrivals as a share of saturation, found by overload (default: {DEFAULT_LOAD}).",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(min=0.001, help="Arrivals as a multiple of the trace's, instead of --load."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policies to compare, comma-separated; or all.")
    ] = "kvroute",
    routers: Annotated[int, typer.Option(min=1, help="Routers, each with its own view.")] = 1,
    index_delay_ms: Annotated[
        float, typer.Option(min=0, help="From caching a block until routers know it.")
    ] = 10.0,
    share_delay_ms: Annotated[
        float, typer.Option(min=0, help="From a router's decision until other routers know it.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Only requests for this model, if the log has several.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many requests.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects instead of a table.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(callback=check_folder, help="File for a page with the same table and plots."),
    ] = None,
) -> None:
    """Replay a trace on modelled replicas and compare routing policies."""
    from rich.console import Console
    from rich.progress import Progress

    from kvroute.replay.compare import compare, saturation_rps
    from kvroute.replay.report import table
    from kvroute.replay.simulate import Cluster
    from kvroute.replay.trace import TraceError, at_speed, native_rps, read

    if load is not None and speed is not None:
        raise typer.BadParameter("--load and --speed exclude each other; give one of them")
    page = _page() if html else None
    names = _names(policy)
    profile = _profile(engine)
    cluster = Cluster(
        replicas,
        kv_tokens or profile.kv_tokens,
        routers,
        index_delay_ms / 1000,
        share_delay_ms / 1000,
        profile.engine(),
    )
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        recorded = read(trace, limit=limit, seed=seed, model=model)
        with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
            if speed is None:
                load = load or DEFAULT_LOAD
                saturation = saturation_rps(recorded, cluster, seed=seed, progress=progress)
                notes.print(f"saturation: {saturation:.2f} requests/s")
                speed = load * saturation / native_rps(recorded)
            rate = speed * native_rps(recorded)
            notes.print(f"arrivals: {rate:.2f} requests/s, {speed:.2f} x the trace's")
            requests = at_speed(recorded, speed)
            runs = compare(names, requests, cluster, seed=seed, progress=progress)
        if as_json:
            typer.echo(json.dumps([run.summary.row() for run in runs], indent=2))
        else:
            Console().print(table([run.summary for run in runs]))
        if html and page:
            pace = f"{load:.0%} of saturation" if load else f"{speed:g} times its own speed"
            title = f"{trace.name} on {replicas} replicas at {pace}"
            parameters = {
                "requests": len(requests),
                "requests_per_s": rate,
                "seed": seed,
                **asdict(cluster),
                **profile.model_dump(exclude={"kv_tokens"}),
                "engine": engine,
            }
            html.write_text(page(title, requests, runs, parameters))
    except (OSError, TraceError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None


def _page() -> Callable[..., str]:
    """Imported before the replay, which takes minutes."""
    try:
        from kvroute.replay.page import page
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"--html draws with {error.name}, which is not installed; pip install matplotlib"
        ) from None
    return page


def _profile(engine: str) -> Profile:
    try:
        return load_profile(engine)
    except ProfileError as error:
        raise typer.BadParameter(str(error)) from None


def _names(policy: str) -> list[str]:
    from kvroute.replay.policies import POLICIES

    names = list(POLICIES) if policy == "all" else [name.strip() for name in policy.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        known = ", ".join(POLICIES)
        raise typer.BadParameter(f"--policy names {unknown[0]!r}; known are {known} and all")
    return names
