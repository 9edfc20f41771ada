"""Validates a user's engine arguments with vLLM before anything is started."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from kvroute.local.progress import StartError
from kvroute.settings.checked_options import CheckedOptions

PROGRAM = """
import gc
gc.disable()  # garbage collection would take a quarter of the time
from kvroute.replica.vllm_engine.engine_args import main
main()
"""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def vllm_errors(models: Sequence[CheckedOptions]) -> list[list[str]]:
    """Return the errors in each model's engine arguments, a list for each model.

    vLLM is imported in a child process, since the import takes seconds and changes the process.
    """
    checked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps([model.engine_args for model in models]),
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
    )
    if checked.returncode:
        reason = (checked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartError(f"--engine-args cannot be checked: importing vLLM failed: {reason}")
    errors: list[list[str]] = json.loads(checked.stdout)
    return errors
