"""Checks the options of one model, and reads the files that the options name."""

from collections.abc import Mapping
from functools import cached_property

from kvroute.contract.adapters import Adapter, read_adapter
from kvroute.features import FEATURES
from kvroute.features.feature import FeatureSettings
from kvroute.settings import owned_engine_args
from kvroute.settings.help import SettingsError
from kvroute.settings.options.model import ModelOptions
from kvroute.settings.server_list import listed_servers


class CheckedOptions(ModelOptions):
    """The options of one model, with what is read from the files that they name.

    A property raises SettingsError if an option that it needs cannot be used.
    """

    @property
    def name(self) -> str:
        """Return the model name that clients send."""
        return self.served_model_name or self.model

    @property
    def max_fleet_size(self) -> int:
        """Return the maximum number of replicas, including those that autoscaling adds."""
        return self.max_replicas or self.fleet_size

    @property
    def fleet_size(self) -> int:
        """Return the number of replicas at the start; each attached server has one."""
        return len(self.servers) + self.own_replicas if self.servers else self.replicas

    @property
    def own_fleet_size(self) -> int:
        """Return the maximum number of replicas whose engines kvroute starts."""
        return self.own_replicas if self.servers else self.max_fleet_size

    @property
    def starts_engines(self) -> bool:
        """Return whether kvroute starts engines itself, for all replicas or some of them."""
        return not self.servers or self.own_replicas > 0

    @cached_property
    def servers(self) -> tuple[str, ...]:
        """Return the URLs of the attached servers, that is, of vLLM servers that the user runs.

        The file of --attach-file may change later; these are the URLs at the start.
        """
        listed = listed_servers(self)
        urls = tuple(listed.urls())
        if listed.problem and not listed.is_usable:
            raise SettingsError(
                f"--attach-file is {str(self.attach_file)!r}, which cannot be used "
                f"({listed.problem}); expected a file with one http://HOST:PORT per line"
            )
        if self.attach_dns and not urls:
            raise SettingsError(
                f"--attach-dns is {', '.join(self.attach_dns)!r}, at which no server is found; "
                "start a server, or correct the name"
            )
        if self.attach_file and not urls:
            raise SettingsError(
                f"--attach-file is {str(self.attach_file)!r}, which lists no server; add one "
                "http://HOST:PORT per line"
            )
        return urls

    @cached_property
    def of_features(self) -> Mapping[str, FeatureSettings]:
        """Return what the sides of features get of these options, by the feature's name."""
        return {feature.name: feature.settings(self) for feature in FEATURES}

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """Return the LoRA adapters of --lora."""
        adapters: dict[str, Adapter] = {}
        for argument in self.lora:
            try:
                adapter = read_adapter(argument, has_files=self.starts_engines)
            except ValueError as error:
                raise SettingsError(f"--lora is {argument!r}: {error}") from None
            if adapter.name in (*adapters, self.name):
                raise SettingsError(
                    f"--lora is {argument!r}, but the name {adapter.name!r} is already used; "
                    "choose another name"
                )
            adapters[adapter.name] = adapter
        return tuple(adapters.values())

    def check(self) -> None:
        """Raise SettingsError if options contradict each other or name unusable files."""
        self._check_attach()
        self._check_lora_root()
        self._check_size()
        self._check_gpus()
        self._check_engine_args()
        self._check_wire_tls()
        _ = self.of_features, self.adapters  # read now, so that errors are raised

    def _check_attach(self) -> None:
        """Refuse options that need an engine which kvroute starts itself."""
        refused = {
            "--max-replicas": self.max_replicas,
            "--engine-args": self.engine_args and not self.own_replicas,
            "--engine simulated": self.engine == "simulated",
            "--lora-root": self.lora_root,
        }
        for flag, value in refused.items():
            if self.servers and value:
                raise SettingsError(
                    f"{flag} does not work with --attach, because your servers run the model; "
                    f"leave {flag} out"
                )

    def _check_lora_root(self) -> None:
        if self.lora_root is None:
            return
        if self.engine_hooks == "off":
            raise SettingsError(
                f"--lora-root is {str(self.lora_root)!r}, and --engine-hooks is off; leave one of "
                "them out. Without --lora-root, adapters are named with --lora"
            )
        if not self.lora_root.is_dir():
            raise SettingsError(
                f"--lora-root is {str(self.lora_root)!r}, which is not a folder; create it"
            )

    def _check_size(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"--max-replicas is {self.max_replicas}, below --replicas, which is "
                f"{self.replicas}; set --max-replicas to {self.replicas} or more, such as "
                f"{2 * self.replicas}"
            )

    def _check_wire_tls(self) -> None:
        files = {
            "--wire-tls-cert": self.wire_tls_cert,
            "--wire-tls-key": self.wire_tls_key,
            "--wire-tls-ca": self.wire_tls_ca,
        }
        missing = [flag for flag, file in files.items() if file is None]
        if 0 < len(missing) < len(files):
            raise SettingsError(
                f"{missing[0]} is missing; --wire-tls-cert, --wire-tls-key and --wire-tls-ca "
                "belong together, set all or none of them"
            )

    def _check_gpus(self) -> None:
        gpus, ranks = self.gpus_per_replica or 0, self.data_parallel_size
        if gpus % ranks:
            raise SettingsError(
                f"--gpus-per-replica is {gpus} and --data-parallel-size is {ranks}; expected a "
                f"multiple of {ranks} GPUs, such as {ranks * max(1, gpus // ranks)}"
            )

    def _check_engine_args(self) -> None:
        if self.engine_args and self.engine == "simulated":
            raise SettingsError(
                f"--engine-args is {self.engine_args!r}, which only works with vLLM; leave it out, "
                "or set --engine vllm"
            )
        if refusal := owned_engine_args.refusal(self.engine_args):
            raise SettingsError(f"--engine-args: {refusal}")
