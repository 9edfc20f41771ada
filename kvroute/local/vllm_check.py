"""vLLM checks a user's engine arguments before anything is started."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from kvroute.local.progress import StartError
from kvroute.settings.checked_options import CheckedOptions

PROGRAM = """
import gc
gc.disable()  # it would look for garbage for a quarter of the time
from kvroute.replica.vllm_engine.engine_args import main
main()
"""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def complaints_of_vllm(each: Sequence[CheckedOptions]) -> list[list[str]]:
    """The problems of each model's engine arguments. vLLM is imported in a child process: the
    import takes seconds and changes the process."""
    checked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps([one.engine_args for one in each]),
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
    )
    if checked.returncode:
        reason = (checked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartError(f"--engine-args cannot be checked, as vLLM cannot be imported: {reason}")
    complaints: list[list[str]] = json.loads(checked.stdout)
    return complaints
