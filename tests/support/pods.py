"""Containers of deploy/kubernetes, as options of podman, and what KubeRay adds to Ray's pods."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
RAY_PORT, DASHBOARD_PORT, AGENT_PORT = 6379, 8265, 52365
HEAD_SERVICE = "kvroute-head-svc"  # KubeRay's service for the head
# The commands of KubeRay's probes. They succeed if wget prints "success".
_PROBE = "wget --tries 1 -T {} -q -O- http://localhost:{}/{} | grep success"
RAYLET_PROBE = _PROBE.format(2, AGENT_PORT, "api/local_raylet_healthz")
GCS_PROBE = _PROBE.format(10, DASHBOARD_PORT, "api/gcs_healthz")
# With newer versions of Ray, KubeRay sends this request instead.
NODE_PROBE = f":{AGENT_PORT}/api/healthz"


def documents(name: str) -> list[dict[str, Any]]:
    """Return the objects in a file of the folder."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@dataclass(frozen=True)
class Pod:
    """The template of a pod with one container."""

    template: Mapping[str, Any]
    secrets: Mapping[str, Mapping[str, str]]  # name of a secret -> its values

    @property
    def container(self) -> dict[str, Any]:
        """The container."""
        (container,) = self.template["spec"]["containers"]
        found: dict[str, Any] = container
        return found

    def options(self, name: str, folder: Path) -> list[str]:
        """Return the options of `podman run` for the container.

        Args:
            name: A unique name, for the pod's empty volumes.
            folder: Where secrets are written that the container reads as files.
        """
        security = {
            **self.template["spec"].get("securityContext", {}),
            **self.container["securityContext"],
        }
        assert security["runAsNonRoot"] is True
        assert security["allowPrivilegeEscalation"] is False
        options = ["--security-opt=no-new-privileges", f"--user={security['runAsUser']}"]
        options += [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
        if security.get("readOnlyRootFilesystem"):
            options += ["--read-only", "--read-only-tmpfs=false"]
        options += [f"--env={key}={value}" for key, value in self.environment().items()]
        for mount in self.container["volumeMounts"]:
            source = self._volume(mount["name"], name, folder)
            suffix = ":ro" if mount.get("readOnly") else ""
            options.append(f"--volume={source}:{mount['mountPath']}{suffix}")
        return options

    def environment(self) -> dict[str, str]:
        """Return the container's variables, in which $(NAME) is an earlier one."""
        values: dict[str, str] = {}
        for variable in self.container["env"]:
            if "value" in variable:
                text = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], variable["value"])
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                text = self.secrets[reference["name"]][reference["key"]]
            values[variable["name"]] = text
        return values

    def _volume(self, volume: str, pod: str, folder: Path) -> str:
        (found,) = (each for each in self.template["spec"]["volumes"] if each["name"] == volume)
        if "emptyDir" in found:
            return f"{pod}-{volume}"  # a volume of podman, which is empty at first
        path = folder / f"{pod}-{volume}"
        path.mkdir()
        for item in found["secret"]["items"]:
            text = self.secrets[found["secret"]["secretName"]][item["key"]]
            (path / item["path"]).write_text(text)
        return str(path)


def ray_start(group: Mapping[str, Any], *, is_head: bool) -> tuple[str, ...]:
    """Return the command that KubeRay gives the container of a group of Ray's nodes."""
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    options = {
        "dashboard-agent-listen-port": str(AGENT_PORT),
        "metrics-export-port": "8080",
        "num-cpus": limits["cpu"],
        "memory": str(int(limits["memory"].removesuffix("Gi")) << 30),
        **group["rayStartParams"],
    }
    if "nvidia.com/gpu" in limits:
        options["num-gpus"] = limits["nvidia.com/gpu"]
    if not is_head:
        options["address"] = f"{HEAD_SERVICE}:{RAY_PORT}"
    words = [f"--{name}={value}" for name, value in options.items()]
    start = " ".join(
        ["ulimit -n 65536; ray start", *(["--head"] if is_head else []), "--block", *words]
    )
    return ("/bin/bash", "-cl", "--", start)  # a login shell, as with ENABLE_LOGIN_SHELL


def shared_memory(group: Mapping[str, Any]) -> str:
    """Return the option for /dev/shm, which KubeRay mounts. The pod's memory is its limit."""
    (container,) = group["template"]["spec"]["containers"]
    memory: str = container["resources"]["limits"]["memory"]
    return f"--shm-size={memory.replace('Gi', 'g')}"


def ray_environment(token: str, *, is_head: bool) -> list[str]:
    """Return options for the variables that KubeRay adds to those of the file."""
    host = "127.0.0.1" if is_head else HEAD_SERVICE
    values = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_PORT": str(RAY_PORT),
        "RAY_ADDRESS": f"{host}:{RAY_PORT}",
    }
    return [f"--env={name}={value}" for name, value in values.items()]
