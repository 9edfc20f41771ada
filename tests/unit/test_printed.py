"""What a document shows after a command is compared with what the command prints."""

import pytest

from tests.support.printed import is_as_shown

TABLE = """
replica   requests  hit share
b9k2x7aa        12      0.0%
m3p4q5zz       120     97.5%
"""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("replica xwyyeo2t: 1527 tokens", "replica abcdefgh: 9 tokens\n"),
        ("took 0.13 s", "took 1,234.5 s"),
        ("model SmolLM2-135M", "model SmolLM2-135M"),
        (TABLE, "replica requests hit share\naaaaaaaa 1 1.0%\n"),
        (TABLE, "replica requests hit share\n" + "k1 1 1.0%\n" * 4),
        ("first\n...\nlast", "first\nmany\nother\nlines\nlast"),
        ("kvroute *0.10 -", "kvroute ~0.1 5"),
        ('{"id": "a1", "n": [1]}', '{"id": "bcd", "n": [2, 3, 4]}'),
        ('{"warm": true, "x": null}', '{"warm": true, "x": null}'),
    ],
)
def test_numbers_ids_and_rows_may_differ(shown: str, printed: str) -> None:
    assert is_as_shown(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("2 replicas are ready", "2 replicas are lost"),
        ("first\nlast", "first"),
        ("first\nlast", "first\nlast\nmore"),
        (TABLE, "replica requests hits\naaaaaaaa 1 1.0%\n"),
        ('{"pinned": false}', '{"pinned": true}'),
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ('{"a": "one"}', '{"a": "two"}'),
    ],
)
def test_words_and_members_may_not_differ(shown: str, printed: str) -> None:
    assert not is_as_shown(shown, printed)
