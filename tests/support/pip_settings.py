"""pip's settings of this machine, for another root file system on it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

QUOTE = "'"  # quotation mark around values in the output of `pip config list`


@dataclass
class PipSettings:
    """A pip.conf, and what must be visible for it in the other root file system."""

    text: str = ""  # content of pip.conf
    files: dict[Path, str] = field(default_factory=dict)  # file of this machine -> its path there
    folders: list[str] = field(default_factory=list)  # folders that keep their paths


def pip_settings(path_there: Callable[[Path], str]) -> PipSettings:
    """Return pip's settings of this machine.

    Args:
        path_there: Returns the path that a file of this machine gets. A file's own path may belong
            to a package there.
    """
    pip = (sys.executable, "-m", "pip", "config", "list")
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    settings = (line.split("=", 1) for line in listed.splitlines())
    own = {key.split(".", 1)[1]: value.strip(QUOTE).split() for key, value in settings}
    found = PipSettings()
    lines = [
        f"{key} = {' '.join(_shown(word, found, path_there) for word in words)}"
        for key, words in own.items()
    ]
    found.text = "\n".join(["[global]", *lines, ""])
    return found


def _shown(word: str, found: PipSettings, path_there: Callable[[Path], str]) -> str:
    """Add the file or folder that a word of a setting names; return the word for there."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return word
    if path.is_file():
        found.files[path] = path_there(path)
        return found.files[path]
    # A package index in a folder links to files beside that folder.
    found.folders.append(str(path.parent if word.startswith("file://") else path))
    return word
