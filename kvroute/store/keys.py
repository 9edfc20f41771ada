"""The common prefix of all Redis keys of one model of one cluster."""

DEFAULT_CLUSTER = "default"  # cluster id if the settings have none


def key_prefix(cluster: str, model: str) -> str:
    """Return the beginning of all keys of one model; each pair of cluster and model has its own.

    A Redis Cluster hashes only the part in braces (the hash tag), so one node has all these keys.
    """
    return f"kvroute:{{{_escaped(cluster, '%{}/')}/{_escaped(model, '%{}')}}}"


def _escaped(name: str, characters: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in characters else char for char in name)
