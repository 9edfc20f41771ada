"""The common prefix of all Redis keys of one model of one cluster."""

DEFAULT_CLUSTER = "default"  # id of a cluster for which no other id is configured


def key_prefix(cluster: str, model: str) -> str:
    """Return the key prefix for a cluster and a model: unique for each pair, with one hash tag."""
    return f"kvroute:{{{_escaped(cluster, '%{}/')}/{_escaped(model, '%{}')}}}"


def _escaped(name: str, characters: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in characters else char for char in name)
