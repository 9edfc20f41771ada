"""All uses of Ray's private API, except those in draining.py, which runs in replicas.

Ray is pinned to one version. tests/unit/test_ray_internals.py checks the parts that are used here.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ray._common import tls_utils
from ray.serve._private import constants
from ray.serve.request_router import RequestRouter, RunningReplica

HAPROXY_IS_ON: bool = constants.RAY_SERVE_ENABLE_HA_PROXY
IS_THROUGHPUT_OPTIMIZED: bool = constants.RAY_SERVE_THROUGHPUT_OPTIMIZED
CONTROLLER_S = 30.0  # timeout of a call to Serve's controller; long, for busy computers
DIRECT_PORTS = range(  # the ports on which routers listen for HAProxy
    constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT,
    constants.RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT + 1,
)


def deployment_name(router: RequestRouter) -> str:
    """Return the name of the deployment whose replicas the request router chooses from."""
    return str(router._deployment_id.name)


def actor_of(replica: RunningReplica) -> Any:
    """Return Ray's actor handle of the replica's process."""
    return replica._actor_handle


async def routing_stats(replica: RunningReplica) -> Any:
    """Call the replica's `record_routing_stats`. Raises RayError if the replica does not answer."""
    return await actor_of(replica).record_routing_stats.remote()


def deployments(application: str) -> dict[str, Any]:
    """Return the details of all deployments of an application, from Serve's controller."""
    instance = _controller("get_serve_instance_details")
    return dict(instance["applications"][application]["deployments"])


def endpoint_host() -> str:
    """Return the address that the HTTP endpoint listens on; empty if Serve does not report it."""
    return _controller("get_serve_instance_details")["http_options"]["host"] or ""


def set_replicas(application: str, deployment: str, replicas: int) -> None:
    """Set the number of replicas that Serve maintains.

    The application is not redeployed, so the remaining replicas keep running.
    """
    from ray.serve._private.common import DeploymentID

    id_ = DeploymentID(name=deployment, app_name=application)
    _controller("update_deployment_replicas", id_, replicas)


def drain_node(node_id: str, within_s: float) -> str:
    """Let Ray start nothing more on a node, and Serve move its replicas to other nodes.

    Args:
        node_id: The node's id in Ray.
        within_s: Seconds after which the node ends.

    Returns:
        Why Ray refuses; empty if it does not.
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    ends_ms = int(1000 * (time.time() + within_s))
    is_accepted, problem = gcs.drain_node(node_id, preempted, "kvroute drain", ends_ms)
    return "" if is_accepted else problem or "no reason given"


def thread_safe_handle(application: str, deployment: str) -> Any:
    """Return Serve's handle of a deployment, which threads without an event loop can use."""
    from ray import serve

    handle = serve.get_deployment_handle(deployment, application)
    handle._init(_run_router_in_separate_loop=True)
    return handle


def omit_unused_parts() -> None:
    """Make later starts of Ray omit its autoscaler, and its process that prints workers' logs."""
    from ray._private import parameter

    parameter.RayParams = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)


def redirect_messages(receive: Callable[[str], object]) -> None:
    """Pass the messages that Ray would print, such as those about killed processes, to a function.

    The function is called in a thread of Ray.
    """
    from ray._private import worker

    def pass_on(message: dict[str, Any], ignore_prefix: bool) -> None:
        receive("\n".join(message["lines"]))

    worker.print_to_stdstream = pass_on


def listen_on_node_address() -> None:
    """Let this process's server for calls from other deployments listen on its node's address.

    It would listen on every address. Call this in the constructor of a deployment.
    """
    import ray
    from ray.serve._private import replica

    def add_port(server: Any, address: str) -> int:
        node = ray.util.get_node_ip_address()
        host = f"[{node}]" if ":" in node else node
        port: int = tls_utils.add_port_to_grpc_server(server, address.replace("[::]", host))
        return port

    replica.add_port_to_grpc_server = add_port


def own_ray_address() -> str:
    """Return the address of the Ray that runs on this machine. Raises ConnectionError."""
    from ray._private import services

    return str(services.get_ray_address_from_environment("auto", None))


def stay_on_loopback() -> None:
    """Let this process join a Ray whose node has the address 127.0.0.1, as a driver.

    Otherwise Ray would take another address of this computer for the process, and the node's
    processes, which listen on loopback only, could not be reached.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def use_auth_token() -> None:
    """Use the authentication token for Ray, if this user has one."""
    from ray._private.authentication import authentication_token_setup as authentication

    authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _controller(method: str, *args: Any) -> Any:
    """Call a method of Serve's controller actor, as Serve's own tools do.

    Raises:
        RayError, ValueError: the controller does not answer within CONTROLLER_S, or there is none.
    """
    import ray

    actor = ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)
    return ray.get(getattr(actor, method).remote(*args), timeout=CONTROLLER_S)
