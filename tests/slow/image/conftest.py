"""The image, which all tests of this folder share.

KVROUTE_IMAGE_FOLDER names a folder that keeps the images for the next run.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.containers import ContainerNetwork, container_network
from tests.support.images import BASE, IMAGE, Images, why_no_image

KEPT = "KVROUTE_IMAGE_FOLDER"


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    kept = os.environ.get(KEPT)
    # The paths of podman's own folders in it may have at most 50 characters.
    folder = Path(kept or mkdtemp(prefix="kvroute-image-", dir="/tmp"))
    folder.mkdir(exist_ok=True)
    if reason := why_no_image(folder):
        pytest.skip(reason)
    images = Images(folder)
    try:
        if not images.has(BASE):
            images.make_base()
        if not images.has(IMAGE):
            start = time.monotonic()
            images.build_kvroute()
            print(f"built in {time.monotonic() - start:.0f} s")
        yield images
    finally:
        if not kept:
            images.delete()


@pytest.fixture(scope="module")
def network(images: Images) -> Iterator[ContainerNetwork]:
    with container_network(images) as network:
        yield network
