"""A minimal Debian in a folder, like a new user's machine: it only has Python 3.11 and make.

`debootstrap` creates it. Commands run in it with chroot. They have their own mount and process
namespaces, so that they leave no mounts and no processes behind. The machine uses the network and
pip's settings of the real machine.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.pip_settings import pip_settings
from tests.support.repository import ROOT

INCLUDED = "python3,make"  # additional packages; python3 of bookworm is 3.11
CHECKOUT = "/root/kvroute"  # path of the checkout in the machine
SHM_MB = 2048  # size of /dev/shm
# A shell script. Arguments: the machine's folder, folders of the real machine to mount in it, and
# the command.
_ENTER = f"""
root=$1; shown=$2; shift 2
mount --bind /dev "$root/dev"
mount -t tmpfs -o size={SHM_MB}m shm "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sys "$root/sys"
for path in $shown; do mount --bind -o ro "$path" "$root$path"; done
exec chroot "$root" "$@"
"""
_OWN_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


class BareMachine:
    """The machine, with a copy of this checkout in /root/kvroute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders: list[str] = []  # folders of the real machine that are mounted in it

    def install(self) -> None:
        """Create the machine. This takes a minute."""
        _run("debootstrap", "--variant=minbase", f"--include={INCLUDED}", "bookworm", self.folder)
        for name in ("resolv.conf", "hosts"):
            shutil.copy(Path("/etc", name), self.folder / "etc" / name)
        self._copy_pip_settings()
        self._copy_checkout()

    @contextmanager
    def running(self, command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in the checkout; kill its remaining processes at the end."""
        enter = ["sh", "-ec", _ENTER, "sh", str(self.folder), " ".join(self.folders)]
        shell = ["/bin/sh", "-c", f"cd {CHECKOUT} && {command}"]
        with (
            output.open("wb") as file,
            subprocess.Popen(
                [*_OWN_NAMESPACES, *enter, *shell],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, to which a test can send Ctrl-C
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def _copy_pip_settings(self) -> None:
        """Copy pip's settings, and make the files and folders in them visible in the machine."""
        settings = pip_settings(lambda path: f"/etc/pip-{path.name}")
        (self.folder / "etc" / "pip.conf").write_text(settings.text)
        for file, path in settings.files.items():
            shutil.copy(file, self.folder / path[1:])
        self.folders = settings.folders
        for folder in settings.folders:
            (self.folder / folder[1:]).mkdir(parents=True, exist_ok=True)

    def _copy_checkout(self) -> None:
        """Copy all files that git tracks or would add. Links stay links."""
        git = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = listed.split("\0")
        for name in filter(None, names):
            source, target = ROOT / name, self.folder / CHECKOUT[1:] / name
            if not os.path.lexists(source):
                continue  # deleted, but not yet committed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
