"""The folder for files that are kept after kvroute has stopped."""

import os
from pathlib import Path

STATE_DIR = "KVROUTE_STATE_DIR"  # variable with the value of --state-dir


def state_folder() -> Path:
    """Return the folder for files that are kept, according to the XDG specification."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "kvroute"


def stored_files() -> Path:
    """Return the folder for what users have stored: that of --state-dir, if it is set."""
    named = os.environ.get(STATE_DIR)
    return Path(named).expanduser() if named else state_folder()
