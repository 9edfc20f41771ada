"""Container images for tests, built and run with podman, without a registry of images.

The base image is a minimal Debian that debootstrap makes. All images and containers are in one
folder.
"""

import os
import resource
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.pip_settings import pip_settings
from tests.support.repository import ROOT
from tests.support.untested import obstacle

TOOLS = ("podman", "debootstrap", "catatonit", "ip")
BASE = "localhost/kvroute-base"
IMAGE = "localhost/kvroute"
NEEDED_GB = 16  # free disk while the image is built
CERTIFICATES = "/run/secrets/ca.pem"  # path of the secret with certificates during the build
SECRETS = ("pip.conf", "apt.conf", "ca.pem")  # secrets of deploy/Dockerfile


def why_no_image(folder: Path) -> str | None:
    """Return why no image can be built into this folder and run; None if it can."""
    if os.geteuid() != 0:
        return "only root can build and run images in a folder"
    if missing := obstacle(*TOOLS):
        return missing
    if not (folder / "storage").exists() and shutil.disk_usage(folder).free < NEEDED_GB * 1e9:
        return f"less than {NEEDED_GB} GB of disk are free"
    return None


@dataclass(frozen=True)
class Images:
    """The images in a folder."""

    folder: Path

    @cached_property
    def podman(self) -> tuple[str, ...]:
        """The podman command with the options that all its subcommands share."""
        # runc also runs where cgroups of both versions are mounted; crun does not.
        runtime = shutil.which("runc") or shutil.which("crun") or "crun"
        return (
            *("podman", "--root", f"{self.folder}/storage", "--runroot", f"{self.folder}/run"),
            *("--tmpdir", f"{self.folder}/libpod", "--runtime", runtime),
            *("--storage-driver", "overlay" if self._has_overlay else "vfs"),
        )

    @cached_property
    def _has_overlay(self) -> bool:
        """Whether layers can be mounted over each other in this folder; else they are copied."""
        with tempfile.TemporaryDirectory(dir=self.folder) as probe:
            low, up, work, merged = (Path(probe, name) for name in ("low", "up", "work", "merged"))
            for path in (low, up, work, merged):
                path.mkdir()
            options = f"lowerdir={low},upperdir={up},workdir={work}"
            command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
            done = subprocess.run(command, capture_output=True)
            if done.returncode == 0:
                subprocess.run(["umount", str(merged)], check=True)
            return done.returncode == 0

    def run(self, *words: str, stdin: str = "") -> str:
        """Run a subcommand of podman; return its output."""
        return _output(*self.podman, *words, stdin=stdin, env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        (self.folder / "tmp").mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": f"{self.folder}/tmp"}

    def has(self, image: str) -> bool:
        """Return whether the folder has this image."""
        return subprocess.run([*self.podman, "image", "exists", image]).returncode == 0

    def make_base(self) -> None:
        """Make the base image: a minimal Debian with Python."""
        root = self.folder / "base"
        included = "--include=ca-certificates,python3"
        _output("debootstrap", "--variant=minbase", included, "bookworm", str(root))
        archive = self.folder / "base.tar"
        _output("tar", "--directory", str(root), "--create", "--file", str(archive), ".")
        shutil.rmtree(root)
        self.run("import", str(archive), BASE)
        archive.unlink()

    def build_kvroute(
        self, dockerfile: str = "deploy/Dockerfile", *, base: str = BASE, tag: str = IMAGE
    ) -> None:
        """Build an image of kvroute from this checkout, as docs/operations/image.md says."""
        volumes = self._write_secrets()
        given = [f"--secret=id={name},src={self.folder / name}" for name in SECRETS]
        options = ("--file", str(ROOT / dockerfile), "--build-arg", f"BASE={base}")
        self.build(*options, *given, *volumes, tag=tag)

    def build(self, *options: str, tag: str) -> None:
        """Build an image from this checkout."""
        # Commands of the build run with chroot, which needs no namespaces and no cgroups. No layer
        # of an earlier stage is kept.
        how = ("--isolation", "chroot", "--layers=false", "--format", "docker")
        self.run("build", *how, *options, "--tag", tag, str(ROOT))

    def build_debian(self, package: str, *, entrypoint: str = "") -> str:
        """Build an image with one more Debian package, unless it is there; return its name."""
        name = f"localhost/kvroute-{package}"
        if not self.has(name):
            install = f"apt-get install --no-install-recommends --yes {package}"
            lines = [
                f"FROM {BASE}",
                "RUN --mount=type=secret,id=apt.conf APT_CONFIG=/run/secrets/apt.conf"
                f" sh -c 'apt-get update && {install} && rm -rf /var/lib/apt/lists/*'",
                f'ENTRYPOINT ["{entrypoint}"]' if entrypoint else "",
            ]
            file = self.folder / f"{package}.Dockerfile"
            file.write_text("\n".join(lines))
            secret = f"--secret=id=apt.conf,src={self.folder}/apt.conf"
            self.build("--file", str(file), secret, tag=name)
        return name

    def _write_secrets(self) -> list[str]:
        """Write the builder's settings; return options that mount the folders that they name.

        Each file has a random comment, so that a test can look for it in the image.
        """
        settings = pip_settings(
            lambda path: CERTIFICATES if path.suffix in (".crt", ".pem") else str(path)
        )
        certificates = [path for path, there in settings.files.items() if there == CERTIFICATES]
        others = [str(path) for path, there in settings.files.items() if there != CERTIFICATES]
        apt = _output("apt-config", "dump").splitlines()
        texts = {
            "pip.conf": settings.text,
            "apt.conf": "\n".join(line for line in apt if "Proxy" in line or "CAInfo" in line),
            "ca.pem": "\n".join(path.read_text() for path in certificates),
        }
        comments = {"pip.conf": "#", "apt.conf": "//", "ca.pem": "#"}
        for name, text in texts.items():
            mark = f"{comments[name]} kvroute-secret-{secrets.token_hex(16)}"
            (self.folder / name).write_text(f"{text}\n{mark}\n")
        return [f"--volume={path}:{path}:ro" for path in (*settings.folders, *others)]

    def marks(self) -> list[str]:
        """Return the random comments of the secrets with which the image was built."""
        lines = [(self.folder / name).read_text().splitlines()[-1] for name in SECRETS]
        return [line.split()[-1] for line in lines]

    def delete(self) -> None:
        """Delete all images, containers and volumes."""
        self.run("system", "reset", "--force")
        shutil.rmtree(self.folder, ignore_errors=True)


def limits() -> list[str]:
    """Return options of `podman run` for limits that every machine allows.

    podman's defaults are higher than what some machines allow.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    processes = min(processes, 30_000) if processes > 0 else 30_000
    files = min(files, 65_536) if files > 0 else 65_536
    return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]


def _output(*command: str, stdin: str = "", env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
