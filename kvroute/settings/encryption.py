"""How connections between routers and replicas are encrypted, from the options."""

from kvroute.settings.options.common import CommonOptions
from kvroute.wire.tls import WireTls


def tls_of(options: CommonOptions) -> WireTls:
    """Return the settings of --wire-tls and of its files."""
    files = (options.wire_tls_cert, options.wire_tls_key, options.wire_tls_ca)
    return WireTls(options.wire_tls, *(str(file or "") for file in files))
