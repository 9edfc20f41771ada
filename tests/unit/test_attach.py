"""The start with attached servers: some are down, silent or late, or serve another model."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from kvroute.local import attach
from kvroute.local.attach import Attached, AttachedFleet, attached
from kvroute.local.progress import StartProgress
from kvroute.machine.problem import StartError
from kvroute.process import ray_internals
from kvroute.replica.attached_engine import server_client as server_module
from kvroute.settings.serve import load
from tests.support.fake_vllm import BLOCK_SIZE, NAME, FakeServer, fake_servers


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    monkeypatch.setattr(server_module, "QUESTION_S", 0.5)
    with fake_servers(3) as three:
        yield three


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def start(
    servers: Sequence[FakeServer],
    output: io.StringIO,
    sleep: Callable[[float], object] = lambda seconds: None,
    *,
    within_s: float = 60.0,
    **options: object,
) -> Attached:
    progress = StartProgress(Console(file=output, soft_wrap=True))
    settings = load({"attach": [server.url for server in servers], **options})
    return attached(settings, progress, sleep, time.monotonic() + within_s)


def test_a_cluster_starts_with_the_servers_that_answer(
    servers: list[FakeServer], output: io.StringIO
) -> None:
    down, silent, up = servers
    silent.start()
    silent.freeze()
    up.start()
    found = start(servers, output)
    assert (found.model, found.settings.served_model_name) == (NAME, NAME)
    assert found.settings.block_size == BLOCK_SIZE
    assert found.settings.fleet_size == 3, "the others have replicas, which wait for them"
    assert found.reported.keys() == {down.url, silent.url}
    for lost in (down, silent):
        assert f"your server {lost.url} does not answer" in output.getvalue()


def test_a_start_waits_for_the_first_server_and_says_so_once(
    servers: list[FakeServer], output: io.StringIO
) -> None:
    waits = 0

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            servers[1].start()

    assert start(servers, output, sleep).model == NAME
    assert output.getvalue().count(servers[0].url) == 1


def test_without_any_server_a_start_ends_at_its_timeout(
    servers: list[FakeServer], output: io.StringIO
) -> None:
    with pytest.raises(StartError, match="none of your servers has answered"):
        start(servers, output, within_s=0)
    assert output.getvalue().count("does not answer") == len(servers)


def test_a_server_with_another_model_than_most_is_left_out(
    servers: list[FakeServer], output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "QUESTION_S", 60.0)
    servers[0].start("other")
    servers[1].start()
    servers[2].start()
    assert start(servers, output).model == NAME
    assert f"{servers[0].url} serves other, and this cluster serves {NAME}" in output.getvalue()


def test_a_block_size_that_no_server_has_is_refused(
    servers: list[FakeServer], output: io.StringIO
) -> None:
    servers[0].start()
    with pytest.raises(StartError, match=r"this cluster has 16; .* or leave out --block-size"):
        start(servers, output, block_size=16)


def test_a_changed_list_and_an_unreadable_one_do_not_end_a_running_cluster(
    tmp_path: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's controller is away at first, and Redis all the time."""
    file, sizes = tmp_path / "servers.txt", list[int]()

    def set_replicas(application: str, deployment: str, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 1:
            raise ValueError("there is no controller")

    monkeypatch.setattr(ray_internals, "set_replicas", set_replicas)
    monkeypatch.setattr(attach, "READ_INTERVAL_S", 0.0)
    file.write_text("http://a:1\n")
    settings = load({"attach_file": file})
    models = settings.resolve(redis_url="redis://127.0.0.1:1")
    fleet = AttachedFleet(settings, models, StartProgress(Console(file=output, soft_wrap=True)), {})
    for text in ("http://a:1\nhttp://b:1\n", "http://[::1\n", "http://a:1\nhttp://b:1\n"):
        file.write_text(text)
        for _ in range(2):
            fleet.follow()
    assert sizes == [2, 2]
    assert output.getvalue().count("the servers stay as they are") == 1
