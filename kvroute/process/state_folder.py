"""The folder for files that are kept after kvroute has stopped."""

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder for files that are kept, according to the XDG specification."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "kvroute"
