"""Draws docs/ui.png, the picture of the live page, from a running cluster (`make ui-picture`)."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.picture.conversations import declare, talk
from tests.support.browser import Page, page
from tests.support.repository import ROOT
from tests.support.serving import start_cluster

CLUSTER = ("--engine", "simulated", "--replicas", "2")
WIDTH = 1280  # pixels of the picture
READY = "document.querySelectorAll('#decisions details').length > 0"


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.picture", description=__doc__)
    options.add_argument("--url", help="a running cluster; without it one is started")
    options.add_argument(
        "--seconds", type=float, default=300, help="of requests before the picture"
    )
    options.add_argument("--file", type=Path, default=ROOT / "docs" / "ui.png")
    given = options.parse_args()
    if given.url:
        draw(given.url, given.seconds, given.file)
        return
    with start_cluster(*CLUSTER) as cluster:
        draw(cluster.url, given.seconds, given.file)


def draw(url: str, seconds: float, file: Path) -> None:
    """Send requests for some time, and take the picture while they go on."""
    with page() as shown:
        asyncio.run(_talk_and_look(url, seconds, lambda: _take(shown, url, file)))
    assert shown.errors == [], shown.errors


async def _talk_and_look(url: str, seconds: float, look: Callable[[], None]) -> None:
    await declare(url)
    talking = asyncio.create_task(talk(url, 2 * seconds))
    await asyncio.sleep(seconds)
    await asyncio.to_thread(look)
    talking.cancel()


def _take(shown: Page, url: str, file: Path) -> None:
    shown.open(f"{url}/ui", width=WIDTH)
    shown.wait_for(READY)
    height = shown.evaluate("document.querySelector('.decisions').offsetTop")
    file.write_bytes(shown.picture(height=height))


if __name__ == "__main__":
    main()
