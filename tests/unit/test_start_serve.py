"""Ray Serve is started although it replaces a proxy that starts slowly."""

import pytest
import ray
from ray import serve

from kvroute.local import ray_cluster


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_proxy_that_serve_replaces_does_not_end_the_start(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def start(**options: str) -> None:
        calls.append(options)
        if len(calls) <= failures:
            raise ray.exceptions.RayActorError(error_msg="killed by ray.kill")

    monkeypatch.setattr(serve, "start", start)
    if failures < 2:
        ray_cluster._start_serve(proxy_location="HeadOnly")
        assert calls == [{"proxy_location": "HeadOnly"}] * (failures + 1)
    else:
        with pytest.raises(ray.exceptions.RayActorError):
            ray_cluster._start_serve(proxy_location="HeadOnly")
