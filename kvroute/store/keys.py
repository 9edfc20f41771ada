"""The common prefix of all Redis keys of one model of one cluster."""

DEFAULT_CLUSTER = "default"  # the name of a cluster without a name


def key_prefix(cluster: str, model: str) -> str:
    """Unique for each pair, with one hash tag."""
    return f"kvroute:{{{_escaped(cluster, '%{}/')}/{_escaped(model, '%{}')}}}"


def _escaped(name: str, characters: str) -> str:
    return "".join(f"%{ord(each):02X}" if each in characters else each for each in name)
