"""Each mutation still changes one line of the product."""

import pytest

from tests.mutations.__main__ import MUTATIONS
from tests.support.repository import ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_line_of_a_mutation_occurs_once(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.line) == 1
    assert mutation.line != mutation.broken
