"""Check that this machine has what kvroute needs, before anything is downloaded.

`scripts/setup.sh` runs it as `python3 scripts/check_machine.py cpu` (or `gpu`), with any Python
from 3.11 on. The needs are in `requirements/machine-cpu.txt` and `machine-gpu.txt`, which
`scripts/read_wheels.py` writes from the locked wheels. As root on Debian or Ubuntu, it installs
missing packages; otherwise it prints the command that does. The exit code is 1 if something is
still missing.
"""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GB = 1e9
# Memory in GB for `make serve`: two vLLM replicas with the built-in model. The README names it,
# too.
SERVE_MEMORY_GB = 7
SHM_GB = 0.2  # size of /dev/shm in GB that the Ray of `kvroute serve` needs for its objects


@dataclass(frozen=True)
class Lack:
    """Something that the machine does not have."""

    what: str  # its name in messages
    packages: tuple[str, ...] = ()  # Debian packages that contain it; empty if none does


@dataclass(frozen=True)
class Needs:
    """What the locked packages of one profile need from the machine."""

    installed_gb: float  # size of the complete .venv in GB
    glibc: tuple[int, ...]  # oldest version of the C library that the wheels support
    libraries: dict[str, tuple[str, ...]]  # shared library -> Debian packages that contain it
    commands: dict[str, tuple[str, ...]]  # command -> Debian packages that contain it
    headers: dict[str, tuple[str, ...]]  # C header of Python -> Debian packages that contain it


def read_needs(profile: str) -> Needs:
    """Read requirements/machine-PROFILE.txt."""
    lines = (ROOT / "requirements" / f"machine-{profile}.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]

    def named(kind: str) -> dict[str, tuple[str, ...]]:
        return {name: tuple(packages) for row, name, *packages in rows if row == kind}

    (installed_gb,), (glibc,) = named("installed-gb"), named("glibc")
    return Needs(
        installed_gb=float(installed_gb),
        glibc=tuple(map(int, glibc.split("."))),
        libraries=named("library"),
        commands=named("command"),
        headers=named("header"),
    )


def missing_packages(needs: Needs) -> Iterator[Lack]:
    """Yield missing libraries, commands and Python modules that a system package contains."""
    for library, packages in needs.libraries.items():
        if not can_load(library):
            yield Lack(f"the shared library {library}", packages)
    for command, packages in needs.commands.items():
        if shutil.which(command) is None:
            yield Lack(f"the command {command}", packages)
    for header, packages in needs.headers.items():
        if not Path(sysconfig.get_path("include"), header).exists():
            yield Lack(f"Python's C header {header}", tuple(map(of_this_python, packages)))
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        yield Lack("Python's venv module", (of_this_python("python3-venv"),))


def of_this_python(package: str, default: Path = Path("/usr/bin/python3")) -> str:
    """Return the package for this version of Python.

    python3-venv, for example, is only for the default Python of the system.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return package if default.resolve().name == version else package.replace("python3", version)


def can_load(library: str) -> bool:
    """Return whether the dynamic linker finds this shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def unfit(needs: Needs, folder: Path) -> Iterator[Lack]:
    """Yield what makes an installation into this folder impossible and no package can provide."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < needs.glibc:
        wanted = ".".join(map(str, needs.glibc))
        installed = f"{name} {version}".strip() or "another C library"
        yield Lack(
            f"glibc {wanted} or newer; this system has {installed}. Use Debian 12, Ubuntu 22.04 or"
            " newer"
        )
    free_gb = shutil.disk_usage(folder).free / GB
    if free_gb < needs.installed_gb:
        yield Lack(
            f"{needs.installed_gb:.0f} GB of free disk for .venv; {folder} has {free_gb:.1f} GB."
            " Free some, or move the checkout to a larger disk"
        )


def warnings(meminfo: Path = Path("/proc/meminfo"), shm: Path = Path("/dev/shm")) -> Iterator[str]:
    """Yield problems that do not stop the installation, but will affect `make serve`."""
    memory = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free_gb = int(memory["MemAvailable"].split()[0]) * 1024 / GB
    if free_gb < SERVE_MEMORY_GB:
        yield (
            f"{free_gb:.1f} GB of memory is free, and `make serve` needs about"
            f' {SERVE_MEMORY_GB} GB. `make serve ARGS="--engine simulated"` needs 2 GB'
        )
    shm_gb = shutil.disk_usage(shm).total / GB if shm.is_dir() else 0.0
    if shm_gb < SHM_GB:
        yield (
            f"/dev/shm has {shm_gb:.2f} GB, but Ray needs {SHM_GB} GB. Otherwise Ray uses files in"
            " /tmp, which are slower. Start a container with --shm-size 1g to get more"
        )


def install_command(packages: list[str]) -> str:
    """Return the command that installs Debian packages."""
    return f"apt-get install --no-install-recommends --yes {' '.join(packages)}"


def may_install() -> bool:
    """Return whether this process may install Debian packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: list[str]) -> str:
    """Install Debian packages; return the error, or an empty string if there was none."""
    print(f"setup: installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update", install_command(packages)):
        done = subprocess.run(command.split(), env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return f"`{command}` failed: {(done.stderr or done.stdout).strip()[-300:]}"
    importlib.invalidate_caches()
    return ""


def remedy(packages: list[str]) -> str:
    """Return what the user has to do to get these packages."""
    if shutil.which("apt-get") is None:
        return f"install the equivalents of these Debian packages: {' '.join(packages)}"
    return f"run: sudo {install_command(packages)}"


def main(profile: str) -> int:
    """Check everything, install missing packages if possible, and return the exit code."""
    needs = read_needs(profile)
    is_set_up = (ROOT / ".venv" / f"ready-{profile}").exists()
    impossible = [] if is_set_up else list(unfit(needs, ROOT))
    lacks = list(missing_packages(needs))
    for warning in warnings():
        print(f"setup: warning: {warning}", flush=True)
    problem = ""
    if lacks and not impossible and may_install():
        problem = install(packages_of(lacks))
        lacks = list(missing_packages(needs))
    for lack in [*impossible, *lacks]:
        print(f"setup: this machine lacks {lack.what}", file=sys.stderr)
    if lacks:
        print(f"setup: {problem or remedy(packages_of(lacks))}", file=sys.stderr)
    return 1 if impossible or lacks else 0


def packages_of(lacks: list[Lack]) -> list[str]:
    """Return the packages that contain what is missing, sorted."""
    return sorted({name for lack in lacks for name in lack.packages})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
