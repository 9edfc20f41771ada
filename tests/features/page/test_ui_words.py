"""The live page's files say what the documents say."""

import re

from tests.support.documents import METRICS
from tests.support.repository import ROOT

UI = ROOT / "kvroute" / "features" / "page" / "ui"


def test_the_causes_are_explained_in_the_documents_words() -> None:
    table = METRICS.read_text().split("| cause | the tokens |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", table, flags=re.MULTILINE)
    words = [tuple(cell.replace("`", "").strip() for cell in row) for row in rows]
    told = re.findall(r'^  \["(\w+)", "(.*)", "(.*)"\],$', (UI / "ledger.js").read_text(), re.M)
    assert told == words
