"""Connects a command to the Ray of a running cluster."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class UnreachableError(RuntimeError):
    """The cluster's Ray cannot be reached. The message says what to do."""


@contextmanager
def connected(ray_address: str) -> Iterator[None]:
    """Connect this process to the cluster as a Ray driver.

    From then on, SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Ray's own handler would print
    the stack of its C++ code.

    Args:
        ray_address: Address of the cluster's Ray, or "auto" for the one that runs on this machine.

    Raises:
        UnreachableError: No Ray answers there, it belongs to another user, or Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UnreachableError(
            "Ray is not installed; run `pip install 'kvroute[cluster]'` to control a cluster; "
            "`kvroute attach` runs without Ray, so there is nothing to control"
        ) from None

    from kvroute.process.ray_internals import own_ray_address, stay_on_loopback, use_auth_token

    logging.getLogger("ray").setLevel(logging.ERROR)
    use_auth_token()
    try:
        found = own_ray_address() if ray_address == "auto" else ray_address
        if found.startswith("127."):
            stay_on_loopback()
        ray.init(found, log_to_driver=False, logging_level=logging.ERROR)
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        where = "on this machine" if ray_address == "auto" else f"at {ray_address}"
        raise UnreachableError(
            f"the cluster's Ray {where} cannot be reached ({error}); "
            "run this on a machine of the cluster, as the user who started it"
        ) from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        ray.shutdown()
