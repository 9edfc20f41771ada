"""The live page's files say what the documents say."""

import re

from kvroute.command.explain import EVICTED
from kvroute.router.sessions.returns import EVICTION_REASONS
from tests.support.documents import METRICS
from tests.support.repository import ROOT

UI = ROOT / "router" / "ui"


def test_the_causes_are_explained_in_the_documents_words() -> None:
    table = METRICS.read_text().split("| cause | the tokens |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", table, flags=re.MULTILINE)
    words = [tuple(cell.replace("`", "").strip() for cell in row) for row in rows]
    told = re.findall(r'^  \["(\w+)", "(.*)", "(.*)"\],$', (UI / "ledger.js").read_text(), re.M)
    assert told == words


def test_why_tokens_were_evicted_has_words_on_the_page_and_in_explain() -> None:
    words = (UI / "decisions.js").read_text().split("const EVICTED = {")[1].split("}")[0]
    assert tuple(re.findall(r"^  (\w+):", words, re.M)) == tuple(EVICTED) == EVICTION_REASONS
