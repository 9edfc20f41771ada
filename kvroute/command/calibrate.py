"""The command `kvroute calibrate`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.replay.output import check_folder

if TYPE_CHECKING:
    from kvroute.replay.calibration.fit import Fit


def calibrate(
    url: Annotated[str, typer.Option(help="The cluster's URL.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Name of the model (default: the cluster's only one).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            callback=check_folder, help="File for the profile (default: standard output)."
        ),
    ] = None,
) -> None:
    """Measure the speed of a running cluster, as a profile for `kvroute replay --engine`.

    The command sends prompts of random tokens, first one at a time, then
    several at once. The prompts grow until they do not fit or take a few
    seconds. The replay's engine model is fitted to the times of their tokens.
    The cluster should have no other requests.

    chunk_tokens and max_sequences cannot be measured from outside, so they
    keep the defaults of kvroute replay.
    """
    from rich.console import Console
    from rich.progress import Progress

    from kvroute.replay.calibration.fit import FitError, fit
    from kvroute.replay.calibration.measure import ClusterError, measure
    from kvroute.replay.calibration.profiles import Profile

    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
            measured = asyncio.run(measure(url, model, progress))
        fitted = fit(measured.prefills, measured.decodes)
        profile = Profile.of(fitted.engine, measured.kv_tokens).model_dump_json(indent=2)
        if output:
            output.write_text(profile + "\n")
    except (ClusterError, FitError, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    notes.print(_findings(fitted, len(measured.prefills), len(measured.decodes)))
    if measured.foreign_requests > 0:
        notes.print(
            f"{measured.foreign_requests} other requests ran at the same time, so the figures are "
            "those of a busy cluster; measure again when the cluster is idle",
            style="yellow",
        )
    if output is None:
        typer.echo(profile)


def _findings(fitted: "Fit", lengths: int, batches: int) -> str:
    engine = fitted.engine
    return "\n".join(
        (
            f"prefill: {engine.prefill.tokens_per_s:.0f} tokens/s at a prompt's start, "
            f"half of that after {engine.prefill.attention_tokens:.0f} tokens",
            f"decode step: {1e3 * engine.step_s:.2f} ms, and {1e3 * engine.sequence_s:.3f} ms for "
            f"each sequence, and {1e9 * engine.context_token_s:.1f} ns for each token of context",
            f"outside of the engine: {1e3 * fitted.overhead_s:.1f} ms until a first token",
            f"residual error (root mean square): {fitted.prefill_error:.1%} over {lengths} prompt "
            f"lengths, {fitted.decode_error:.1%} over {batches} batches",
        )
    )
