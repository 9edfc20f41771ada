"""A hook of MkDocs that adds pages outside of docs/ to the site, and mends links to them.

These are the pages of the root folder, and the README of each feature.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# File -> its name on the site. All other pages are files of docs/.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.txt",
}
PAGES |= {
    str(path.relative_to(ROOT)): f"features/{path.parent.name}.md"
    for path in sorted(ROOT.glob("kvroute/features/*/README.md"))
}
SOURCES = {name: source for source, name in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to the site's names of their files."""
    name = page.file.src_uri
    parts = FENCED.split(markdown)  # text and code blocks in turns
    parts[::2] = [LINK.sub(lambda link: moved(link[1], name), text) for text in parts[::2]]
    return "".join(parts)


def moved(target: str, page: str) -> str:
    """Return a link for the site.

    Args:
        target: a path relative to the page's file in the repository.
        page: the page's name on the site.
    """
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    name = PAGES.get(path, path.removeprefix("docs/"))
    return posixpath.relpath(name, posixpath.dirname(page) or ".")
