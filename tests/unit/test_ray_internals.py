"""Ray's private names that kvroute relies on exist, and stand in two modules only."""

import inspect
import re

import pytest
from ray._private import node, parameter, ray_constants, services, worker
from ray.serve._private import constants
from ray.serve._private import replica as serves_replica
from ray.serve._private.controller import ServeController
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter, RunningReplica

from kvroute.process.ray_internals import DIRECT_PORTS
from tests.support.repository import PACKAGE, product_modules

THEIRS = {"process/ray_internals.py", "process/draining.py"}
PRIVATE = re.compile(r"ray(\.\w+)*\._private|\b(_actor_handle|_replica_impl|_deployment_id)\b")


def test_a_replica_can_be_asked_for_its_routing_stats() -> None:
    assert inspect.iscoroutinefunction(serves_replica.ReplicaActor.record_routing_stats)


def test_a_request_router_knows_its_deployment_and_a_replica_its_actor() -> None:
    assert "self._deployment_id = deployment_id" in inspect.getsource(RequestRouter)
    assert "self._actor_handle = " in inspect.getsource(RunningReplica)


@pytest.mark.parametrize("method", ["get_serve_instance_details", "update_deployment_replicas"])
def test_serves_controller_can_be_asked(method: str) -> None:
    assert callable(getattr(ServeController, method))


def test_a_thread_without_a_loop_can_have_a_handle() -> None:
    assert hasattr(InitHandleOptions, "_run_router_in_separate_loop")
    assert "kwargs" in inspect.signature(DeploymentHandle._init).parameters
    assert callable(DeploymentHandle.broadcast)


def test_rays_head_can_be_started_without_what_nobody_asks() -> None:
    assert "ray._private.parameter.RayParams(" in inspect.getsource(worker.init)
    source = inspect.getsource(node.Node)
    for name in ("not self._ray_params.no_monitor", "self._ray_params.include_log_monitor"):
        assert f"if {name}:" in source
        assert name.rpartition(".")[2] in inspect.signature(parameter.RayParams).parameters


def test_servers_can_be_bound_to_the_nodes_address() -> None:
    source = inspect.getsource(serves_replica)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source
    assert inspect.getsource(services.get_node_ip_address).count("ENABLE_RAY_CLUSTER") == 1
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in inspect.getsource(ray_constants)


def test_rays_messages_can_be_received() -> None:
    assert "        print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
    assert [*inspect.signature(worker.print_to_stdstream).parameters] == ["data", "ignore_prefix"]


def test_the_ray_of_this_machine_can_be_found() -> None:
    parameters = inspect.signature(services.get_ray_address_from_environment).parameters
    assert [*parameters] == ["addr", "temp_dir"]


def test_a_replica_marks_that_it_shuts_down() -> None:
    source = inspect.getsource(serves_replica)
    assert "self._shutting_down = True" in source
    assert "self._replica_impl" in source


def test_routers_listen_to_haproxy_on_serves_direct_ports() -> None:
    assert constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT in DIRECT_PORTS


def test_no_other_module_has_a_private_name_of_rays() -> None:
    found = {
        str(file.relative_to(PACKAGE))
        for file in product_modules()
        if PRIVATE.search(file.read_text())
    }
    assert found == THEIRS
