"""Vulnerabilities of locked packages, according to pip-audit."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.environments import environment
from tests.support.repository import ROOT

ACCEPTED_FILE = ROOT / "requirements" / "advisories.txt"
TIMEOUT_S = 15  # timeout of one question to the advisory service
# Kinds of errors in pip-audit's output when the advisory service cannot be reached.
NO_CONNECTION = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ServiceError", "resolve")

# Identifier of a vulnerability -> package.
Vulnerabilities = Mapping[str, str]


class NoServiceError(Exception):
    """The advisory service cannot be reached."""


def audit(lock: Path, *options: str) -> Vulnerabilities:
    """Return the known vulnerabilities of a lock's packages.

    Args:
        lock: A file of requirements with hashes.
        options: Further options of pip-audit.

    Raises:
        NoServiceError: The advisory service cannot be reached.
    """
    pip_audit = environment("audit").with_name("pip-audit")
    command = [
        *(str(pip_audit), "--requirement", str(lock), "--require-hashes", "--disable-pip"),
        *("--format", "json", "--progress-spinner", "off", "--timeout", str(TIMEOUT_S), *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise _failure(done.stderr)
    return read_report(json.loads(done.stdout))


def _failure(errors: str) -> Exception:
    last = errors.strip().rpartition("\n")[2]
    return NoServiceError(last) if any(kind in last for kind in NO_CONNECTION) else OSError(errors)


def read_report(report: Mapping[str, Any]) -> Vulnerabilities:
    """Return the vulnerabilities in a report of pip-audit.

    Raises:
        NoServiceError: The service knows none of the packages. A mirror of a package index, for
            example, has no advisories.
    """
    packages = report["dependencies"]
    if packages and all("skip_reason" in package for package in packages):
        raise NoServiceError(packages[0]["skip_reason"])
    return {
        vulnerability["id"]: package["name"]
        for package in packages
        for vulnerability in package.get("vulns", [])
    }


def accepted(text: str) -> Vulnerabilities:
    """Return the accepted vulnerabilities of requirements/advisories.txt.

    Raises:
        ValueError: A line has no reason.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        identifier, package, _reason = line.split(maxsplit=2)
        found[identifier] = package
    return found
