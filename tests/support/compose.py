"""Services of a compose file, as options of podman."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT, load

FILE = "deploy/compose.yaml"
# Keys of a service that a test handles itself, or that mean nothing there.
BY_TEST = {
    *("build", "command", "depends_on", "healthcheck", "image", "network_mode", "ports"),
    *("restart", "stop_grace_period"),
}


class Compose:
    """A compose file with values for its variables."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        """Read the file.

        Args:
            folder: Where files are written that containers read.
            variables: The variables of the file.
        """
        self._folder = folder
        self._variables = variables
        self._content = load(FILE)

    def service(self, name: str) -> dict[str, Any]:
        """Return a service as the file has it."""
        service: dict[str, Any] = self._content["services"][name]
        return service

    def command(self, name: str) -> tuple[str, ...]:
        """Return the command of a service; empty if it is the image's own."""
        return tuple(map(str, self.service(name).get("command", ())))

    def health_check(self, name: str) -> tuple[str, ...]:
        """Return the command that says whether a service is well."""
        kind, *command = self.service(name)["healthcheck"]["test"]
        assert kind == "CMD"
        return tuple(command)

    def options(self, name: str) -> list[str]:
        """Return the options of `podman run` for a service."""
        options = []
        for key, value in self.service(name).items():
            if key not in BY_TEST:
                options += getattr(self, f"_{key}")(value)
        return options

    def _environment(self, values: Mapping[str, str]) -> list[str]:
        return [f"--env={name}={self._filled(value)}" for name, value in values.items()]

    def _configs(self, configs: list[dict[str, str]]) -> list[str]:
        """Write each file, which the container may only read."""
        options = []
        for config in configs:
            file = self._folder / f"{config['source']}.conf"
            file.write_text(self._filled(self._content["configs"][config["source"]]["content"]))
            options.append(f"--volume={file}:{config['target']}:ro")
        return options

    def _volumes(self, volumes: list[str]) -> list[str]:
        """Return options for volumes. Paths are relative to the file's folder."""
        return [
            f"--volume={(ROOT / FILE).parent / volume if volume[0] == '.' else volume}"
            for volume in volumes
        ]

    def _tmpfs(self, mounts: list[str]) -> list[str]:
        return [f"--tmpfs={mount}" for mount in mounts]

    def _cap_drop(self, names: list[str]) -> list[str]:
        return [f"--cap-drop={name}" for name in names]

    def _security_opt(self, options: list[str]) -> list[str]:
        """Podman has no values of `no-new-privileges`."""
        return [f"--security-opt={option.removesuffix(':true')}" for option in options]

    def _shm_size(self, size: str) -> list[str]:
        return [f"--shm-size={size.removesuffix('b')}"]

    def _init(self, value: bool) -> list[str]:
        return ["--init"] if value else []

    def _read_only(self, value: bool) -> list[str]:
        return ["--read-only", "--read-only-tmpfs=false"] if value else []

    def _filled(self, text: str) -> str:
        """Replace ${NAME} and ${NAME:?message} by the values of the variables."""
        return re.sub(r"\$\{(\w+)(:\?[^}]*)?\}", lambda found: self._variables[found[1]], text)
