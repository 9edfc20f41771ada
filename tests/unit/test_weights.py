"""The digest of weights: it covers all bytes, and is computed once per machine."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvroute.replica.fabric import weights as module
from kvroute.replica.fabric.weights import UnknownWeightsError, Weights

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model, one byte of which may differ."""

    def create(name: str, *, differs_at: int | None = None) -> Path:
        folder, content = tmp_path / name, bytearray(SIZE)
        if differs_at is not None:
            content[differs_at] = 1
        folder.mkdir()
        (folder / "model-1.safetensors").write_bytes(bytes(SIZE))
        (folder / "model-2.safetensors").write_bytes(content)
        (folder / "config.json").write_text("{}")
        return folder

    return create


def digest_of(folder: Path) -> str:
    return Weights(str(folder)).computed()


@pytest.mark.parametrize("place", [0, 5_000, SIZE // 2 + 1, SIZE - 1])
def test_models_that_differ_in_one_byte_have_different_digests(
    model: Callable[..., Path], place: int
) -> None:
    first, same, other = model("a"), model("b"), model("c", differs_at=place)
    assert digest_of(first) == digest_of(same) != digest_of(other)
    weights = "model-2.safetensors"
    assert digest_of(first / weights) != digest_of(other / weights)  # such as a GGUF file


def test_a_file_is_read_once_until_it_changes(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = model("a"), list[str]()
    original = Weights._read

    def noted(self: Weights, path: Path) -> str:
        read.append(path.name)
        return original(self, path)

    monkeypatch.setattr(Weights, "_read", noted)
    first = digest_of(folder)
    assert digest_of(folder) == first
    assert read == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    changed = folder / "model-2.safetensors"
    before = changed.stat()
    changed.write_bytes(bytes(SIZE - 1) + b"1")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `rsync --times` does
    assert digest_of(folder) != first
    assert read[3:] == ["model-2.safetensors"]


def test_weights_that_change_while_the_engine_reads_them_are_unknown(
    model: Callable[..., Path],
) -> None:
    folder = model("a")
    weights = Weights(str(folder))
    (folder / "model-1.safetensors").write_bytes(b"others")
    with pytest.raises(UnknownWeightsError, match=r"model-1\.safetensors has changed since"):
        weights.computed()


@pytest.mark.parametrize("name", ["no/such-model", "s3://bucket/model", "empty"])
async def test_weights_that_are_not_on_this_machine_are_unknown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    weights = Weights(name)
    weights.start()
    with caplog.at_level(logging.WARNING):
        assert await weights.known() == ""
    assert f"the weights of {name} are not on this machine" in caplog.text
    assert Weights("empty", are_random=True).computed()


async def test_the_digest_is_found_out_in_the_background(
    model: Callable[..., Path], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    weights = Weights(str(model("a")))
    weights.start()
    assert weights.digest is None
    assert await weights.known() == weights.digest == digest_of(Path(weights._model))
    stopped = Weights(str(model("b")))
    stopped.stop()
    stopped.start()
    assert await asyncio.wait_for(stopped.known(), 10) == ""


def test_files_are_read_again_if_what_was_kept_cannot_be_used(
    model: Callable[..., Path], state: Path
) -> None:
    folder = model("a")
    first = digest_of(folder)
    for kept in (state / "kvroute/weights").iterdir():
        kept.write_bytes(b"damaged")
    assert digest_of(folder) == first
    shutil.rmtree(state)
    state.write_text("not a folder")
    assert digest_of(folder) == first
