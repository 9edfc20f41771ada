"""Checks --engine-args with vLLM's own types before the cluster starts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from kvroute.machine.problem import StartError
from kvroute.settings.checked_options import CheckedOptions

# The program that the child process runs.
PROGRAM = """
import gc
gc.disable()  # garbage collection would take a quarter of the time
from kvroute.replica.vllm_engine.engine_args import main
main()
"""
# Environment variables that keep vLLM from printing and from reporting usage.
QUIET_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def vllm_errors(models: Sequence[CheckedOptions]) -> list[list[str]]:
    """Return the errors in the engine arguments: one list of errors for each model.

    A child process imports vLLM, because the import takes seconds and has side effects on the
    process that imports it.
    """
    checked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps([model.engine_args for model in models]),
        env=os.environ | QUIET_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    if checked.returncode:
        reason = (checked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartError(
            f"--engine-args cannot be checked, since the import of vLLM failed: {reason}"
        )
    errors: list[list[str]] = json.loads(checked.stdout)
    return errors
