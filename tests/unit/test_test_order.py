"""The order of a test run knows every folder with tests."""

import re

from tests.support.order import FOLDERS
from tests.support.repository import ROOT


def test_each_folder_with_tests_has_a_place_in_the_order() -> None:
    tests = ROOT / "tests"
    folders = {str(file.parent.relative_to(tests)) for file in tests.rglob("test_*.py")}
    assert {re.sub("^features/.*", "features", folder) for folder in folders} == {*FOLDERS}
