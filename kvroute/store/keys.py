"""The common prefix of all Redis keys of one model of one cluster."""

DEFAULT_CLUSTER = "default"  # the name of a cluster without a name


def key_prefix(cluster: str, model: str) -> str:
    """Return a prefix that is unique for each pair, with one hash tag."""
    return f"kvroute:{{{_escaped(cluster, '%{}/')}/{_escaped(model, '%{}')}}}"


def _escaped(name: str, characters: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in characters else char for char in name)
