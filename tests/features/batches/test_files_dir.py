"""The place for files is checked before a cluster starts."""

from pathlib import Path

import pytest

from kvroute.features.batches.batch_options import check_files_dir
from kvroute.local.before_start import OF_OPTIONS
from kvroute.settings.serve import load


def test_a_folder_for_files_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = OF_OPTIONS["files"](load({"files_dir": str(tmp_path / "file/files")}))
    assert f"--files-dir is '{tmp_path}/file/files', which is not writable" in problem.text
    assert problem.is_final


@pytest.mark.parametrize("place", [None, "off", "s3://bucket/prefix"])
def test_other_places_for_files_are_not_checked_at_the_start(place: str | None) -> None:
    check_files_dir(place)


def test_a_bucket_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a folder, off, or a bucket: s3://"):
        load({"files_dir": "ftp://files"})
